"""Settings of a parameter server process and its planes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from geomx_cli.contract import addresses
from geomx_cli.core.options import Value

__all__ = ["NodeSettings", "PlaneSettings", "Role"]

Role = Literal["global_scheduler", "global_server", "scheduler", "server", "worker"]


@dataclass(frozen=True)
class PlaneSettings:
    """A plane that a process belongs to: the address of its scheduler, and the numbers of its members.

    uri: the scheduler's address, or a name that every process of the plane can resolve.
    scheduler: the endpoint of a planned scheduler, used instead of `uri` and `port`.
    """

    uri: str
    port: int
    servers: int
    workers: int
    scheduler: str = ""

    @property
    def endpoint(self) -> str:
        """The scheduler's address as configured."""
        return self.scheduler or addresses.tcp(self.uri, self.port)

    def to_dial(self) -> str:
        """The address to dial. Raises InvalidSettings for a name that cannot be resolved."""
        return self.scheduler or addresses.tcp(addresses.resolve(self.uri)[0], self.port)

    def to_listen(self) -> tuple[str, ...]:
        """The scheduler's own addresses to listen on: a name may have several, and peers may dial any of them.

        Raises InvalidSettings if none of them belongs to this machine.
        """
        return tuple(addresses.tcp(address, self.port) for address in addresses.own(self.uri))


@dataclass(frozen=True)
class NodeSettings:
    """All settings of a process.

    A server with both planes is a local server, or a root (`global_server`). A root without `local` has no members in
    the central party's plane. A server without `upper` is the root of a flat cluster.

    local, upper: the plane of its party; the global plane.
    master: a worker that configures the servers. central_workers: those of the central party train.
    num_all_workers: training workers of the job, 0 if not known.
    interface, node_host, port: where to listen, for processes started by hand.
    output_dir: where a worker or a root saves what is to be kept, "" for nowhere.
    party_index, rank, global_rank: None if the scheduler is to choose.
    bind, advertise: planned endpoints, and those that others dial if they differ.
    wan_share: this process's fraction of its party's emulated link.
    links: the emulated ones between parties (net/shaping.py).
    device: what a worker of the bundled job trains on: "" for the CPU, or "gpuN".
    group_size: of the process group in which a party's workers add their gradients, 0 if servers do. `rank` is that in
    it, and only rank 0 has a plane. rendezvous: what they dial to form it and, for rank 0, what to bind.
    peers: the workers, or parties with local servers, that this process dials ("to:RANK") and that dial it
    ("from:RANK"), () for those of the delivery.
    clock_ahead: seconds, see JobClock. supervised: an agent of `geomx launch` has started this process.
    incarnation: which life of the process this is, 0 for the first one.
    state_dir: a folder of its own, in which its state survives it; "" if nothing restarts it.
    stop_file: see StopFiles; "" without an agent.
    start_dir: what a bundled worker goes on from, if its job has other numbers of parties, workers or servers than the
        job before; else "".
    training_since: when its training began, by the job's clock, if all processes have begun again since; else 0.
    options: the table of options, by name.
    """

    role: Role = "worker"
    local: PlaneSettings | None = None
    upper: PlaneSettings | None = None
    master: bool = False
    central_workers: bool = False
    num_all_workers: int = 0
    interface: str = ""
    node_host: str = ""
    port: int = 0
    job: str = ""
    job_dir: str = ""
    output_dir: str = ""
    process: str = ""
    party: str = ""
    party_index: int | None = None
    host: str = ""
    rank: int | None = None
    global_rank: int | None = None
    bind: tuple[str, ...] = ()
    advertise: tuple[str, ...] = ()
    key_file: str = ""
    insecure: bool = False
    wan_share: float = 1.0
    links: tuple[str, ...] = ()
    device: str = ""
    group_size: int = 0
    rendezvous: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    clock_ahead: float = 0.0
    supervised: bool = False
    incarnation: int = 0
    state_dir: str = ""
    stop_file: str = ""
    start_dir: str = ""
    training_since: float = 0.0
    options: Mapping[str, Value] = field(default_factory=dict)

    def pairs_of(self, own: int, usual: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
        """The (dialler, listener) pairs with this process, of rank `own`, by `peers`; else those of `usual`."""
        named = [item.partition(":") for item in self.peers]
        pairs = {(own, int(rank)) if way == "to" else (int(rank), own) for way, _, rank in named if rank.isdigit()}
        return pairs if self.peers else {pair for pair in usual if own in pair}

    def number(self, option: str) -> float:
        """The value of a numeric option."""
        return float(self.options[option])

    def text(self, option: str) -> str:
        """The value of a text option."""
        return str(self.options[option])
