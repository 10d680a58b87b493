"""The permitted callers of each listening process, with the identities that the handshake authenticates."""

from collections.abc import Mapping, Sequence

from geomx_cli.contract.security import Identity
from geomx_cli.plan.topology import GLOBAL, TopologyLink

__all__ = ["callers"]


def callers(links: Sequence[TopologyLink]) -> Mapping[str, Mapping[str, Identity]]:
    """Return, for each dialled process by name, its callers by name, with role and rank.

    A scheduler sees each caller as "server" or "worker" with its rank in the plane. In the global plane, local servers
    are workers, ranked party by party. A server sees workers as "worker" with their rank, and local servers as "party"
    with the party's index.
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


def _same_step(other: TopologyLink, link: TopologyLink) -> bool:
    """Whether a link leads from a local server to the same listener."""
    return other.listener is link.listener and other.plane == link.plane and other.dialler.role == "server"
