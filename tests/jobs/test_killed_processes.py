"""Processes of whole jobs are killed: the models have the bits of undisturbed jobs, and nothing is left."""

import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from forking import forked_geomx

pytestmark = pytest.mark.processes


ANY, HOSTS = "server|scheduler|worker|agent", "agent"
ROWS = {
    "fsa spread": ANY, "fsa bsc:0.02 spread": HOSTS, "fsa int8 flat": ANY, "fsa bsc:0.02 flat": ANY,
    "fsa p3 spread": ANY, "fsa dgt central": ANY, "fsa tsengine central": HOSTS, "hfa central": ANY,
    "hfa fp16 spread": ANY, "hfa sparseloco:0.05 spread": ANY, "diloco fp16 flat": ANY, "diloco int8 spread": ANY,
    "diloco sparseloco:0.05 central": ANY, "mixed spread": ANY, "esync central": ANY,
}  # fmt: skip
"""By name, of which processes some are killed; of agents also with their hosts."""


@pytest.mark.parametrize("name", ROWS)
def test_the_model_has_the_bits_of_an_undisturbed_job(recovery: Any, name: str, tmp_path: Path) -> None:
    local = name.startswith(("hfa", "diloco"))  # with several steps in a round
    options = [*recovery.JOBS[name], "--epochs", "1", "--batch-size", "128" if local else "512"]
    slowed = [*options, "--wan", "100ms"]  # so that there is time for kills
    calm = recovery.Disturbed(tmp_path / "calm", options, "", Random(0), start=forked_geomx).play(0)
    disturbed = recovery.Disturbed(
        tmp_path / "disturbed", slowed, ROWS[name], Random(name), (0.1, 0.6), forked_geomx
    ).play(4)
    assert calm.status == 0 and len(calm.weights) == 4, calm.output
    assert disturbed.kills, disturbed.output
    assert recovery.differs(name, disturbed, calm) == "", disturbed.output
    told = re.findall(r"(\S+) was killed by SIGKILL; started again", disturbed.output)
    told += re.findall(r"host (\S+): its agent was killed and started again", disturbed.output)
    killed = [kill.process.removesuffix(f"/{kill.kind}") for kill in disturbed.kills]
    # Not told: an agent that is killed before launch has heard of it, and what is killed when it has done all.
    assert told and not Counter(told) - Counter(killed), disturbed.output
    shared = Path("/dev/shm")
    mine = [path.name for path in shared.glob("geomx-*") if any(job in path.name for job in jobs_in(disturbed.output))]
    assert mine == []


def jobs_in(output: str) -> list[str]:
    return re.findall(r"^job (\S+):", output, re.MULTILINE)
