"""A process's links to others of its kind, if its delivery requires them: between workers of a plane, or parties."""

from collections.abc import Callable

from geomx_cli.core import deliveries
from geomx_cli.core.errors import InvalidSettings, TimedOut
from geomx_cli.ps.cluster.members import Member, Members
from geomx_cli.ps.cluster.membership import Membership
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import BadMessage

__all__ = ["PEERS", "Peers"]

PEERS = "peers"
"""The name that the hello of a link between local servers has as its plane."""


class Peers:
    """A worker's links to other workers, or a local server's links to local servers of other parties.

    If the delivery needs its peers, as it may with workers, the loss of a peer ends the job. Then a worker starts and
    ends only after the workers that dial it, because their messages may pass through it. Otherwise the delivery routes
    around a lost peer. Used by the loop's thread only.

    links: the links, by the worker's rank or the party's index.
    """

    def __init__(self, node: Node) -> None:
        self.links: dict[int, Link] = {}
        self._node = node
        self._settings = settings = node.settings
        self._of_workers = settings.role == "worker"
        delivery, local, upper = deliveries.chosen(settings.options), settings.local, settings.upper
        assert local is not None
        self._servers = local.servers
        self._needed = self._of_workers and deliveries.needs_peers(delivery)
        if self._of_workers:
            self._usual = deliveries.peers(delivery, local.workers, settings.options)
        else:
            assert upper is not None
            self._usual = deliveries.party_peers(delivery, upper.workers // local.servers, settings.options)
        self._own = -1
        self._roster: Membership | None = None
        self._members = Members()  # the peers that have dialled; "joining" until this process knows its own rank
        self._when_here: Callable[[], None] | None = None
        self._when_gone: Callable[[], None] | None = None

    def listen(self) -> list[str]:
        """At a worker: listen if another worker dials it, and return the endpoints. A worker started by hand does not
        know its rank yet, so it listens if any worker has to. Raises InvalidSettings as Node.listen does.
        """
        rank = self._settings.rank
        pairs = self._usual if rank is None else self._settings.pairs_of(rank, self._usual)
        wanted = any(rank in (None, listener) for _, listener in pairs)
        return list(self._node.listen(self._settings.local)) if wanted else []

    def join(self, roster: Membership, own: int) -> None:
        """The roster has arrived. Dial the peers that this process dials, and check the peers that have dialled. The
        node fails if needed peers have not dialled within its timeout. Raises InvalidSettings for a wrong identity.

        own: this worker's rank, or this party's index.
        """
        self._roster, self._own = roster, own
        settings, members = self._settings, {item.rank: item for item in roster.members if item.role == "worker"}
        for listener in sorted(listener for dialler, listener in self._pairs() if dialler == own):
            member = members[self._rank_in_roster(listener)]
            if member.endpoints:
                self.links[listener] = link = self._node.transport.dial(
                    member.endpoint_for(settings.host, settings.party), member.process,
                    wide_area=member.party != settings.party, plane="local" if self._of_workers else PEERS, rank=own,
                )  # fmt: skip
                self._watch(link)
        for member in self._members:
            try:
                self._admit(member)
            except BadMessage as error:
                raise InvalidSettings(str(error), "restart all processes of the job, each only once") from None
        if self._diallers():
            self._node.loop.call_later(self._node.timeout, self._expire)

    def arrive(self, link: Link) -> None:
        """A peer has dialled. Raises BadMessage if it should not."""
        member = Member(link.name, link=link)
        self._check_identity(link)
        if self._roster is not None:
            self._admit(member)
        self._members.add(member)
        self._poll()

    def to_part_from(self) -> list[Link]:
        """The links to workers that wait for this worker's goodbye."""
        return [link for link in self.links.values() if link.dialled and self._needed]

    def on_bye(self, request: Request) -> None:
        """A worker that dials this worker has finished. Raises BadMessage if the sender does not dial this worker."""
        member = self._members.at(request.link)
        if member is None or member.state == "joining":
            raise BadMessage("a goodbye of a process that does not dial this one")
        self._node.shutdown.answer_bye(request)
        member.state = "gone"
        self._poll()

    def when_here(self, call: Callable[[], None]) -> None:
        """Call this function once all workers that dial this one have connected, possibly now."""
        self._when_here = call
        self._poll()

    def when_gone(self, call: Callable[[], None]) -> None:
        """Call this function once all workers that dial this one are done, possibly now."""
        self._when_gone = call
        self._poll()

    def _check_identity(self, link: Link) -> None:
        self._node.check_identity(link, "worker" if self._of_workers else "party", self._roster)

    def _admit(self, member: Member) -> None:
        """A process that has dialled gets its place. Raises BadMessage if it should not have dialled."""
        link = member.link
        assert link is not None
        self._check_identity(link)
        rank = link.hello.get("rank")
        if type(rank) is not int or (rank, self._own) not in self._pairs() or rank in self.links:
            kind = ("of rank {}", "the worker of rank {}") if self._of_workers else ("of party {}", "that of party {}")
            who, whom = kind[0].format(rank), kind[1].format(self._own)
            raise BadMessage(f"{link.name} {who} dials {whom}, which it should not")
        member.rank, member.state = rank, "in"
        self.links[rank] = link
        self._watch(link)

    def _pairs(self) -> set[tuple[int, int]]:
        return self._settings.pairs_of(self._own, self._usual)

    def _rank_in_roster(self, peer: int) -> int:
        """The peer of a local server is the local server of the other party that has the same rank in its party."""
        if self._of_workers:
            return peer
        assert self._roster is not None
        return peer * self._servers + self._roster.rank % self._servers

    def _watch(self, link: Link) -> None:
        if self._needed:
            self._node.liveness.watch(link)

    def _diallers(self) -> set[int]:
        """The ranks of the workers that dial this worker and that it needs."""
        return {dialler for dialler, listener in self._pairs() if listener == self._own and self._needed}

    def _poll(self) -> None:
        if self._when_here is not None and self._diallers() <= self.links.keys():
            call, self._when_here = self._when_here, None
            call()
        gone = {member.rank for member in self._members if member.state == "gone"}
        if self._when_gone is not None and self._diallers() <= gone:
            call, self._when_gone = self._when_gone, None
            call()

    def _expire(self) -> None:
        missing = self._diallers() - self.links.keys()
        if missing and self._roster is not None:
            members = (item for item in self._roster.members if item.role == "worker")
            names = ", ".join(item.process for item in members if item.rank in missing)
            what = f"waited {self._node.timeout:g} s for {names} to dial this worker"
            self._node.fail(TimedOut(what, "can its host be reached from there, or does a firewall keep them apart?"))
