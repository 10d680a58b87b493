"""A worker of an MXNet script dies, and the others go on (`--on-worker-loss leave`)."""

import json

import pytest
from desk import Desk
from forked_launch import ForkedLaunch
from mxnet_scripts import SCRIPTS

pytestmark = pytest.mark.processes

RATE, STEPS, AT = 0.5, 10, 4


def test_optimizer_on_servers_gets_the_mean_over_the_others(desk: Desk) -> None:
    """The script divides by the number of workers that it began with."""
    words = ("--parties", "2", "--workers", "2", "--on-worker-loss", "leave", "--json")
    script = ("python", str(SCRIPTS / "loses_mxnet.py"))
    job = ForkedLaunch.run(desk, "--local", *words, "--", *script, imported="mxnet")
    assert job.returncode == 0, job.errors
    assert json.loads(job.output)["warnings"][0].startswith("A/worker:1 left at round 4; means are over the other")
    wanted = -RATE * (AT * (1 + 2 + 3 + 4) / 4 + (STEPS - AT) * (1 + 3 + 4) / 3)
    logs = [path.read_text() for path in sorted(desk.folder.glob("job/logs/*-worker-*.log"))]
    found = [[float(word) for word in log.split()[1:]] for log in logs if log.startswith("weights")]
    assert found == [pytest.approx([wanted, wanted])] * 3
