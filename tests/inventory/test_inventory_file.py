"""The inventory file: its contents, line numbers, and the message for each mistake."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import ROOT
from desk import Desk

from geomx_cli.commands._inventory import read_inventory
from geomx_cli.commands.inventory_reference import page
from geomx_cli.core import starter
from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.inventory import Host, Inventory, Local, Request, Ssh
from geomx_cli.inventory.file import InventoryFile
from geomx_cli.inventory.keys import HOST_KEYS, LINK_KEYS, SSH_KEYS, TOP_KEYS, Lines
from geomx_cli.inventory.keys import Path as KeyPath

TEMPLATE = ROOT / "templates" / "hosts.toml"

HUB = '[[host]]\nname = "h"\nparty = "hub"\nssh = "192.0.2.1"\n'
A1 = '[[host]]\nname = "a1"\nparty = "A"\nssh = "192.0.2.2"\ndevices = ["cpu"]\n'
B1 = '[[host]]\nname = "b1"\nparty = "B"\nssh = "192.0.2.3"\ndevices = ["cpu"]\n'
GOOD = HUB + A1
SPREAD = "topology spread: 2 parties train and their hosts reach each other"
LINK = '[[link]]\nfrom = "A"\nto = "hub"\nrate = "50mbit"\ndelay = "40ms"\n'
FINGERPRINT = "SHA256:mVPwvezndPv/ARoIadVY98vAC0g+P/5633yTC4d/wXE"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with an SSH alias and a key."""
    folder = tmp_path / "home" / ".ssh"
    folder.mkdir(parents=True)
    (folder / "config").write_text("Host box\n  HostName 198.51.100.4\n")
    (folder / "mine").write_text("a key")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def read(folder: Path, text: str) -> InventoryFile:
    path = folder / "hosts.toml"
    path.write_text(text)
    return read_inventory(path)


def complaint(folder: Path, text: str) -> tuple[str, str]:
    with pytest.raises(InvalidSettings) as caught:
        read(folder, text)
    assert caught.value.exit_code == 3
    return caught.value.message, caught.value.hint


FULL = """
central = "hub"
topology = "spread"
global_servers = 2
local_servers = 2

[defaults]
user = "alice"
ssh_port = 2222
jump = "gate, bob@[2001:db8::9]:2022"
python = "/opt/py"
threads = 2
ports = [9000, 9001, 9002, 9003, 9004, 9005, 9006]
key = "~/.ssh/mine"
env = { ONE = "1", TWO = "2" }

[[host]]
name = "h"
party = "hub"
ssh = "192.0.2.1"
user = "carol"
address = "10.0.0.1"
wan_address = "h.example.org"
listen = "0.0.0.0"
fingerprint = "SHA256:mVPwvezndPv/ARoIadVY98vAC0g+P/5633yTC4d/wXE="

[[host]]
name = "a1"
party = "A"
ssh = "box"
devices = ["gpu1", "cpu", "cpu"]
ports = "9100-9119"
threads = 8
workdir = "~/work"
state_dir = "/data/gx/"
env.TWO = "two"

[[host]]
name = "a2.example.org"
party = "A"
interface = "eth0"
runs = ["server"]

[[host]]
name = "here"
party = "B"
local = true
address = "2001:DB8::0:1"
devices = ["cpu"]

[job]
lr = 1
time_limit = "2h"
window = 4096
silence = 8
optimizer = "adam"
wan = ""
"""


def test_a_default_may_be_written_by_its_word(tmp_path: Path) -> None:
    found = read(tmp_path, GOOD + '[job]\nlr = "auto"\ntime_limit = "never"\nmax_staleness = "unlimited"\n')
    assert found.job == {"lr": 0.0, "time_limit": 0.0, "max_staleness": -1}


def test_a_whole_file(tmp_path: Path, home: Path) -> None:
    found = read(tmp_path, FULL)
    assert found.job == {
        "lr": 1.0, "time_limit": 7200.0, "window": 4096, "silence": 8.0, "optimizer": "adam", "wan": "",
    }  # fmt: skip
    inventory = found.inventory
    assert (inventory.topology, inventory.global_servers, inventory.local_servers) == ("spread", 2, 2)
    assert (inventory.central.name, inventory.central.workers) == ("hub", 0)
    assert [(party.name, party.workers) for party in inventory.parties] == [("A", 3), ("B", 1)]
    reached = {"port": 2222, "user": "alice", "jump": "gate,bob@[2001:db8::9]:2022", "key": str(home / ".ssh/mine")}
    common: dict[str, Any] = {"python": "/opt/py", "threads": 2, "ports": (*range(9000, 9007),)}
    env = {"ONE": "1", "TWO": "2"}
    hub = Ssh(**{**reached, "user": "carol"}, address="192.0.2.1", fingerprint=FINGERPRINT)
    assert inventory.hosts == (
        Host(
            **common, env=env, name="h", parties=("hub",), access=hub, address="10.0.0.1", wan_address="h.example.org",
            listen="0.0.0.0",
        ),
        Host(
            **{**common, "threads": 8, "ports": (*range(9100, 9120),)}, env={"ONE": "1", "TWO": "two"}, name="a1",
            parties=("A",), access=Ssh(**reached, address="box"), address="198.51.100.4",
            devices=("gpu1", "cpu", "cpu"), workdir="~/work", state_dir="/data/gx",
        ),
        Host(
            **common, env=env, name="a2.example.org", parties=("A",), access=Ssh(**reached, address="a2.example.org"),
            interface="eth0", runs=("server",),
        ),
        Host(**common, env=env, name="here", parties=("B",), address="2001:db8::1", devices=("cpu",)),
    )  # fmt: skip


def test_nodes_of_two_clusters(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        HUB + '[[host]]\nname = "a"\nparty = "A"\nallocator = "slurm"\nnodes = 2\ndevices = ["cpu", "cpu"]\n'
        'login = "gate.example.org"\nuser = "alice"\npartition = "gpu"\ntime = "4h"\nsbatch = ["--qos=high"]\n'
        '[[host]]\nname = "b"\nparty = "B"\nallocator = "slurm"\ndevices = ["cpu"]\npython = "/opt/py"\n',
    )
    inventory = found.inventory
    assert inventory.requests == (
        Request(
            name="a", allocator="slurm", login=Ssh(address="gate.example.org", user="alice"), partition="gpu",
            time=14400.0, arguments=("--qos=high",),
        ),
        Request(name="b", allocator="slurm", login=Local(), python="/opt/py"),
    )  # fmt: skip
    assert [host.name for request in inventory.requests for host in inventory.hosts_for(request)] == ["a-1", "a-2", "b"]
    assert [(party.name, party.workers) for party in inventory.parties] == [("A", 4), ("B", 1)]
    assert [host.shares_files for host in inventory.hosts] == [False, False, False, True]
    assert "slurm gives a its 2 machines at launch" in found.notes


def test_a_short_file(tmp_path: Path) -> None:
    found = read(tmp_path, A1 + HUB)
    assert found.inventory.central.name == "hub"
    assert found.notes == ("the central party is hub, which has no devices",)
    assert {host.ports for host in found.inventory.hosts} == {tuple(range(9100, 9164))}
    assert [host.near_address for host in found.inventory.hosts] == ["192.0.2.2", "192.0.2.1"]
    everybody = read(tmp_path, A1 + B1)
    assert (everybody.inventory.central.name, everybody.inventory.central.workers) == ("A", 1)
    assert everybody.notes == ("the central party is A, the first; its workers train like the others",)
    assert read(tmp_path, 'central = "B"\n' + A1 + B1).notes == ()


# The file's text; the line of the mistake; parts of the message and of the advice.
MISTAKES: dict[str, tuple[str, int, str, str]] = {
    "empty": ("", 1, "there is no host", "write [[host]]"),
    "comments only": ("# nothing\n\n", 1, "there is no host", 'name = "beijing-1"'),
    "no host": ('central = "a"\n', 1, "there is no host", "write [[host]]"),
    "syntax: no quotes": (GOOD + "user = alice\n", 10, "invalid TOML: Invalid value", "text stands in quotes"),
    "syntax: no value": (GOOD + "user\n", 10, "invalid TOML: Expected '='", "a line is a key and a value"),
    "syntax: open list": (GOOD + "runs = [\n", 10, "invalid TOML:", ""),
    "syntax: twice": (GOOD + 'name = "x"\n', 10, "invalid TOML: Cannot overwrite a value", "keep one of the two"),
    "syntax: open quotes": (GOOD + 'user = "al\n', 10, "invalid TOML: Illegal character", "close the quotes"),
    "table twice": ("[job]\n[job]\n" + GOOD, 2, "invalid TOML: Cannot declare", "under the first one"),
    "host in one bracket": (GOOD.replace("[[host]]", "[host]"), 5, "invalid TOML: Cannot declare", "in two brackets"),
    "one host in one bracket": (HUB.replace("[[host]]", "[host]"), 1, "host is a table", "in two brackets"),
    "unknown key at the top": ("colour = 1\n" + GOOD, 1, "there is no key 'colour' here", "choose one of central, "),
    "misspelt key at the top": ('centrall = "hub"\n' + GOOD, 1, "no key 'centrall'", "did you mean central?"),
    "misspelt table": (GOOD + "[jobs]\n", 10, "no key 'jobs'", "did you mean job?"),
    "misspelt key": (GOOD + 'adress = "10.0.0.1"\n', 10, "no key 'adress'", "did you mean address?"),
    "host's key at the top": ('address = "10.0.0.1"\n' + GOOD, 1, "no key 'address'", "it stands under [[host]]"),
    "top's key under a host": (GOOD + 'topology = "flat"\n', 10, "no key 'topology'", "top of the file"),
    "option under a host": (GOOD + "lr = 1\n", 10, "no key 'lr'", "stands in the table [job]"),
    "own key in defaults": ('[defaults]\nparty = "x"\n' + GOOD, 2, "no key 'party'", "differs from host to host"),
    "missing name": ('[[host]]\nparty = "A"\n' + GOOD, 1, "this host has no name", 'write name = "'),
    "missing party": (GOOD + '[[host]]\nname = "x"\n', 10, "this host has no party", 'write party = "'),
    "duplicate host": (GOOD + A1, 11, "a host called a1 is there already", "a name of its own"),
    "bad name": (GOOD.replace('"a1"', '"1 a"'), 6, "name: '1 a' is no name", "begins with a letter"),
    "name is a number": (GOOD.replace('"a1"', "1"), 6, "name: it is a number and must be text", "in quotes"),
    "empty text": (GOOD + 'user = ""\n', 10, "user: '' is no text", "leave the key out"),
    "party called global": (GOOD.replace('"A"', '"global"'), 7, "cannot be called global", "another name"),
    "unknown central": ('central = "hubb"\n' + GOOD, 1, "no host belongs to the central party", "did you mean hub?"),
    "central is a list": ('central = ["hub"]\n' + GOOD, 1, "central: it is a list and must be text", ""),
    "only one party": (A1, 1, "all hosts belong to A", "another party"),
    "party without devices": (GOOD + B1.replace('devices = ["cpu"]', ""), 10, "party B has no devices", '["cpu"]'),
    "no devices anywhere": (HUB + A1.replace('devices = ["cpu"]', ""), 5, "party A has no devices", '["cpu"]'),
    "bad topology": ('topology = "ring"\n' + GOOD, 1, "there is no topology 'ring'", "auto, central, spread, flat"),
    "unknown allocator": (GOOD + 'allocator = "slrum"\n', 10, "there is no allocator 'slrum'", "did you mean slurm?"),
    "nodes of a machine": (GOOD + "nodes = 2\n", 10, "nodes: it is for machines that an allocator gives", "slurm"),
    "ssh of nodes": (GOOD + 'allocator = "slurm"\n', 8, "ssh: the allocator gives the machines", "login names"),
    "short time limit": (
        GOOD + '[[host]]\nname = "b"\nparty = "B"\ndevices = ["cpu"]\nallocator = "slurm"\ntime = "5s"\n', 15,
        "time: a time limit of 5.0 s is too short", '"4h"',
    ),
    "link without an end": (
        GOOD + LINK.replace('to = "hub"\n', ""), 10, "this link has no to", 'write to = "hub" under it',
    ),
    "link from nowhere": (GOOD + LINK.replace('"A"', '"a"'), 11, "no host belongs to party 'a'", "did you mean A?"),
    "link to itself": (GOOD + LINK.replace('"hub"', '"A"'), 10, "leads from A to itself", "another party"),
    "link twice": (GOOD + LINK + LINK, 15, "the link from A to hub is there already", "for each direction"),
    "link without effect": (
        GOOD + '[[link]]\nfrom = "A"\nto = "hub"\n', 10, "neither rate nor delay", 'rate = "50mbit"',
    ),
    "link that carries nothing": (
        GOOD + LINK.replace("50mbit", "0mbit"), 13, "rate: a link of 0 bit/s", "leave it out",
    ),
    "link with a long delay": (GOOD + LINK.replace("40ms", "2h"), 14, "is more than a minute", "40ms"),
    "link that loses": (GOOD + LINK + "loss = 0.1\n", 15, "there is no key 'loss' here", "choose one of from, to"),
    "link in one bracket": (GOOD + "[link]\n", 10, "link is a table", "in two brackets"),
    "no servers": ("global_servers = 0\n" + GOOD, 1, "global_servers: 0 is out of range", "from 1 to 256"),
    "flat with local servers": (
        'topology = "flat"\nlocal_servers = 2\n' + GOOD, 2, "flat has no local servers", "leave local_servers out",
    ),
    "flat with central workers": (
        'topology = "flat"\n' + A1 + B1, 6, "flat has no workers in the central party, A", "another topology",
    ),
    "bad device": (GOOD.replace("cpu", "tpu"), 9, "devices: 'tpu' is no device", 'write "cpu", or "gpu0"'),
    "device in other words": (GOOD.replace("cpu", "cuda:1"), 9, "devices: 'cuda:1' is no device", 'write "gpu1"'),
    "gpu twice": (GOOD.replace('"cpu"', '"gpu0", "gpu0"'), 9, "devices: gpu0 is there twice", "one worker"),
    "devices without brackets": (GOOD.replace('["cpu"]', '"cpu"'), 9, "devices: it is text", 'write ["cpu"]'),
    "numbers as devices": (GOOD.replace('"cpu"', "0"), 9, "devices: 0 in the list is a number", "write ["),
    "CUDA_VISIBLE_DEVICES by hand": (
        GOOD.replace("cpu", "gpu0") + '[host.env]\nCUDA_VISIBLE_DEVICES = "1"\n', 11, "its entry in devices", "leave",
    ),
    "bad IPv4": (GOOD + 'address = "10.0.0.300"\n', 10, "'10.0.0.300' is no IPv4 address", "from 0 to 255"),
    "bad IPv6": (GOOD + 'address = "2001:db8:::1"\n', 10, "'2001:db8:::1' is no IPv6 address", "2001:db8::1"),
    "IPv6 in brackets": (GOOD + 'address = "[::1]"\n', 10, "'[::1]' is more than an address", 'write "::1"'),
    "IPv6 with a zone": (GOOD + 'address = "fe80::1%eth0"\n', 10, "on one machine only", "without a zone"),
    "unknown site": (GOOD + 'reachable_from = ["hob"]\n', 10, "no host belongs to party 'hob'", "hub"),
    "unreachable": (A1 + HUB + "reachable_from = []\n", 10, "hub/global_scheduler:0 runs there", "add 'A'"),
    "any address": (GOOD + 'wan_address = "0.0.0.0"\n', 10, "nobody can dial 0.0.0.0", "listen says"),
    "address with a port": (GOOD + 'address = "10.0.0.1:22"\n', 10, "is more than an address", 'write "10.0.0.1" here'),
    "ssh with a user": (HUB.replace("192.", "al@192.") + A1, 4, "is more than an address", 'under it user = "al"'),
    "ssh as ssh takes it": (
        HUB.replace("192.0.2.1", "jo@corp@192.0.2.1:2222") + A1, 4, "'jo@corp@192.0.2.1:2222' is more than",
        'write "192.0.2.1" here, and under it user = "jo@corp" and ssh_port = 2222',
    ),
    "name with a blank": (GOOD + 'address = "my host"\n', 10, "neither an IP address nor the name", "192.0.2.10"),
    "loopback among others": (GOOD + 'address = "127.0.0.1"\n', 10, "nobody else can dial 127.0.0.1", "from 192.0.2.1"),
    "listen on a name": (GOOD + 'listen = "eth0"\n', 10, "listen: 'eth0' is no IP address", '"0.0.0.0"'),
    "bad interface": (GOOD + 'interface = "eth 0"\n', 10, "'eth 0' is no network interface", '"eth0"'),
    "port 0": (GOOD + "ports = [0]\n", 10, "ports: 0 is no port", "between 1 and 65535"),
    "port 70000": (GOOD + 'ports = "69990-70000"\n', 10, "ports: 70000 is no port", "between 1 and 65535"),
    "bad range": (GOOD + 'ports = "9100-"\n', 10, "ports: '9100-' is no range", 'write "9100-9119"'),
    "range backwards": (GOOD + 'ports = "9119-9100"\n', 10, "runs backwards", 'write "9100-9119"'),
    "no port": (GOOD + "ports = []\n", 10, "ports: the list is empty", "9100-9119"),
    "text among ports": (GOOD + 'ports = [1, "2"]\n', 10, "ports: '2' in the list is text", "9100-9119"),
    "port twice": (GOOD + "ports = [9100, 9100]\n", 10, "ports: 9100 is there twice", ""),
    "ports true": (GOOD + "ports = true\n", 10, "ports: it is true or false and must be", "9100-9119"),
    "one address, too few ports": (
        HUB + "ports = [1, 2, 3]\n" + A1.replace("0.2.2", "0.2.1") + "ports = [3]\n", 11,
        "needs 1 port for its schedulers and servers (A/scheduler:0) and has 1, which it shares with h at 192.0.2.1",
        "give it more",
    ),
    "too few ports": (
        HUB + "ports = 9100\n" + A1, 5,
        "needs 3 ports for its schedulers and servers (hub/global_scheduler:0, hub/global_server:0, hub/scheduler:0)"
        " and has 1", "more",
    ),
    "too few ports for all": ('[defaults]\nports = "9100-9101"\n' + HUB + A1, 2, "host h needs 3 ports", "more"),
    "bad fingerprint": (GOOD + 'fingerprint = "aa:bb"\n', 10, "'aa:bb' is no fingerprint", "ssh-keygen -lf"),
    "bad jump": (GOOD + 'jump = "gate:0"\n', 10, "jump: 'gate:0' is no machine", "user@host:port"),
    "bad user": (GOOD + 'user = "-oProxy"\n', 10, "user: '-oProxy' is no name of an account", "alice"),
    "bad SSH port": (GOOD + "ssh_port = 70000\n", 10, "ssh_port: 70000 is out of range", "from 1 to 65535"),
    "SSH port as text": (GOOD + 'ssh_port = "22"\n', 10, "ssh_port: it is text and must be a whole number", ""),
    "no such key": (GOOD + 'key = "keys/none"\n', 10, "there is no private key /", "where it lies"),
    "no such key for all": ('[defaults]\nkey = "~/x"\n' + GOOD, 2, "there is no private key /", ""),
    "local and SSH": (GOOD + 'local = true\naddress = "10.0.0.1"\n', 8, "ssh is for SSH, and local = true", "leave"),
    "local without address": (
        HUB + '[[host]]\nname = "a"\nparty = "A"\ndevices = ["cpu"]\nlocal = true\n', 5, "do not know how to dial it",
        "address = ",
    ),
    "local as text": (GOOD + 'local = "yes"\n', 10, "local: it is text and must be true or false", "leave quotes out"),
    "workdir relative": (GOOD + 'workdir = "work"\n', 10, "workdir: 'work' is a relative path", '"~/work"'),
    "state_dir relative": (GOOD + 'state_dir = "./x"\n', 10, "state_dir: './x' is a relative path", "write "),
    "python relative": (GOOD + 'python = "venv/bin/python"\n', 10, "python: 'venv/bin/python' is a relative", "whole"),
    "no threads": (GOOD + "threads = 0\n", 10, "threads: 0 is out of range", "from 1 to 1024"),
    "threads true": (GOOD + "threads = true\n", 10, "threads: it is true or false and must be a whole", ""),
    "env not a table": (GOOD + 'env = "A=1"\n', 10, "env: it is text and must be a table", '{ NAME = "value" }'),
    "env with a bad name": (GOOD + 'env = { "A B" = "1" }\n', 10, "env: 'A B' is no name of a variable", "letters"),
    "env with a number": (GOOD + "[host.env]\nA = 1\n", 11, "env: A is a number and must be text", 'write A = "1"'),
    "env of our own": (GOOD + 'env.DMLC_ROLE = "worker"\n', 10, "DMLC_ROLE is set by geomx itself", "[job]"),
    "unknown role": (GOOD + 'runs = ["servr"]\n', 10, "runs: there is no role 'servr'", "did you mean server?"),
    "worker as a role": (GOOD + 'runs = ["worker"]\n', 10, "runs: workers follow from devices", "devices = "),
    "role run by nobody": (GOOD + 'runs = ["server"]\n', 10, "no host of party A runs its scheduler", "add "),
    "role that a party has not": (GOOD + 'runs = ["global_server"]\n', 10, "party A has no global_server", "take"),
    "role twice": (
        GOOD + 'runs = ["scheduler"]\n' + A1.replace("a1", "a2") + 'runs = ["scheduler", "server"]\n', 16,
        "scheduler of party A is to run on a1 and a2", "in runs of a1 only",
    ),
    "unknown option": (GOOD + "[job]\nbtch_size = 1\n", 11, "no option 'btch_size'", "did you mean batch_size?"),
    "option with a hyphen": (GOOD + "[job]\nbatch-size = 1\n", 11, "no option 'batch-size'", "batch_size?"),
    "value of an option": (GOOD + "[job]\nlr = -1\n", 11, "lr: -1.0 is out of range", "from 0 to"),
    "type of an option": (GOOD + '[job]\nepochs = "4"\n', 11, "epochs: it is text and must be a whole number", ""),
    "unit of an option": (GOOD + '[job]\ntime_limit = "5 parsec"\n', 11, "time_limit: '5 parsec' is no", "30ms"),
    "choice of an option": (GOOD + '[job]\noptimizer = "sdg"\n', 11, "optimizer: there is no 'sdg'", "did you mean"),
    "unknown algorithm": (GOOD + '[job]\nalgo = "fas"\n', 11, "algo: there is no 'fas'", "did you mean fsa?"),
    "workers in the job": (GOOD + "[job]\nworkers = 2\n", 11, "workers follows from the hosts", "leave it out"),
    "topology in the job": (GOOD + '[job]\ntopology = "flat"\n', 11, "no option of a job", "top of the file"),
    "unknown client": (GOOD + '[ssh]\nclient = "opnssh"\n', 11, "client: there is no client 'opnssh'", "did you mean"),
    "job not a table": ("job = 1\n" + GOOD, 1, "job is a number and must be a table", "write [job]"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_each_mistake_is_named_with_its_line_and_what_to_write(tmp_path: Path, case: str) -> None:
    text, line, what, instead = MISTAKES[case]
    message, hint = complaint(tmp_path, text)
    assert message.startswith(f"hosts.toml:{line}: "), (message, hint)
    assert what in message
    assert instead in hint
    assert hint


def test_all_mistakes_are_told_at_once_in_the_order_of_the_lines(tmp_path: Path) -> None:
    text = "colour = 1\n" + GOOD + "ports = 0\n[job]\nlr = true\n" + A1
    message, hint = complaint(tmp_path, text)
    assert message.splitlines() == [
        "hosts.toml has 4 mistakes:",
        "  hosts.toml:1: there is no key 'colour' here",
        "    choose one of central, topology, global_servers, local_servers, host, link, defaults, job, ssh",
        "  hosts.toml:11: ports: 0 is no port",
        "    a port lies between 1 and 65535",
        "  hosts.toml:13: lr: it is true or false and must be a number",
        "    write lr = 0.1",
        "  hosts.toml:15: a host called a1 is there already",
        "    give each host a name of its own; one machine may have several",
    ]
    assert hint == ""


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="there is no inventory") as caught:
        read_inventory(tmp_path / "none.toml")
    assert "geomx init" in caught.value.hint
    with pytest.raises(InvalidSettings, match="Is a directory"):
        read_inventory(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'central = "hub"\nuser = "Jos\xe9"\n')
    with pytest.raises(InvalidSettings, match=r"latin\.toml:2: this is not UTF-8"):
        read_inventory(tmp_path / "latin.toml")


STRANGE = {
    "digits": ("central = 'hub'\nx = " + "9" * 5000, "hosts.toml:2: a number has too many digits"),
    "sixteen": ("[[host]]\nports = [0x" + "f" * 9000 + "]", "hosts.toml: a number has too many digits"),
    "nested": ("a = " + "[" * 5000 + "]" * 5000, "hosts.toml is nested too deeply"),
    "dotted": ("[[host]]\nports = [{" + "a." * 5000 + "a = 1}]", "hosts.toml"),
    "long name": ("[[host]]\nname = '" + "x" * (1 << 20) + "'", "is no name"),
    "long key": ("x" * (1 << 20) + " = 1", "there is no key"),
    "twice": (f"{'x' * (1 << 20)} = 1\n" * 2, "invalid TOML"),
    "many keys": ("".join(f"x{number} = 1\n" for number in range(10_000)), "hosts.toml has 10001 mistakes"),
    "large": ("#" * ((4 << 20) + 1), "has more than 4 MiB"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_strange_text_gets_one_short_message(tmp_path: Path, case: str) -> None:
    text, words = STRANGE[case]
    message, hint = complaint(tmp_path, text)
    assert words in message and len(message) + len(hint) < 20_000


def test_an_inventory_is_a_plain_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path / "pipe.toml", Path("/dev/zero")):
        with pytest.raises(InvalidSettings, match="is no plain file"):
            read_inventory(path)


LINES = '''# a comment with [brackets] and = signs
central = "hub"  # [job]
text = """
[not.a.table]
x = 1
"""
'quoted key'.sub = [
  1,  # ]
  { a = "]" },
]

[defaults]
env = { A = "1", B = "2" }
[[host]]
name = 'a # b'
[host.env]
C = "="

[[host]]
  runs = [["x"],
    ["y"]]
  last = 1
[a."b.c"]
d.e = \'\'\'
f = 1\'\'\'
g = 2
'''


def test_lines_of_tables_and_keys() -> None:
    wanted: dict[KeyPath, int] = {
        ("central",): 2, ("text",): 3, ("quoted key", "sub"): 7, ("quoted key", "sub", 1, "a"): 7, ("defaults",): 12,
        ("defaults", "env"): 13, ("defaults", "env", "B"): 13, ("host", 0): 14, ("host", 0, "name"): 15,
        ("host", 0, "env"): 16, ("host", 0, "env", "C"): 17, ("host", 1): 19, ("host", 1, "runs"): 20,
        ("host", 1, "last"): 22, ("a", "b.c", "d", "e"): 24, ("a", "b.c", "g"): 26, ("none",): 1, (): 1,
    }  # fmt: skip
    lines = Lines.of(LINES)
    assert {path: lines.of_path(path) for path in wanted} == wanted
    assert Lines.of(LINES.replace("\n", "\r\n")).of_path(("a", "b.c", "g")) == 26


def test_the_template_is_the_example_and_names_every_key() -> None:
    text = TEMPLATE.read_text()
    assert (ROOT / "hosts.example.toml").read_text() == text
    found = read_inventory(TEMPLATE)
    assert {party.name: party.workers for party in found.inventory.parties} == {"shenzhen": 2, "chengdu": 2}
    for key in (*TOP_KEYS, *HOST_KEYS):
        assert f"\n{key.name} = " in text or f"\n# {key.name} = " in text


def test_the_template_holds_with_everything_that_is_commented_out(tmp_path: Path, home: Path) -> None:
    (home / ".ssh" / "id_ed25519").write_text("a key")
    lines = TEMPLATE.read_text().splitlines()
    keys = {key.name for key in (*TOP_KEYS, *HOST_KEYS)}
    opened = [
        line.removeprefix("# ") if line == "# [[host]]" or line[2:].split(" = ")[0] in keys else line for line in lines
    ]
    text = "\n".join(opened).replace('runs = ["scheduler"]', 'runs = ["scheduler", "server", "global_server"]')
    found = read(tmp_path, text)
    assert found.inventory.topology == "spread"
    assert [host.name for host in found.inventory.hosts if host.shares_files] == ["here"]
    assert [host.name for host in found.inventory.hosts_for(found.inventory.requests[0])] == ["lanzhou-1", "lanzhou-2"]


@pytest.mark.parametrize("key", [*TOP_KEYS, *HOST_KEYS], ids=lambda key: key.name)
def test_the_example_of_each_key_is_right(tmp_path: Path, home: Path, key: Any) -> None:
    (home / ".ssh" / "id_ed25519").write_text("a key")
    line = f"{key.name} = {key.example}\n"
    old = {entry.split(" = ")[0]: entry for entry in A1.splitlines(keepends=True)}
    if key in TOP_KEYS:
        text = line + GOOD
    elif key.name in old:
        text = HUB + A1.replace(old[key.name], line)
    elif key.name == "local":
        text = HUB + A1.replace(old["ssh"], line + 'address = "10.0.0.1"\n')
    elif key.name == "reachable_from":
        text = HUB + A1 + line.replace("beijing", "hub")
    elif key.group == "batch":
        text = HUB + A1.replace(old["ssh"], line if key.name == "allocator" else 'allocator = "slurm"\n' + line)
    else:
        text = GOOD + line
    found = read(tmp_path, text)
    assert isinstance(found.inventory, Inventory)


def test_the_client_of_ssh_is_for_all_hosts(tmp_path: Path) -> None:
    hosts = read(tmp_path, GOOD + '[ssh]\nclient = "openssh"\n').inventory.hosts
    assert {host.access.client for host in hosts if isinstance(host.access, Ssh)} == {"openssh"}


def test_links_have_a_direction(tmp_path: Path) -> None:
    links = read(tmp_path, GOOD + LINK + '[[link]]\nfrom = "hub"\nto = "A"\ndelay = "5ms"\n').inventory.links
    assert [link.text for link in links] == ["A>hub=50000000bit,0.040000s", "hub>A=0.005000s"]


def test_the_reference_page_is_up_to_date() -> None:
    keys = (*TOP_KEYS, *HOST_KEYS, *LINK_KEYS, *SSH_KEYS)
    assert (ROOT / "docs" / "reference" / "inventory.md").read_text() == page(keys)


@pytest.mark.processes
def test_init_writes_what_hosts_check_reads(desk: Desk, tmp_path: Path) -> None:
    done = desk.geomx("init", "new/site")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("wrote new/site/hosts.toml\nwrote new/site/train.py\nnext:\n  cd new/site\n")
    folder = tmp_path / "new" / "site"
    assert (folder / "hosts.toml").read_text() == TEMPLATE.read_text()
    (folder / "train.py").write_text("mine")
    again = desk.geomx("init", cwd=folder)
    assert again.stdout.startswith("kept  hosts.toml\nkept  train.py\nnext:\n  edit")
    assert (folder / "train.py").read_text() == "mine"
    for words, env in ((["--hosts", "hosts.toml"], {}), ([], {}), ([], {"GEOMX_HOSTS": "hosts.toml"})):
        done = desk.geomx("hosts", "check", *words, cwd=folder, **env)
        assert (done.returncode, done.stderr) == (0, "")
        first = done.stdout.partition("\n")[0]
        assert first == "hosts.toml: 13 processes on 3 hosts with --algo fsa, " + SPREAD
    for line in (
        "party beijing, central: nobody trains",
        "  shenzhen-1: ssh alice@gpu1.shenzhen.example.org through alice@gate.shenzhen.example.org",
        "    dialled at 10.0.0.7, from other parties at 203.0.113.7; ports are the first that are free of 9100-9163",
        "    shenzhen/global_server:0  port 9100",
        "    beijing/scheduler:0         port 9101",
        "    shenzhen/worker:1         trains on gpu1, global rank 1",
        "job: batch_size = 64, lr = 0.05",
    ):
        assert line in done.stdout.splitlines()


@pytest.mark.processes
def test_hosts_check_shows_the_emulated_network(desk: Desk, tmp_path: Path) -> None:
    text = GOOD + LINK + '[job]\nwan = "1gbit,10ms"\n'
    (tmp_path / "hosts.toml").write_text(text)
    done = desk.geomx("hosts", "check")
    assert done.stdout.splitlines()[1] == (
        "emulated network: each party 1000 Mbit/s, round trip 10 ms; A to hub 50 Mbit/s, delay 40 ms"
    )


@pytest.mark.processes
def test_hosts_check_as_json(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "sites.toml").write_text(HUB + "ssh_port = 7\n" + A1 + 'user = "al"\n')
    done = desk.geomx("hosts", "check", "--hosts", "sites.toml", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    hub, a1 = found.pop("hosts")
    assert found == {
        "schema_version": 1, "file": "sites.toml", "algo": "fsa", "topology": "central", "central": "hub",
        "parties": {"hub": 0, "A": 1}, "job": {}, "notes": ["the central party is hub, which has no devices"],
        "topology_reason": "only A trains",
    }  # fmt: skip
    assert hub == {
        "host": "h", "parties": ["hub"], "reached": "ssh 192.0.2.1:7", "address": "192.0.2.1", "wan_address": "",
        "servers": {"hub/global_scheduler:0": 9100, "hub/global_server:0": 9101, "hub/scheduler:0": 0},
        "workers": {"hub/worker:0": ""}, "candidates": "9100-9163", "ranks": {}, "groups": {},
        "reserved": {"hub/scheduler:0": 9102},
    }  # fmt: skip
    assert (a1["reached"], a1["workers"]) == ("ssh al@192.0.2.2", {"A/worker:0": "cpu"})
    assert a1["ranks"] == {"A/worker:0": 0}
    assert a1["servers"] == {"A/scheduler:0": 0, "A/server:0": 0}
    assert a1["reserved"] == {"A/scheduler:0": 9100}


@pytest.mark.processes
def test_hosts_check_counts_for_the_algorithm_of_the_job(desk: Desk, tmp_path: Path) -> None:
    """In HFA a central party that trains has a local server, in FSA if slices are spread; synchronous SGD has one."""
    plain = 'central = "hub"\n' + HUB + 'devices = ["cpu"]\n' + A1
    (tmp_path / "hosts.toml").write_text(plain)
    (tmp_path / "central.toml").write_text('topology = "central"\n' + plain)
    (tmp_path / "hfa.toml").write_text(plain + '[job]\nalgo = "hfa"\n')

    def servers(*words: str) -> set[str]:
        done = desk.geomx("hosts", "check", "--hosts", *words, "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        algorithms.append(found["algo"])
        return {name for host in found["hosts"] for name in host["servers"] if "/server:" in name}

    algorithms: list[str] = []
    assert servers("hosts.toml") == {"A/server:0", "hub/server:0"}
    assert servers("central.toml") == {"A/server:0"}
    assert servers("hfa.toml") == servers("hosts.toml", "--algo", "hfa") == {"A/server:0", "hub/server:0"}
    assert servers("hfa.toml", "--algo", "sync") == {"hub/server:0"}
    assert algorithms == ["fsa", "fsa", "hfa", "hfa", "sync"]
    assert f"with --algo hfa, {SPREAD}\n" in desk.geomx("hosts", "check", "--hosts", "hfa.toml").stdout


def test_parties_that_differ_only_in_case_are_noted(tmp_path: Path) -> None:
    found = read(tmp_path, HUB + A1 + B1.replace('"B"', '"a"'))
    assert "warning: parties A and a differ only in case; if they are one, write one name" in found.notes
    assert not any("warning" in note for note in read(tmp_path, HUB + A1 + B1).notes)


@pytest.mark.processes
def test_hosts_check_of_a_wrong_file(desk: Desk, tmp_path: Path) -> None:
    done = desk.geomx("hosts", "check")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("error: there is no inventory hosts.toml\n  geomx init ")
    (tmp_path / "hosts.toml").write_text(GOOD + "threads = 0\n")
    done = desk.geomx("hosts", "check")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "error: hosts.toml:10: threads: 0 is out of range\n  write a number from 1 to 1024\n"


def test_init_where_nothing_can_be_written() -> None:
    with pytest.raises(CheckFailed, match="cannot write to /proc/x"):
        starter.write(Path("/proc/x"))


@pytest.mark.parametrize(
    ("installed", "wanted"), [("mxnet torch", "with PyTorch"), ("mxnet", "with MXNet"), ("", "with PyTorch")]
)
def test_the_script_is_for_a_framework_that_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: str, wanted: str
) -> None:
    monkeypatch.setattr(starter, "find_spec", lambda name: name if name in installed.split() else None)
    starter.write(tmp_path)
    first = (tmp_path / "train.py").read_text().splitlines()[0]
    assert wanted in first and "python train.py" in first


@pytest.mark.processes
def test_the_script_of_init_trains(desk: Desk, tmp_path: Path) -> None:
    starter.write(tmp_path)
    done = desk.geomx(
        "launch", "--local", "--json", "--workers", "1", "--job-dir", str(tmp_path / "job"), "--",
        "python", "train.py", "--epochs", "1", "--samples", "192",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "done"
    logs = [(tmp_path / "job" / "logs" / f"{party}-worker-0.log").read_text() for party in "AB"]
    assert all("epoch 0: loss " in log for log in logs)
    assert json.loads(done.stdout)["model"] == str(tmp_path / "job/outputs/A-worker-0/model.params")


@pytest.mark.processes
def test_the_inventory_of_the_guide_holds(desk: Desk, tmp_path: Path) -> None:
    guide = ROOT.joinpath("docs", "how-to", "sites.md").read_text()
    found = read(tmp_path, guide.partition("```toml\n")[2].partition("```")[0]).inventory
    assert [host.name for host in found.hosts] == ["bj1", "sz1", "cd1"]
    assert {host.python for host in found.hosts} == {"~/geomx/bin/python"}
    (tmp_path / "hosts.toml").write_text(guide.partition("```toml\n")[2].partition("```")[0])
    shell = desk.geomx("launch", "--dry-run", "--shell").stdout
    assert shell.count('    "$HOME"/geomx/bin/python -P -m geomx_cli.runtime\n') == 13
    assert str(ROOT) not in shell and str(Path.home()) not in shell and sys.executable not in shell


def test_the_inventory_of_the_tutorial_holds(tmp_path: Path) -> None:
    tutorial = ROOT.joinpath("docs", "tutorials", "two-sites.md").read_text()
    found = read(tmp_path, tutorial.partition("```toml\n")[2].partition("```")[0]).inventory
    assert [(host.name, len(host.devices)) for host in found.hosts] == [("a1", 1), ("b1", 1)]


def test_an_address_that_others_dial_has_no_port_of_ssh(tmp_path: Path) -> None:
    _, hint = complaint(tmp_path, GOOD + 'wan_address = "al@10.0.0.1:22"\n')
    assert hint == 'write "10.0.0.1" here'
