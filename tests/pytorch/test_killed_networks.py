"""A bundled network of PyTorch, whose processes are killed, ends with the bits of an undisturbed job."""

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from forking import forked_geomx
from idx import write_data


@pytest.mark.processes
@pytest.mark.parametrize("options", ["--algo fsa --compress fp16", "--algo diloco --inner-steps 4"])
def test_the_network_has_the_bits_of_an_undisturbed_job(recovery: Any, options: str, tmp_path: Path) -> None:
    data = write_data(tmp_path / "idx", 4 * 160, 64)
    words = [*options.split(), "--framework", "torch", "--network", "cnn", "--data-dir", str(data), "--batch-size", "8"]

    def play(name: str, kills: int) -> Any:
        start = partial(forked_geomx, imported="torch")
        roles = "server|scheduler|worker|agent"
        return recovery.Disturbed(tmp_path / name, words, roles, Random(name), start=start).play(kills)

    calm, disturbed = play("calm", 0), play("disturbed", 4)
    assert calm.status == disturbed.status == 0, disturbed.output
    assert disturbed.kills, disturbed.output
    assert disturbed.weights == calm.weights and len(calm.weights) == 4
