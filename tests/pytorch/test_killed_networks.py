"""A bundled network of PyTorch, whose processes are killed, ends with the bits of an undisturbed job."""

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from desk import Desk
from forking import forked_geomx
from idx import write_data
from rehearsal import Rehearsal


@pytest.mark.processes
@pytest.mark.parametrize("options", ["--algo fsa --compress fp16", "--algo diloco --inner-steps 4"])
def test_the_network_has_the_bits_of_an_undisturbed_job(
    recovery: Any, options: str, desk: Desk, tmp_path: Path
) -> None:
    data = write_data(tmp_path / "idx", 4 * 160, 64)
    words = [*options.split(), "--framework", "torch", "--network", "cnn", "--data-dir", str(data), "--batch-size", "8"]

    calm = Rehearsal(desk, "--local", "--job-dir", "calm", "--epochs", "2", *words, imported="torch")
    calm.finish()
    weights = {name: event["parameters"] for name, event in calm.finished().items()}
    roles, start = "server|scheduler|worker|agent", partial(forked_geomx, imported="torch")
    disturbed = recovery.Disturbed(tmp_path / "disturbed", words, roles, Random("disturbed"), start=start).play(4)
    assert disturbed.status == 0, disturbed.output
    assert disturbed.kills, disturbed.output
    assert disturbed.weights == weights and len(weights) == 4
