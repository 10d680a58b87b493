"""One process of a topology."""

from dataclasses import dataclass

from geomx_cli.contract.config import Role
from geomx_cli.inventory import Host

__all__ = ["TopologyNode"]


@dataclass(frozen=True)
class TopologyNode:
    """One process. `local` and `upper` are its planes, "" for none; `index` is that of its party.

    `rank` is among the processes of its role in its party; for global servers and workers of a flat cluster, in all
    parties. `device` is the training device of a worker, else "". `dials`: if the delivery links them, ranks of workers
    of its plane that a worker dials, or indices of the parties whose local servers of its rank a local server dials;
    `peers`: those, and which dial it, where the inventory makes them others than usual (NodeSettings).
    `group`: the workers of its party, which add their gradients themselves (`--reduce torch`); 0 if servers do. Only
    the first of them has a plane, or one for each shard.
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
