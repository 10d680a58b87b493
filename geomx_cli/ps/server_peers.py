"""How a server joins the cluster: the planes of its members, then that of its roots, which it dials."""

from collections.abc import Callable

from geomx_cli.core import deliveries
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.events import StateChanged
from geomx_cli.core.units import counted
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.cluster.config import NodeSettings, PlaneSettings
from geomx_cli.ps.cluster.membership import Membership
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.server_members import ServerMembers
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import BadMessage

__all__ = ["PEERS", "ServerJoining", "ServerPeers"]

# A local server's links to those of other parties, if its delivery requires them.

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


class ServerJoining:
    """Listens from its construction on. `on_joined` is called once all planes are joined and the roots dialled.

    upstream: the links to the roots, None in a root. party_index: this server's party among those with local servers.
    Used by the loop's thread only.
    """

    def __init__(
        self, settings: NodeSettings, node: Node, members: ServerMembers, upstream: UpstreamClient | None,
        peers: ServerPeers, on_joined: Callable[[], None],
    ) -> None:  # fmt: skip
        self.party_index = 0
        self._settings = settings
        self._node = node
        self._members = members
        self._upstream = upstream
        self._peers = peers
        self._on_joined = on_joined
        self._endpoints = node.listen(settings.local or settings.upper)
        self._rosters: dict[str, Membership] = {}  # of the members, by the plane in which they dial

    def begin(self) -> None:
        """Register with the schedulers."""
        settings, local, upper = self._settings, self._settings.local, self._settings.upper
        if self._upstream is not None:
            assert local is not None
            self._join_as_server("local", local, self._join_global_plane, settings.rank)
            if local.servers == 1 or settings.rank is not None:
                self._join_upper(settings.rank or 0)
        elif upper is not None:
            self._join_as_server("global", upper, self._join_central_plane if local else self._joined, settings.rank)
        else:
            assert local is not None
            self._join_as_server("local", local, self._joined, settings.rank)

    def check_identity(self, link: Link) -> None:
        """See Node.check_identity; of a member."""
        plane = str(link.hello.get("plane"))
        self._node.check_identity(link, "party" if plane == "global" else "worker", self._rosters.get(plane))

    def _join_as_server(
        self, name: str, plane: PlaneSettings, then: Callable[[Membership], None], rank: int | None
    ) -> None:
        self._rosters[name] = self._node.join(plane, "server", then, rank=rank, endpoints=list(self._endpoints))

    def _join_central_plane(self, membership: Membership) -> None:
        assert self._settings.local is not None
        self._check_identities()
        self._join_as_server("local", self._settings.local, self._joined, membership.rank)

    def _join_global_plane(self, membership: Membership) -> None:
        self._check_identities()
        if len(self._node.memberships) == 1:
            self._join_upper(membership.rank)

    def _join_upper(self, own_rank: int) -> None:
        settings = self._settings
        assert settings.local is not None and settings.upper is not None
        rank = None
        if settings.party_index is not None:
            rank = settings.party_index * settings.local.servers + own_rank
        group = f"{settings.local.uri}:{settings.local.port}"
        self._node.join(
            settings.upper, "worker", self._dial_roots, rank=rank, group=group, wide_area=True,
            endpoints=list(self._endpoints),
        )  # fmt: skip

    def _dial_roots(self, membership: Membership) -> None:
        settings, upstream = self._settings, self._upstream
        assert upstream is not None and settings.local is not None
        self.party_index = membership.rank // settings.local.servers
        for member in membership.servers():
            link = self._node.transport.dial(
                member.endpoint_for(settings.host, settings.party), member.process,
                wide_area=member.party != settings.party,
                plane="global", rank=self.party_index, workers=settings.local.workers,
            )  # fmt: skip
            upstream.links.append(link)
            self._node.liveness.watch(link)
        self._peers.join(membership, self.party_index)
        self._joined(membership)

    def _joined(self, _: Membership) -> None:
        self._check_identities()
        self._node.telemetry.state = "serving"
        message = f"{self._kind()}, listening on {' '.join(self._endpoints)}"
        self._node.events.write(StateChanged(state="serving", message=message))
        self._on_joined()

    def _kind(self) -> str:
        """What kind of server this is, in users' words: in a flat cluster there is only one kind."""
        if self._upstream is not None:
            return f"a local server below {counted(len(self._node.memberships[-1].servers()), 'global server')}"
        return "a server" if self._settings.upper is None else "a global server"

    def _check_identities(self) -> None:
        """Check the members that arrived before the roster."""
        for link in self._members.arrived():
            try:
                self.check_identity(link)
            except BadMessage as error:
                raise InvalidSettings(str(error), "restart all processes of the job, each only once") from None
