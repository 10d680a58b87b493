"""A worker's links to other workers of its plane, if its delivery requires them."""

from collections.abc import Callable

from geomx_cli.core import deliveries
from geomx_cli.core.errors import InvalidSettings, TimedOut
from geomx_cli.ps.cluster.config import NodeSettings, PlaneSettings
from geomx_cli.ps.cluster.membership import Membership
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import BadMessage

__all__ = ["WorkerPeers"]


class WorkerPeers:
    """`links`: this worker's links, by the peer's rank.

    If the delivery needs its peers, their loss ends the job, and a worker starts and ends only after the workers that
    dial it, since their messages may pass through it. Used by the loop's thread only.
    """

    def __init__(self, settings: NodeSettings, plane: PlaneSettings) -> None:
        self.links: dict[int, Link] = {}
        self._settings = settings
        self._plane = plane
        delivery = deliveries.chosen(settings.options)
        self._needed = deliveries.needs_peers(delivery)
        self._usual = deliveries.peers(delivery, plane.workers, settings.options)
        self._rank = -1
        self._early: list[Link] = []  # peers that dialled before this worker knew its rank
        self._gone: set[Link] = set()
        self._when_here: Callable[[], None] | None = None
        self._when_gone: Callable[[], None] | None = None

    def listen(self, node: Node) -> list[str]:
        """Listen if another worker dials this one; returns the endpoints. A worker started by hand does not know its
        rank yet, and listens if any worker has to. Raises InvalidSettings as Node.listen does.
        """
        rank = self._settings.rank
        pairs = self._usual if rank is None else self._settings.pairs_of(rank, self._usual)
        wanted = any(rank in (None, listener) for _, listener in pairs)
        return list(node.listen(self._plane)) if wanted else []

    def join(self, node: Node, membership: Membership) -> None:
        """The roster has arrived: dial, and check the peers that have dialled. The node fails if others have not
        dialled within its timeout. Raises InvalidSettings for a wrong identity.
        """
        self._rank = membership.rank
        settings, members = node.settings, {item.rank: item for item in membership.members if item.role == "worker"}
        for _, listener in sorted(pair for pair in self._pairs() if pair[0] == self._rank):
            member = members[listener]
            self.links[listener] = link = node.transport.dial(
                member.endpoint_for(settings.host, settings.party), member.process,
                wide_area=member.party != settings.party, plane="local", rank=self._rank,
            )  # fmt: skip
            self._watch(node, link)
        early, self._early = self._early, []
        for link in early:
            try:
                self.arrive(node, link)
            except BadMessage as error:
                raise InvalidSettings(str(error), "restart all processes of the job, each only once") from None
        if self._diallers():
            node.loop.call_later(node.timeout, lambda: self._expire(node))

    def arrive(self, node: Node, link: Link) -> None:
        """A worker has dialled this one. Raises BadMessage if it should not."""
        rank, roster = link.hello.get("rank"), node.memberships[0]
        node.check_identity(link, "worker", roster)
        if self._rank < 0:
            self._early.append(link)
            return
        if type(rank) is not int or (rank, self._rank) not in self._pairs() or rank in self.links:
            raise BadMessage(f"{link.name} of rank {rank} dials the worker of rank {self._rank}, which it should not")
        self.links[rank] = link
        self._watch(node, link)
        self._poll()

    def to_part_from(self) -> list[Link]:
        """The links to workers that wait for this one's goodbye."""
        return [link for link in self.links.values() if link.dialled and self._needed]

    def on_bye(self, node: Node, request: Request) -> None:
        """A worker that dials this one is done. Raises BadMessage if it does not dial this one."""
        if request.link not in self.links.values() or request.link.dialled:
            raise BadMessage("a goodbye of a process that does not dial this one")
        node.shutdown.answer_bye(request)
        self._gone.add(request.link)
        self._poll()

    def when_here(self, call: Callable[[], None]) -> None:
        """Call this once all workers that dial this one have connected, possibly now."""
        self._when_here = call
        self._poll()

    def when_gone(self, call: Callable[[], None]) -> None:
        """Call this once all workers that dial this one are done, possibly now."""
        self._when_gone = call
        self._poll()

    def _pairs(self) -> set[tuple[int, int]]:
        return self._settings.pairs_of(self._rank, self._usual)

    def _watch(self, node: Node, link: Link) -> None:
        if self._needed:
            node.liveness.watch(link)

    def _diallers(self) -> set[int]:
        """The ranks of the workers that dial this one and have to be there."""
        return {dialler for dialler, listener in self._pairs() if listener == self._rank and self._needed}

    def _poll(self) -> None:
        if self._when_here is not None and self._diallers() <= self.links.keys():
            call, self._when_here = self._when_here, None
            call()
        if self._when_gone is not None and len(self._gone) == len(self._diallers()):
            call, self._when_gone = self._when_gone, None
            call()

    def _expire(self, node: Node) -> None:
        missing = self._diallers() - self.links.keys()
        if missing:
            members = (item for item in node.memberships[0].members if item.role == "worker")
            names = ", ".join(item.process for item in members if item.rank in missing)
            what = f"waited {node.timeout:g} s for {names} to dial this worker"
            node.fail(TimedOut(what, "can its host be reached from there, or does a firewall keep them apart?"))
