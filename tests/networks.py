"""Hosts in network namespaces joined by a bridge, and hosts that run commands behind a prefix. Needs root."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.netns import Namespaces, call
from geomx_cli.hosts import Channel, Completed
from geomx_cli.hosts.local import LocalConnector
from geomx_cli.inventory import Inventory, validated

SWITCH = "switch"


class PrefixedConnector(LocalConnector):
    """This machine, with `prefix` before every command."""

    def __init__(self, name: str, python: str, prefix: Sequence[str]) -> None:
        super().__init__(name, python)
        self._prefix = list(prefix)

    def run(self, argv: Sequence[str], *, data: bytes = b"", limit: float) -> Completed:
        return super().run([*self._prefix, *argv], data=data, limit=limit)

    def open(self, argv: Sequence[str]) -> Channel:
        return super().open([*self._prefix, *argv])


class Network:
    """Machines on one network 10.99.0.0/24, each a namespace with one interface "net0". Must be closed."""

    def __init__(self, machines: Sequence[str]) -> None:
        self.machines = list(machines)
        self.spaces = Namespaces()
        try:
            self._join()
        except BaseException:
            self.spaces.close()
            raise

    def _join(self) -> None:
        self.spaces.add(SWITCH)
        self.spaces.configure(SWITCH, ["link add bridge type bridge", "link set bridge up"])
        for number, machine in enumerate(self.machines):
            self.spaces.add(machine)
            peer, space = f"port{number}", self.spaces.name(machine)
            self.spaces.configure(
                SWITCH,
                [
                    f"link add {peer} type veth peer name net0 netns {space}",
                    f"link set {peer} master bridge up",
                ],
            )
            self.spaces.configure(machine, [f"address add {self.address(machine)}/24 dev net0", "link set net0 up"])

    def address(self, machine: str) -> str:
        """The machine's address."""
        return f"10.99.0.{self.machines.index(machine) + 1}"

    def host(self, machine: str, python: str, prefix: Sequence[str] = ()) -> PrefixedConnector:
        """The machine as a host."""
        return PrefixedConnector(machine, python, self.spaces.command(machine, list(prefix)))

    @contextmanager
    def filtered(self, machine: str, rule: str) -> Iterator[None]:
        """Apply a rule of nft(8), such as "tcp dport 9000 drop", to the machine's incoming packets."""
        lines = [
            "add table inet filter",
            "add chain inet filter input { type filter hook input priority 0; }",
            f"add rule inet filter input {rule}",
        ]
        nft = self.spaces.command(machine, ["nft", "-f", "-"])
        call(nft, lines=[*lines, ""])
        try:
            yield
        finally:
            call(nft, lines=["flush ruleset", ""])

    @contextmanager
    def address_beside(self, machine: str, address: str) -> Iterator[None]:
        """Add an address to the machine."""
        ip = ["ip", "address", "add", f"{address}/24", "dev", "net0"]
        call(self.spaces.command(machine, ip))
        try:
            yield
        finally:
            call(self.spaces.command(machine, [*ip[:2], "del", *ip[3:]]))

    def shape(self, machine: str, rate: str) -> None:
        """Limit the machine's sending rate; `rate` as in tc(8)."""
        bucket = ["tbf", "rate", rate, "burst", "32kb", "latency", "100ms"]
        call(self.spaces.command(machine, ["tc", "qdisc", "add", "dev", "net0", "root", *bucket]))

    def close(self) -> None:
        """Remove everything, with the processes still running there."""
        self.spaces.close()


def star(addresses: Mapping[str, str], ports: Sequence[int], **changes: Mapping[str, object]) -> Inventory:
    """One planned host for the central party, the first, and one for each other party, with a worker; all offer
    `ports`. `changes`: fields to replace, by host.
    """
    names = list(addresses)
    central, *others = names
    devices: dict[str, tuple[str, ...]] = {central: (), **dict.fromkeys(others, ("cpu",))}
    usual = {name: {"address": addresses[name], "devices": devices[name], "ports": tuple(ports)} for name in names}
    return validated(
        {
            "parties": [{"name": name, "workers": 1} for name in others],
            "central": {"name": central, "workers": 0},
            "hosts": [{"name": name, "parties": (name,), **usual[name], **changes.get(name, {})} for name in names],
        }
    )


def bare_python(directory: Path) -> str:
    """A Python without installed packages."""
    import venv

    venv.create(directory, with_pip=False, symlinks=True)
    return str(directory / "bin" / "python")
