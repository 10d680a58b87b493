"""The dials between hosts that a plan requires, and their results."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from geomx_cli.core.units import some_of
from geomx_cli.inventory import Inventory
from geomx_cli.plan import Endpoint, Plan, Process

__all__ = ["Dial", "Dialled", "dials", "place", "unreached_servers"]


@dataclass(frozen=True)
class Dial:
    """A dial from one host to a port of another. `dialler` and `listener` are hosts, `processes` is one link of the
    plan that uses it (of possibly many), `wide_area` is whether any such link connects two parties. `bound` is the
    listening address. `protocol` is udp where datagrams are sent.
    """

    dialler: str
    listener: str
    address: str
    port: int
    processes: tuple[str, str]
    wide_area: bool
    bound: str
    protocol: str = "tcp"

    @property
    def subject(self) -> str:
        """Its subject in a check."""
        return f"{self.dialler} -> {self.listener}"


@dataclass(frozen=True)
class Dialled:
    """The result of a dial: see probe/dialling.py; `round_trip` in seconds."""

    dial: Dial
    kind: str
    detail: str
    ip: str
    round_trip: float


def dials(inventory: Inventory, planned: Plan) -> list[Dial]:
    """Return the dials between different hosts, each port once per dialling host and protocol."""
    processes = {process.name: process for process in planned.processes}
    found: dict[tuple[str, str, int, str], Dial] = {}
    for names in planned.links:
        dialler, listener = (processes[name] for name in names)
        if dialler.host == listener.host:
            continue
        address = inventory.host(listener.host).address_for(inventory.host(dialler.host))
        wide = dialler.party != listener.party
        for end in _dialled(dialler, listener):
            bound, port = place(end)
            dial = Dial(dialler.host, listener.host, address, port, (names[0], names[1]), wide, bound, end.protocol)
            before = found.get((dialler.host, address, port, end.protocol))
            if before is None or (wide and not before.wide_area):
                found[dialler.host, address, port, end.protocol] = dial
    return list(found.values())


def unreached_servers(results: Iterable[Dialled], planned: Plan) -> str:
    """Return which hosts do not reach a global server that topology central would not have there, as a clause; "" if
    there are none.
    """
    central = {process.party for process in planned.processes if process.role == "global_scheduler"}
    spread = {process.name: process for process in planned.processes if process.role == "global_server"}
    failed = [
        result.dial.subject
        for result in results
        if result.kind != "ok"
        and (server := spread.get(result.dial.processes[1])) is not None
        and server.party not in central
    ]
    return f"no connection {some_of(list(dict.fromkeys(failed)), 2)}" if failed else ""


def _dialled(dialler: Process, listener: Process) -> Iterator[Endpoint]:
    """Yield the endpoints that it dials; only local servers send datagrams."""
    yield from [end for end in listener.endpoints if end.protocol == "tcp"][:1]
    if dialler.role == "server":
        yield from (end for end in listener.endpoints if end.protocol == "udp")


def place(endpoint: Endpoint) -> tuple[str, int]:
    """Return the address and port that a TCP or UDP endpoint binds."""
    address, _, port = endpoint.bind.removeprefix(f"{endpoint.protocol}://").rpartition(":")
    return address.strip("[]"), int(port)
