"""MXNet scripts that save their state go on at the same batch when their workers are killed, with the same bits."""

import pytest
from desk import Desk
from killed_scripts import play
from mxnet_scripts import SCRIPTS

pytestmark = pytest.mark.processes

WORDS = ["--framework", "mxnet", "--parties", "2", "--workers", "1", "--rank-scope", "global"]


@pytest.mark.parametrize("kind", ["network", "module"])
def test_a_script_whose_workers_are_killed_has_the_same_bits(kind: str, desk: Desk) -> None:
    calmly, slowly = (["python", str(SCRIPTS / "stateful.py"), kind, "3", each] for each in ("0", "0.1"))
    calm = play(desk, "calm", WORDS, calmly, "mxnet")
    disturbed = play(desk, "disturbed", WORDS, slowly, "mxnet", kills="worker|server", count=3)
    assert len(calm) == 2 and [line.removesuffix("resumed") for line in disturbed] == calm
