"""The bundled job on a cluster of two planes, started by hand: no launch, only the variables of old start scripts."""

import hashlib
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cluster import RUNTIME, Cluster, free_ports, until
from idx import write_data

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.jsonlines import read_objects
from geomx_cli.runtime.bundled import networks
from geomx_cli.runtime.bundled.checkpoint import Checkpoint

SAMPLES, BATCH = 512, 32
QUICK = {"GEOMX_EPOCHS": "1", "GEOMX_BATCH_SIZE": str(BATCH), "GEOMX_NETWORK": "linear"}
WORKERS = ("Aw0", "Aw1", "Bw0", "Bw1")


def start(cluster: Cluster, tmp_path: Path, **changes: Any) -> None:
    """Start twelve processes, with `changes` for single ones."""
    data = write_data(tmp_path / "data", SAMPLES)
    env = {**QUICK, "GEOMX_DATA_DIR": str(data), **changes.pop("env", {})}
    cluster.launch(RUNTIME, env=env, **changes)


def events_of(directory: Path, name: str) -> list[dict[str, Any]]:
    """The events that a process has written so far."""
    path = directory / "events" / f"{name}.jsonl"
    return [event for event, _ in read_objects(path)] if path.exists() else []


def test_twelve_processes_train(cluster: Cluster, tmp_path: Path) -> None:
    # Only for inspection: a process with a name and a directory writes its event log there.
    logs = {name: {"GEOMX_JOB_DIR": str(tmp_path), "GEOMX_PROCESS": name} for name in WORKERS}
    start(cluster, tmp_path, worker_env=logs, env={"GEOMX_NETWORK": "cnn"})
    cluster.finish()
    ends = []
    for name in WORKERS:
        events = events_of(tmp_path, name)
        assert sum(event.get("num_samples", 0) for event in events if event["event"] == "round") == SAMPLES // 4
        ends.append(next(event for event in events if event["event"] == "finished"))
    assert {end["rounds"] for end in ends} == {SAMPLES // 4 // BATCH}
    assert len({end["parameters"] for end in ends}) == 1
    assert not any("rror" in cluster.output(name) or "warning" in cluster.output(name) for name in cluster.processes)


@pytest.mark.parametrize(("algorithm", "files"), [("fsa", [2, 4]), ("diloco", [3, 4])])
def test_checkpoints(cluster: Cluster, tmp_path: Path, algorithm: str, files: list[int]) -> None:
    """Saved every few steps at the end of a round, and at the end; the last one has the final weights."""
    logs = {name: {"GEOMX_JOB_DIR": str(tmp_path), "GEOMX_PROCESS": name} for name in WORKERS}
    env = {"GEOMX_SAVE_EVERY": "2", "GEOMX_ALGO": algorithm, "GEOMX_INNER_STEPS": "3"}
    start(cluster, tmp_path, worker_env=logs, env=env)
    cluster.finish()
    found = [Checkpoint.read(tmp_path / "checkpoints" / f"step-{steps}.npz") for steps in files]
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(files)
    assert [item.samples for item in found] == [steps * BATCH for steps in files]
    assert [item.rounds for item in found] == (files if algorithm == "fsa" else [1, 2])
    assert 0 < found[0].seconds < found[1].seconds
    digest = hashlib.sha256()
    for name in networks.find("linear").initial_weights(1):
        digest.update(name.encode() + found[-1].weights[name].tobytes())
    ends = [event for event in events_of(tmp_path, "Aw0") if event["event"] == "finished"]
    assert ends[0]["parameters"] == digest.hexdigest()


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    (tmp_path / "step-1.npz").write_bytes(b"PK")
    with pytest.raises(InvalidSettings, match=r"step-1\.npz is no checkpoint"):
        Checkpoint.read(tmp_path / "step-1.npz")


@pytest.mark.parametrize(
    ("changes", "culprit", "says", "waiting", "status"),
    [
        (
            {"worker_env": {"Aw0": {"DMLC_NUM_WORKER": "3"}}},
            "Aw0", "expects 1 server and 3 workers, its scheduler 1 and 2", "waited 5 s for 1 of 2 workers", 3,
        ),
        (
            {"root_env": {"DMLC_NUM_GLOBAL_WORKER": "3"}},
            "root0", "expects 1 server and 3 workers, its scheduler 1 and 2", "waited 5 s for 1 of 1 server", 3,
        ),
        (
            {"worker_env": {"Bw1": {"DMLC_PS_ROOT_PORT": "{nobody}", "GEOMX_JOB_DIR": ".", "GEOMX_PROCESS": "Bw1"}}},
            "Bw1", "s for an answer of its scheduler at tcp://127.0.0.1:{nobody}",
            "waited 5 s for 1 of 2 workers", 6,
        ),
    ],
    ids=["worker count", "global count", "port"],
)  # fmt: skip
def test_wrong_variable_is_told(
    cluster: Cluster, tmp_path: Path, changes: dict[str, Any], culprit: str, says: str, waiting: str, status: int
) -> None:
    nobody = str(free_ports(1)[0])
    for variables in changes.get("worker_env", {}).values():
        variables.update({key: text.format(nobody=nobody) for key, text in variables.items()})
    cluster.environment["GEOMX_TIMEOUT"] = "5"
    start(cluster, tmp_path, **changes)
    statuses = cluster.wait()
    # The master may be done before another process fails.
    assert {statuses[name] for name in statuses.keys() - {"master", culprit}} <= {1, 6}
    assert statuses[culprit] == status
    outputs = {name: re.sub(r"\s+", " ", cluster.output(name)) for name in statuses}
    assert says.format(nobody=nobody) in outputs[culprit]
    assert outputs[culprit].count("error:") == 1
    warned = [event["message"] for event in events_of(tmp_path, culprit) if event["event"] == "warning"]
    assert warned == [f"its scheduler at tcp://127.0.0.1:{nobody} has not answered for 0.5 s"] * (culprit == "Bw1")
    for name in {"gs", "As", "Bs", "Asrv0", "Bsrv0"} - {culprit}:
        # On a busy machine the members of a party may all have joined before its server misses the one above.
        assert waiting in outputs[name] or "has it been started" in outputs[name]


def test_a_learning_rate_that_does_not_fit_is_told(cluster: Cluster, tmp_path: Path) -> None:
    rate = {"GEOMX_LR": "1e6", "GEOMX_MOMENTUM": "0", "GEOMX_NETWORK": "cnn"}
    # The worker that arrived first evaluates.
    logs = {name: {"GEOMX_JOB_DIR": str(tmp_path), "GEOMX_PROCESS": name} for name in ("Aw0", "Bw0")}
    start(cluster, tmp_path, worker_env=logs, parties=(1, 1), env=rate)
    cluster.finish()
    events = [event for name in logs for event in events_of(tmp_path, name)]
    (warning,) = [event["message"] for event in events if event["event"] == "warning"]
    assert warning.endswith("does the learning rate fit the optimizer? It is 1e+06 (--lr)")


STUCK = """
import time, mxnet as mx
kv = mx.kv.create("dist_sync")
value = mx.nd.ones((4,))
kv.init(0, value)
if kv.rank == 1:
    time.sleep(1000)
kv.push(0, value)
kv.pull(0, out=value)
print("waits", flush=True)
value.wait_to_read()
"""
CTRL_C, SIGTERM = (signal.SIGINT, 130, "interrupted by Ctrl-C"), (signal.SIGTERM, 143, "ended by SIGTERM")


def assert_ended(cluster: Cluster, name: str, number: signal.Signals, status: int, line: str) -> None:
    """The signal ends that process, which prints one line, and soon all others."""
    begun = len(cluster.output(name))
    cluster.processes[name].send_signal(number)
    assert cluster.wait()[name] == status, cluster.outputs()
    assert cluster.output(name)[begun:] == f"error: {line}\n"
    assert not any("Traceback" in cluster.output(other) for other in cluster.processes), cluster.outputs()


@pytest.mark.parametrize(
    ("name", "number", "status", "line"), [("s", *CTRL_C), ("srv0", *SIGTERM), ("w0", *CTRL_C), ("w0", *SIGTERM)]
)
def test_a_signal_ends_who_waits_for_others(
    cluster: Cluster, name: str, number: signal.Signals, status: int, line: str
) -> None:
    cluster.environment["GEOMX_TIMEOUT"] = "4"
    cluster.launch_flat(RUNTIME, workers=2, worker_env={"w1": {"GEOMX_RANK": "7"}})  # a rank that is refused
    until(lambda: "waiting for 1 of 2 workers" in cluster.output("srv0"))
    assert_ended(cluster, name, number, status, line)


@pytest.mark.parametrize(
    ("name", "number", "status", "line"),
    [("gs", *SIGTERM), ("root0", *CTRL_C), ("Asrv0", *SIGTERM), ("Aw1", *CTRL_C), ("Aw1", *SIGTERM)],
)
def test_a_signal_ends_who_trains_and_all_others(
    cluster: Cluster, tmp_path: Path, name: str, number: signal.Signals, status: int, line: str
) -> None:
    logs = {"Aw1": {"GEOMX_JOB_DIR": str(tmp_path), "GEOMX_PROCESS": "Aw1"}}
    start(cluster, tmp_path, worker_env=logs, parties=(2,), env={"GEOMX_EPOCHS": "100000"})
    until(lambda: any(event["event"] == "round" for event in events_of(tmp_path, "Aw1")))
    assert_ended(cluster, name, number, status, line)


@pytest.mark.parametrize(("number", "status", "line"), [CTRL_C, SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_signal_ends_a_script_that_waits_inside_mxnet(
    cluster: Cluster, tmp_path: Path, number: signal.Signals, status: int, line: str
) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    ranks = {f"w{rank}": {"GEOMX_RANK": str(rank)} for rank in range(2)}
    cluster.launch_flat([*RUNTIME, str(script)], workers=2, worker_env=ranks)
    until(lambda: "waits" in cluster.output("w0"))
    cluster.processes["w1"].kill()
    assert_ended(cluster, "w0", number, status, line)


@pytest.mark.processes
def test_the_help_names_the_variables_of_each_role() -> None:
    done = subprocess.run([*RUNTIME, "--help"], capture_output=True, text=True, timeout=240, check=True)
    for text in ("becomes the process of a job", "DMLC_ROLE_GLOBAL", "DMLC_PS_ROOT_URI", "master worker, in the"):
        assert text in done.stdout
