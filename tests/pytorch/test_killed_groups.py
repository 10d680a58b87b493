"""If a worker of a process group is killed, all of its party begin again at the same step, with the same bits."""

import json
from pathlib import Path

import pytest
from cluster import free_ports
from desk import Desk
from killed_scripts import play

SCRIPT = str(Path(__file__).parent / "scripts" / "grouped.py")


def found(desk: Desk, name: str, words: list[str], shards: bool = False, kills: str = "", count: int = 0) -> list[str]:
    options = {"epochs": 6, "shards": shards, "pause": 0.02 if count else 0.0}
    script = ["python", SCRIPT, json.dumps(options)]
    words = ["--framework", "torch", "--reduce", "torch", *words]
    lines = play(desk, name, words, script, "torch", kills=kills, count=count)
    return [line.removesuffix("resumed") for line in lines]


@pytest.mark.processes
@pytest.mark.parametrize(
    "options", ["fsa", "fsa --shards 2", "diloco --inner-steps 4 --overlap 2"], ids=["party", "shards", "local"]
)
def test_a_party_whose_workers_are_killed_has_the_same_bits(options: str, desk: Desk) -> None:
    words = ["--parties", "2", "--workers", "2", "--algo", *options.split()]
    calm = found(desk, "calm", words, "--shards" in words)
    assert len(calm) == 4 and found(desk, "disturbed", words, "--shards" in words, "worker", 3) == calm


@pytest.mark.processes
def test_a_party_on_two_hosts_begins_again_on_both(desk: Desk) -> None:
    lines = ['central = "hub"']
    for name, party, *devices in (("hub", "hub"), ("a1", "A", "cpu"), ("a2", "A", "cpu"), ("b", "B", "cpu")):
        lines += ["[[host]]", "local = true", f'name = "{name}"', f'party = "{party}"', f"devices = {devices}"]
        lines += ['address = "127.0.0.1"', f"ports = {free_ports(4)}"]
    (desk.folder / "hosts.toml").write_text("\n".join(lines))
    words = ["--hosts", str(desk.folder / "hosts.toml")]
    calm = found(desk, "calm", words)
    assert len(calm) == 3 and found(desk, "disturbed", words, kills="A/worker", count=2) == calm
