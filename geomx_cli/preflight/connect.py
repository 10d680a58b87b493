"""The dials between hosts that a plan requires, and their results."""

from dataclasses import dataclass

from geomx_cli.inventory import Inventory
from geomx_cli.plan import Endpoint, Plan

__all__ = ["Dial", "Dialled", "dials", "place"]


@dataclass(frozen=True)
class Dial:
    """A dial from one host to a port of another. `dialler` and `listener` are hosts, `processes` is one link of the
    plan that uses it (of possibly many), `wide_area` is whether any such link connects two parties. `bound` is the
    listening address.
    """

    dialler: str
    listener: str
    address: str
    port: int
    processes: tuple[str, str]
    wide_area: bool
    bound: str

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
    """Return the dials between different hosts, each port once per dialling host."""
    listeners = {process.name: process for process in planned.processes}
    found: dict[tuple[str, str, int], Dial] = {}
    for names in planned.links:
        dialler, listener = (listeners[name] for name in names)
        ends = [end for end in listener.endpoints if end.protocol == "tcp"]
        if dialler.host == listener.host or not ends:
            continue
        address, port = inventory.host(listener.host).address_for(inventory.host(dialler.host)), ends[0].port
        wide = dialler.party != listener.party
        before = found.get((dialler.host, address, port))
        dial = Dial(dialler.host, listener.host, address, port, (names[0], names[1]), wide, place(ends[0])[0])
        if before is None or (wide and not before.wide_area):
            found[dialler.host, address, port] = dial
    return list(found.values())


def place(endpoint: Endpoint) -> tuple[str, int]:
    """Return the address and port that a TCP or UDP endpoint binds."""
    address, _, port = endpoint.bind.removeprefix(f"{endpoint.protocol}://").rpartition(":")
    return address.strip("[]"), int(port)
