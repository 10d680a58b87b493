"""Processes of whole jobs are killed: the models have the bits of undisturbed jobs, and nothing is left."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Any

import forks
import pytest
from cluster import ROOT
from forking import Served

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
    calm = recovery.Disturbed(tmp_path / "calm", options, "", Random(0), start=forked).play(0)
    disturbed = recovery.Disturbed(
        tmp_path / "disturbed", options, roles, Random(len(name)), start=forked
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


def forked(arguments: Sequence[str]) -> Served:
    """`geomx` of which all processes are forked."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = ["-m", "geomx_cli", *arguments]
    return Served(forks.server(), words, env=env, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, text=True)


def jobs_in(output: str) -> list[str]:
    return re.findall(r"^job (\S+):", output, re.MULTILINE)
