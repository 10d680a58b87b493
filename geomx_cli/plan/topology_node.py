"""One process of a topology."""

from dataclasses import dataclass

from geomx_cli.contract.config import Role
from geomx_cli.inventory import Host

__all__ = ["TopologyNode"]


@dataclass(frozen=True)
class TopologyNode:
    """One process.

    local, upper: its planes; "" for none.
    index: the index of its party.
    rank: counts the processes of its role in its party. For global servers and for workers of a flat cluster it counts
        them in all parties.
    device: the training device of a worker, otherwise "".
    dials: if the delivery links peers. For a worker, the ranks of the workers of its plane that it dials. For a local
        server, the indices of the parties whose local servers of its rank it dials.
    peers: the processes that it dials and that dial it, if the inventory changes `dials` (NodeSettings).
    group: the number of workers of its party, if these add their gradients themselves (`--reduce torch`); 0 if servers
        add them. Only the first worker of a group has a plane. With shards, one worker for each shard has one.
    """

    role: Role
    party: str
    rank: int
    host: Host
    local: str = ""
    upper: str = ""
    index: int | None = None
    global_rank: int | None = None
    master: bool = False
    device: str = ""
    dials: tuple[int, ...] = ()
    peers: tuple[str, ...] = ()
    group: int = 0

    @property
    def name(self) -> str:
        """Its name, e.g. "A/worker:1"."""
        return f"{self.party}/{self.role}:{self.rank}"

    @property
    def leads_group(self) -> bool:
        """Whether the other workers of its party dial it, to form their process group."""
        return self.group > 1 and self.rank == 0
