"""How a server joins the cluster: first the planes of its members, then the plane of its roots, which it dials."""

from collections.abc import Callable

from geomx_cli.contract.config import NodeSettings, PlaneSettings
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.events import StateChanged
from geomx_cli.core.units import counted
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.cluster.members import ServerMembers
from geomx_cli.ps.cluster.membership import Membership
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import BadMessage
from geomx_cli.ps.peers import Peers

__all__ = ["ServerJoining"]


class ServerJoining:
    """Joins the planes and dials the roots. It listens from its construction on. After a restart it listens only once
    it
    has joined: its members dial all the while, and their messages make sense only to a server that knows its roots.

    on_joined: called once all planes are joined and the roots are dialled.
    upstream, peers: the links to the roots and to other parties; None in a root.
    party_index: this server's party among the parties with local servers.
    Used by the loop's thread only.
    """

    def __init__(
        self, settings: NodeSettings, node: Node, members: ServerMembers, upstream: UpstreamClient | None,
        peers: Peers | None, on_joined: Callable[[], None],
    ) -> None:  # fmt: skip
        self.party_index = 0
        self._settings = settings
        self._node = node
        self._members = members
        self._upstream = upstream
        self._peers = peers
        self._on_joined = on_joined
        self._restarted = settings.incarnation > 0
        self._endpoints = settings.advertise or settings.bind
        if not self._restarted:
            self._endpoints = node.listen(settings.local or settings.upper)
        self._rosters: dict[str, Membership] = {}  # of the members, by the plane in which they dial

    def register(self) -> None:
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
        assert upstream is not None and self._peers is not None and settings.local is not None
        self.party_index = membership.rank // settings.local.servers
        for member in membership.servers():
            link = self._node.transport.dial(
                member.endpoint_for(settings.host, settings.party), member.process,
                wide_area=member.party != settings.party,
                plane="global", rank=self.party_index, workers=settings.local.workers,
            )  # fmt: skip
            upstream.links.append(link)
            self._node.liveness.watch(link, self._node.absence)
        self._peers.join(membership, self.party_index)
        self._joined(membership)

    def _joined(self, _: Membership) -> None:
        if self._restarted:
            self._node.listen(self._settings.local or self._settings.upper)
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
        for member in self._members:
            try:
                if member.link is not None:
                    self.check_identity(member.link)
            except BadMessage as error:
                raise InvalidSettings(str(error), "restart all processes of the job, each only once") from None
