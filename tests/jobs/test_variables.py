"""Variables without effect are reported, wherever they are set."""

import sys
from pathlib import Path

import pytest
from cluster import ROOT, RUNTIME, Cluster
from desk import Desk
from mxnet_scripts import hooked

from geomx_cli.core.env_names import without_effect, without_effect_at_launch
from geomx_cli.core.jsonlines import read_objects

OF_GEOMX = {
    "DGT_INFO": "1",
    "PS_RESEND": "1", "PS_RESEND_TIMEOUT": "1000", "PS_DROP_MSG": "10", "PS_VERBOSE": "2", "DMLC_LOCAL": "1",
    "PS_HEARTBEAT_INTERVAL": "5", "PS_HEARTBEAT_TIMEOUT": "60", "DMLC_USE_KUBERNETES": "1",
    "MXNET_KVSTORE_USETREE": "1", "MXNET_KVSTORE_SERIAL_PUSH": "1", "MXNET_KVSTORE_REDUCTION_NTHREADS": "4",
    "MXNET_KVSTORE_DIST_ROW_SPARSE_VERBOSE": "1",
}  # fmt: skip


def test_what_has_no_effect_is_named_once_each() -> None:
    told = list(without_effect(OF_GEOMX))
    assert [sentence.split(" has no effect: ")[0] for sentence in told] == sorted(OF_GEOMX)
    for off in ("0", ""):
        assert list(without_effect(dict.fromkeys(OF_GEOMX, off))) == []
    honoured = {"DMLC_ROLE": "worker", "DMLC_INTERFACE": "eth0", "MXNET_KVSTORE_USE_HFA": "1", "PATH": "/bin"}
    honoured |= {"ENABLE_DGT": "2", "DMLC_K": "0.8", "ADAPTIVE_K_FLAG": "1", "DMLC_UDP_CHANNEL_NUM": "3"}
    honoured |= {"ENABLE_INTER_TS": "1", "ENABLE_INTRA_TS": "1", "MAX_GREED_RATE_TS": "0.8"}
    assert list(without_effect(honoured)) == []
    assert [sentence.split()[0] for sentence in without_effect(honoured, launching=True)] == [
        "DMLC_INTERFACE", "DMLC_ROLE", "ENABLE_INTER_TS", "ENABLE_INTRA_TS", "MXNET_KVSTORE_USE_HFA",
    ]  # fmt: skip
    set_on = {"a": {"PS_DROP_MSG": "1"}, "b": {"PS_DROP_MSG": "1"}}
    where = without_effect_at_launch({"DMLC_ROLE": "worker"}, set_on)
    assert [(sentence.split()[0], place) for sentence, place in where.items()] == [
        ("PS_DROP_MSG", "env of a, b: "), ("DMLC_ROLE", ""),
    ]  # fmt: skip


def test_every_process_started_by_hand_tells(cluster: Cluster, tmp_path: Path) -> None:
    argv, env = hooked("unaware.py", "0")
    env |= {"PS_DROP_MSG": "1", "DGT_INFO": "2", "PS_RESEND": "0", "GEOMX_JOB_DIR": str(tmp_path)}
    cluster.each = {name: {"GEOMX_PROCESS": name} for name in ("s", "srv0", "w0")}
    cluster.launch_flat(argv, workers=1, env=env)
    cluster.finish()
    for name in cluster.each:
        events = [event for event, _ in read_objects(tmp_path / "events" / f"{name}.jsonl")]
        warned = [event["message"] for event in events if event["event"] == "warning"]
        assert [sentence.split()[0] for sentence in warned] == ["DGT_INFO", "PS_DROP_MSG"]
        assert all(cluster.output(name).count(f"warning: {sentence}\n") == 1 for sentence in warned)


@pytest.mark.processes
def test_launch_tells_once(desk: Desk, tmp_path: Path) -> None:
    """Those set here and those in the inventory; processes that inherit them do not repeat the report."""
    argv, _ = hooked("unaware.py", "0")
    (tmp_path / "hosts.toml").write_text(
        f"""central = "hub"
[defaults]
python = "{sys.executable}"
env = {{ PS_RESEND = "1" }}
[[host]]
local = true
name = "hub"
party = "hub"
[[host]]
local = true
name = "one"
party = "one"
devices = ["cpu"]
"""
    )
    variables = {"PS_DROP_MSG": "1", "DMLC_INTERFACE": "eth7", "PS_VERBOSE": "0", "MXNET_KVSTORE_USE_HFA": "1"}
    done = desk.geomx("launch", "--job-dir", "job", "--", *argv, **variables)
    assert done.returncode == 0, done.stderr
    warnings = [line.partition(" has no effect")[0] for line in done.stderr.splitlines() if "no effect" in line]
    assert warnings == [
        "warning: env of hub, one: PS_RESEND",
        "warning: DMLC_INTERFACE",
        "warning: MXNET_KVSTORE_USE_HFA",
        "warning: PS_DROP_MSG",
    ]
    assert "PS_RESEND has no effect" in (tmp_path / "job" / "logs" / "one-server-0.log").read_text()


def test_an_interface_that_is_not_there_is_told_with_those_that_are(cluster: Cluster) -> None:
    argv = [*RUNTIME, str((ROOT / "tests") / "scripts" / "unaware.py"), "0"]
    cluster.launch(argv, env={"DMLC_INTERFACE": "eth77"}, parties=(1,))
    assert all(cluster.wait().values())
    for name in cluster.processes:
        text = cluster.output(name)
        assert "DMLC_INTERFACE=eth77: no such interface" in text and "this machine has " in text, (name, text)
