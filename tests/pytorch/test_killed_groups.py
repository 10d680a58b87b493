"""If a worker of a process group is killed, all of its party begin again at the same step, with the same bits."""

import json
import sys
from pathlib import Path

import pytest
from killed_scripts import play

SCRIPT = str(Path(__file__).parent / "scripts" / "grouped.py")


@pytest.mark.processes
@pytest.mark.parametrize(
    "options",
    ["--algo fsa", "--algo fsa --shards 2", "--algo diloco --inner-steps 4 --overlap 2"],
    ids=["party", "shards", "local"],
)
def test_a_party_whose_workers_are_killed_has_the_same_bits(options: str, tmp_path: Path) -> None:
    script = [sys.executable, SCRIPT, json.dumps({"epochs": 8, "shards": "shards" in options, "pause": 0.02})]
    words = ["--framework", "torch", "--reduce", "torch", "--parties", "2", "--workers", "2", *options.split()]
    calm = play(tmp_path / "calm", words, script)
    disturbed = play(tmp_path / "disturbed", words, script, kills="worker", count=3)
    assert len(calm) == 4 and [line.removesuffix("resumed") for line in disturbed] == calm
