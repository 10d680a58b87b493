"""A local server's links to those of other parties, if its delivery requires them."""

from geomx_cli.core import deliveries
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.cluster.membership import Membership
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import BadMessage

__all__ = ["PEERS", "ServerPeers"]

PEERS = "peers"
"""What the hello of such a link says as its plane."""


class ServerPeers:
    """Fills `upstream.peers`. A lost peer does not end the job: the delivery goes around it. Used by the loop's thread
    only.
    """

    def __init__(self, node: Node, upstream: UpstreamClient | None) -> None:
        self._node = node
        self._upstream = upstream
        self._roster: Membership | None = None
        self._own = -1
        self._early: list[Link] = []  # peers that dialled before this server knew its index

    def join(self, roster: Membership, own: int) -> None:
        """The roster of the global plane has arrived; `own` is the index of this party. Dial the peers that this one
        dials, and admit those that have dialled. Raises InvalidSettings for a wrong identity.
        """
        self._roster, self._own = roster, own
        settings, members = self._node.settings, {item.rank: item for item in roster.members if item.role == "worker"}
        assert self._upstream is not None and settings.local is not None
        servers = settings.local.servers
        for dialler, listener in sorted(self._pairs()):
            member = members[listener * servers + roster.rank % servers]
            if dialler == own and member.endpoints:
                self._upstream.peers[listener] = self._node.transport.dial(
                    member.endpoint_for(settings.host, settings.party), member.process,
                    wide_area=member.party != settings.party, plane=PEERS, rank=own,
                )  # fmt: skip
        early, self._early = self._early, []
        for link in early:
            try:
                self.arrive(link)
            except BadMessage as error:
                raise InvalidSettings(str(error), "restart all processes of the job, each only once") from None

    def arrive(self, link: Link) -> None:
        """The local server of another party has dialled this one. Raises BadMessage if it should not."""
        if self._upstream is None:
            raise BadMessage(f"{link.name} dials a global server as a local one")
        rank = link.hello.get("rank")
        self._node.check_identity(link, "party", self._roster)
        if self._roster is None:
            self._early.append(link)
            return
        if type(rank) is not int or (rank, self._own) not in self._pairs() or rank in self._upstream.peers:
            raise BadMessage(f"{link.name} of party {rank} dials that of party {self._own}, which it should not")
        self._upstream.peers[rank] = link

    def _pairs(self) -> set[tuple[int, int]]:
        settings = self._node.settings
        assert settings.upper is not None and settings.local is not None
        parties, options = settings.upper.workers // settings.local.servers, settings.options
        return settings.pairs_of(self._own, deliveries.party_peers(deliveries.chosen(options), parties, options))
