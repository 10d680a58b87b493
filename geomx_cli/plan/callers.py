"""Who may dial whom in a job, and as what: what a listening process checks of those who say hello."""

from collections.abc import Mapping, Sequence

from geomx_cli.plan.topology import GLOBAL, Link
from geomx_cli.ps.net.security import Identity

__all__ = ["callers"]


def callers(links: Sequence[Link]) -> Mapping[str, Mapping[str, Identity]]:
    """For each process that is dialled, by name: who dials it, by name, as what and with which rank.

    To a scheduler everybody is a "server" or a "worker" of its plane, by the rank in it: the parties' local servers are
    the workers of the global plane, one party's after the other's. To a server its diallers are "worker"s by their
    rank, or local servers of a "party", by its index.
    """
    found: dict[str, dict[str, Identity]] = {}
    for link in links:
        caller, listener = link.dialler, link.listener
        rank, role = caller.rank, "server" if caller.role.endswith("server") else "worker"
        if link.plane == GLOBAL and caller.role == "server":
            assert caller.index is not None
            of_party = [other for other in links if _same_step(other, link) and other.dialler.party == caller.party]
            role, rank = "worker", caller.index * len(of_party) + caller.rank
            if not listener.role.endswith("scheduler"):
                role, rank = "party", caller.index
        found.setdefault(listener.name, {})[caller.name] = Identity(caller.name, role, rank)
    return found


def _same_step(other: Link, link: Link) -> bool:
    """Whether it leads from a local server to the same listener."""
    return other.listener is link.listener and other.plane == link.plane and other.dialler.role == "server"
