"""Processes of whole jobs are killed: the models have the bits of undisturbed jobs, and nothing is left."""

import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from forking import forked_geomx

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("hfa fp16 spread", "server|scheduler|worker"), ("diloco int8 spread", "server|scheduler|worker"),
        ("fsa bsc:0.02 spread", "agent"), ("fsa tsengine central", "agent"),
    ],
)  # fmt: skip
def test_the_model_has_the_bits_of_an_undisturbed_job(recovery: Any, name: str, roles: str, tmp_path: Path) -> None:
    options = [*recovery.JOBS[name], "--epochs", "1"]
    calm = recovery.Disturbed(tmp_path / "calm", options, "", Random(0), start=forked_geomx).play(0)
    disturbed = recovery.Disturbed(
        tmp_path / "disturbed", options, roles, Random(len(name)), start=forked_geomx
    ).play(6)
    assert calm.status == disturbed.status == 0, disturbed.output
    assert disturbed.kills, disturbed.output
    assert disturbed.weights == calm.weights and len(calm.weights) >= 4
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
