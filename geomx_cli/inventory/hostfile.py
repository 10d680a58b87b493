"""Reads an MPI host file: a machine on each line, with its number of workers.

    # comment
    node1 slots=4                         as OpenMPI
    alice@node2 slots=4 max_slots=8
    node3:4                               as MPICH and Intel MPI
    node4 gpus=2                          geomx's own: a worker for each of gpu0 and gpu1
    node5 slots=4 party=beijing           geomx's own: in a party of this name
    n[1-3,07] slots=4                     as Slurm prints lists of nodes: n1, n2, n3 and n07
    a,b[1-2] or 2*a                       several machines; one with two workers
    2001:db8::1 slots=4                   IPv6, with or without brackets
"""

import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.option import nearest
from geomx_cli.inventory import NAME, is_ip, values
from geomx_cli.inventory.checks import Check
from geomx_cli.inventory.file import InventoryFile, of_tables, read_text
from geomx_cli.inventory.keys import Lines, Mistakes
from geomx_cli.inventory.keys import Path as Place

__all__ = ["read"]

_PARTY, _CENTRAL = "A", "central"
_MOST = 256
_MACHINE = re.compile(r"(?:(?P<user>.+)@)?(?:\[(?P<v6>[^]]+)\]|(?P<host>[^:@]+))(?::(?P<slots>.*))?")
_RANGES = re.compile(r"\[([0-9]{1,9}(?:-[0-9]{1,9})?(?:,[0-9]{1,9}(?:-[0-9]{1,9})?)*)\]")
_LISTED = re.compile(r"(?:[^,\[]|\[[^]]*\])+")
_MOST_LISTED = 4096
_KEYS = ("slots", "max_slots", "gpus", "party")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def read(path: Path, check: Check) -> InventoryFile:
    """Read the host file at `path`; see inventory.file.read. A machine without a number has one worker. If several
    lines name a machine, its numbers are added.

    If all machines are in one party, the first one also runs a central party, without workers. This machine, by its
    host name or as localhost, is reached without SSH.
    """
    if not path.exists():
        raise InvalidSettings(f"there is no host file {path}", "correct its path, or write it: a machine on each line")
    lines: dict[Place, int] = {}
    mistakes = Mistakes(path.name, Lines(lines))
    machines: dict[tuple[str, str], dict[str, Any]] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if words := re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split():
            try:
                settings = _settings(words[1:])
                for word in _listed(words[0]):
                    found = _machine(word, settings)
                    known = machines.setdefault((found["ssh"], found["party"]), found)
                    if known is found:
                        lines["host", len(machines) - 1] = number
                    else:
                        known["devices"] += found["devices"]
                        values.devices(known["devices"], "")
            except InvalidSettings as error:
                mistakes.add_at(number, error.message, error.hint)
    mistakes.raise_if_any()
    if not machines:
        raise InvalidSettings(f"{path.name} names no machine", "write one on each line, as: node1 slots=4")
    hosts = _hosts(list(machines.values()), lines, mistakes)
    mistakes.raise_if_any()
    return of_tables(path, {"host": hosts}, mistakes, check)


def _listed(word: str) -> list[str]:
    """Return the machines of a list in Slurm's form, each as often as the list names it."""
    found: list[str] = []
    if re.search(r"[][]", re.sub(r"\[[^][]*\]", "", word)):
        raise InvalidSettings(f"{word!r} has a bracket without its pair", "write n[1-3,07], or a name on each line")
    for each in _LISTED.findall(word):
        times, star, rest = each.partition("*")
        count = _count(times) if star else 1
        for name in _spelled_out(rest if star else each):
            found += [name] * count
            if len(found) > _MOST_LISTED:
                raise InvalidSettings(f"{word!r} names more than {_MOST_LISTED} machines", "correct the numbers")
    return found or [word]


def _spelled_out(name: str) -> Iterator[str]:
    """Yield the names for which a name with numbers in brackets stands. 07 keeps its zero."""
    match = _RANGES.search(name)
    if match is None:
        yield name
        return
    for part in match[1].split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise InvalidSettings(f"{part} in {name!r} runs backwards", f"write {last}-{first}")
        for number in range(int(first), int(last or first) + 1):
            for rest in _spelled_out(name[match.end() :]):
                yield f"{name[: match.start()]}{number:0{len(first)}}{rest}"


def _settings(words: list[str]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("-", "_")
        if not equals or name not in _KEYS:
            raise InvalidSettings(f"{word!r} is not a setting of a machine", nearest(name, _KEYS))
        if name in found:
            raise InvalidSettings(f"{name} is there twice", "write it once")
        found[name] = value
    return found


def _machine(word: str, settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys of an inventory's host, except its name."""
    match = _MACHINE.fullmatch(_bracketed(word))
    if match is None:
        raise InvalidSettings(f"{word!r} is no machine", "write its name or address, as: node1 slots=4")
    if match["slots"] is not None and "slots" in settings:
        raise InvalidSettings("the number of slots is there twice", "write node1:4 or node1 slots=4")
    address = values.address(match["v6"] or match["host"], '"node1"')
    slots, gpus = settings.get("slots", match["slots"]), settings.get("gpus")
    if slots is not None and gpus is not None and _count(slots) != _count(gpus):
        raise InvalidSettings(f"{slots} slots and {gpus} GPUs", "each GPU has one worker: leave slots out")
    devices = ["cpu"] * _count(slots or "1") if gpus is None else [f"gpu{number}" for number in range(_count(gpus))]
    party = values.name(settings.get("party", _PARTY), '"beijing"')
    user = {"user": values.user(match["user"], '"alice"')} if match["user"] else {}
    return {"ssh": address, "party": party, "devices": devices, **user}


def _bracketed(word: str) -> str:
    """Put a bare IPv6 address in brackets."""
    user, at, address = word.rpartition("@")
    return f"{user}{at}[{address}]" if ":" in address and is_ip(address) else word


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text[:9]) <= _MOST:
        raise InvalidSettings(f"{text!r} is no number of workers", f"write one from 1 to {_MOST}")
    return int(text)


def _hosts(machines: list[dict[str, Any]], lines: dict[Place, int], mistakes: Mistakes) -> list[dict[str, Any]]:
    """Give the machines names, and add the host of the central party if there is one party only."""
    if len({machine["party"] for machine in machines}) == 1:
        central = {**machines[0], "party": _CENTRAL if machines[0]["party"] != _CENTRAL else f"{_CENTRAL}-1"}
        del central["devices"]
        machines = [*machines, central]
        lines["host", len(machines) - 1] = lines["host", 0]
    names: set[str] = set()
    for index, machine in enumerate(machines):
        address = machine["ssh"]
        name = address if re.fullmatch(NAME, address) else f"host{index + 1}"
        machine["name"] = name if name not in names else f"{name[:20]}-{machine['party'][:11]}"
        names.add(machine["name"])
        if address in _LOOPBACK and any(other["ssh"] not in _LOOPBACK for other in machines):
            hint = "write this machine's name or address, as the others dial it"
            mistakes.add(("host", index), f"the other machines cannot dial {address}", hint)
    here = socket.gethostname()
    return [_local(machine) if machine["ssh"] in (*_LOOPBACK, here) else machine for machine in machines]


def _local(machine: dict[str, Any]) -> dict[str, Any]:
    """A host that is reached without SSH."""
    address = {} if machine["ssh"] in _LOOPBACK else {"address": machine["ssh"]}
    return {key: machine[key] for key in machine.keys() - {"ssh", "user"}} | {"local": True, **address}
