"""The bundled job on the cluster of two planes, started by hand: no launch, only the variables of old start
scripts.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import RUNTIME, Cluster, free_ports
from idx import write_data

from geomx_cli.events import read_events

SAMPLES, BATCH = 512, 32
QUICK = {"GEOMX_EPOCHS": "1", "GEOMX_BATCH_SIZE": str(BATCH)}
WORKERS = ("Aw0", "Aw1", "Bw0", "Bw1")


def start(cluster: Cluster, tmp_path: Path, **changes: Any) -> None:
    """Twelve processes; one is started with what `changes` says."""
    data = write_data(tmp_path / "data", SAMPLES)
    cluster.launch(RUNTIME, env={**QUICK, "GEOMX_DATA_DIR": str(data)}, **changes)


@pytest.mark.timeout(60)
def test_twelve_processes_train(cluster: Cluster, tmp_path: Path) -> None:
    # Only to see what they did: a process with a name and a directory writes its event log there.
    logs = {name: {"GEOMX_JOB_DIR": str(tmp_path), "GEOMX_PROCESS": name} for name in WORKERS}
    start(cluster, tmp_path, worker_env=logs)
    cluster.finish()
    ends = []
    for name in WORKERS:
        events = [event for event, _ in read_events(tmp_path / "events" / f"{name}.jsonl")]
        assert sum(event["num_samples"] for event in events if event["event"] == "round") == SAMPLES // 4
        ends.append(next(event for event in events if event["event"] == "finished"))
    assert {end["rounds"] for end in ends} == {SAMPLES // 4 // BATCH}
    assert len({end["parameters"] for end in ends}) == 1
    assert not any("rror" in cluster.output(name) or "warning" in cluster.output(name) for name in cluster.processes)


@pytest.mark.parametrize(
    ("changes", "culprit", "says", "waiting"),
    [
        (
            {"worker_env": {"Aw0": {"DMLC_NUM_WORKER": "3"}}},
            "Aw0", "was told 1 servers and 3 workers, its scheduler 1 and 2", "waited 5 s for 1 of 2 workers",
        ),
        (
            {"root_env": {"DMLC_NUM_GLOBAL_WORKER": "3"}},
            "root0", "was told 1 servers and 3 workers, its scheduler 1 and 2", "waited 5 s for 1 of 1 servers",
        ),
        (
            {"worker_env": {"Bw1": {"DMLC_PS_ROOT_PORT": "{nobody}"}}},
            "Bw1", "waited 5 s for an answer of its scheduler at tcp://127.0.0.1:{nobody}",
            "waited 5 s for 1 of 2 workers",
        ),
    ],
    ids=["worker count", "global count", "port"],
)  # fmt: skip
@pytest.mark.timeout(60)
def test_wrong_variable_is_told(
    cluster: Cluster, tmp_path: Path, changes: dict[str, Any], culprit: str, says: str, waiting: str
) -> None:
    nobody = str(free_ports(1)[0])
    for variables in changes.get("worker_env", {}).values():
        variables.update({key: text.format(nobody=nobody) for key, text in variables.items()})
    cluster.environment["GEOMX_TIMEOUT"] = "5"
    start(cluster, tmp_path, **changes)
    statuses = cluster.wait()
    # The master may be done before anybody else fails.
    assert {status for name, status in statuses.items() if name != "master"} == {1}
    outputs = {name: re.sub(r"\s+", " ", cluster.output(name)) for name in statuses}
    assert says.format(nobody=nobody) in outputs[culprit]
    assert outputs[culprit].count("error:") == 1
    for name in {"gs", "As", "Bs", "Asrv0", "Bsrv0"} - {culprit}:
        assert waiting in outputs[name]
