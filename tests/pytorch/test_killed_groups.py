"""If a worker of a process group is killed, all of its party begin again at the same step, with the same bits."""

import json
from pathlib import Path

import pytest
from cluster import free_ports
from desk import Desk
from killed_scripts import calm, play

SCRIPT = str(Path(__file__).parent / "scripts" / "grouped.py")


def assert_same_bits(desk: Desk, words: list[str], kills: str, count: int, workers: int) -> None:
    words = ["--framework", "torch", "--reduce", "torch", *words]
    calmly, slowly = (
        ["python", SCRIPT, json.dumps({"epochs": 3, "shards": "--shards" in words, "pause": pause})]
        for pause in (0, 0.04)
    )
    undisturbed = calm(desk, "calm", words, calmly, "torch")
    disturbed = play(desk, "disturbed", words, slowly, "torch", kills=kills, count=count)
    assert len(undisturbed) == workers and [line.removesuffix("resumed") for line in disturbed] == undisturbed


@pytest.mark.processes
@pytest.mark.parametrize(
    "options", ["fsa", "fsa --shards 2", "diloco --inner-steps 4 --overlap 2"], ids=["party", "shards", "local"]
)
def test_a_party_whose_workers_are_killed_has_the_same_bits(options: str, desk: Desk) -> None:
    words = ["--parties", "2", "--workers", "2", "--algo", *options.split()]
    assert_same_bits(desk, words, "worker", 3, workers=4)


@pytest.mark.processes
def test_a_party_on_two_hosts_begins_again_on_both(desk: Desk) -> None:
    lines = ['central = "hub"']
    for name, party, *devices in (("hub", "hub"), ("a1", "A", "cpu"), ("a2", "A", "cpu"), ("b", "B", "cpu")):
        lines += ["[[host]]", "local = true", f'name = "{name}"', f'party = "{party}"', f"devices = {devices}"]
        lines += ['address = "127.0.0.1"', f"ports = {free_ports(4)}"]
    (desk.folder / "hosts.toml").write_text("\n".join(lines))
    assert_same_bits(desk, ["--hosts", str(desk.folder / "hosts.toml")], "A/worker", 2, workers=3)
