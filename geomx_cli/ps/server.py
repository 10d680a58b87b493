"""A server: members below and, optionally, roots above. Without an upstream it is a root itself.

flat      root:          members are the workers
central   local server:  members are its party's workers, upstream are the roots
          root:          members are the local servers, the master worker and the central party's workers
spread    as central, with a root in each party

One loop handles one message at a time. A server ends when all members have said goodbye.
"""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from geomx_cli.contract.config import NodeSettings
from geomx_cli.core.errors import GeomxError
from geomx_cli.core.event_log import EventLog
from geomx_cli.core.events import WarningRaised
from geomx_cli.ps.aggregation.aggregator import Aggregator
from geomx_cli.ps.aggregation.algorithm import ServerAlgorithm, ServerDelivery
from geomx_cli.ps.aggregation.compression import ServerCompression
from geomx_cli.ps.aggregation.slices import SliceState, SliceTable
from geomx_cli.ps.aggregation.straggler_monitor import DeadlockBreaker, PendingWait, StragglerMonitor
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.arrays import Arrays
from geomx_cli.ps.cluster.members import ServerMembers
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.partition import Placements
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.local_services import LocalServices
from geomx_cli.ps.net.lanes import QUIET, Lane
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.memory import share_one_heap
from geomx_cli.ps.net.wire import BadMessage, Header, Kind
from geomx_cli.ps.optim.optimizers import Optimizer
from geomx_cli.ps.party_loss import PartyLoss
from geomx_cli.ps.peers import PEERS, Peers
from geomx_cli.ps.server_joining import ServerJoining
from geomx_cli.ps.server_state import ServerState
from geomx_cli.ps.services import RootServices, Services

__all__ = ["ContributionService", "Server"]

PARTING, SEARCH = 2.0, 30.0
"""Two limits, in seconds. Members that have said goodbye to an earlier life say it again within this time, if they had
no answer. A server that all members have left looks for its schedulers and global servers, which may have ended."""


def _warn(events: EventLog, message: str) -> None:
    events.write(WarningRaised(message=message))


class ContributionService:
    """Checks who sends contributions and for which ranks, and hands them to the aggregator; see ContributionInbox. Used
    by the loop's thread only.
    """

    def __init__(
        self,
        settings: NodeSettings,
        node: Node,
        members: ServerMembers,
        delivery: ServerDelivery,
        aggregator: Aggregator,
    ) -> None:
        self._settings = settings
        self._node = node
        self._members = members
        self._delivery = delivery
        self._aggregator = aggregator

    def accept(self, link: Link, header: Header, payload: memoryview | None, credit: int | None = None) -> None:
        """Hand an EXCHANGE to the aggregator. Raises BadMessage if it is invalid, or its sender may not send it."""
        rank = self._check_sender(link, header)
        self._aggregator.on_exchange(link, header, payload, rank, credit)

    def check(self, link: Link, header: Header) -> None:
        """See ContributionInbox.check."""
        self._check_sender(link, header)
        self._aggregator.table.entry(header)

    def hand_in(self, link: Link, header: Header, payload: memoryview, credit: int) -> None:
        """See ContributionInbox.hand_in."""
        try:
            self.accept(link, header, payload, credit)
        except BadMessage as error:
            self._node.transport.refuse(link, error, credit)
        except GeomxError as error:
            self._node.fail(error)

    def kept(self, header: Header) -> Arrays:
        """See ContributionInbox.kept."""
        return self._aggregator.table.entry(header).part("delivery")

    def brought_by(self, link: Link, rank: int) -> set[int]:
        """The ranks for which this member may contribute; some may not have arrived yet."""
        plane, own = str(link.hello["plane"]), int(link.hello["rank"])
        settings = self._settings.local if plane == "local" else self._settings.upper
        count = settings.workers if settings is not None else 0
        return {rank - own + other for other in self._delivery.brings(plane, own) if 0 <= other < count}

    def _check_sender(self, link: Link, header: Header) -> int:
        """The sender's rank. Raises BadMessage unless the contribution is of ranks, in ascending order, that it may
        contribute for: its own, or members of its plane that the delivery allows.
        """
        rank, ranks = self._members.rank_of(link), header.contributors
        may = ranks == (rank,) or (
            bool(ranks) and list(ranks) == sorted({*ranks}.intersection(self.brought_by(link, rank)))
        )
        if not may or not self._members.trains(rank):
            raise BadMessage(f"contributions of ranks {ranks} from rank {rank}")
        return rank


class Server:
    """One server process; `run` returns when the job has succeeded and raises GeomxError otherwise."""

    def __init__(
        self, settings: NodeSettings, events: EventLog, algorithm: ServerAlgorithm, delivery: ServerDelivery
    ) -> None:
        share_one_heap()
        self._settings = settings
        self._is_root = settings.role == "global_server" or settings.upper is None
        warn = partial(_warn, events)
        self._state = ServerState(Path(settings.state_dir) if settings.state_dir else None, warn)
        self._members = ServerMembers(settings, self._is_root)
        gradients = not algorithm.starts_from_value
        self._compression = ServerCompression(settings, is_root=self._is_root, gradients=gradients)
        self._upstream = None if self._is_root else UpstreamClient(settings.incarnation)
        self._delivery = delivery
        self.node = Node(
            settings, events, on_tensor=self._on_tensor, on_request=self._on_request, on_link=self._on_link,
            on_renewed=self._on_renewed, on_reconnect=self._on_reconnect, on_asked=self._on_asked, active=self._active,
        )  # fmt: skip
        upstream = self._upstream
        wan = self._compression.wan
        placements = Placements(
            settings, self._members, is_root=self._is_root, ratio=lambda: wan.ratio,
            rank=lambda: self.node.memberships[0].rank,
        )  # fmt: skip
        self._table = SliceTable(
            algorithm=algorithm, roots=None if upstream is None else lambda: len(upstream.links),
            required_contributors=self._members.required_contributors, cohort_of=self._members.cohort_of,
            shard_of=self._members.shard_of, declared=placements.has_declared,
        )  # fmt: skip
        self._deadlocks = DeadlockBreaker(self._table, self._members.links, self._notify_roots if upstream else None)
        policy = settings.text("party_loss") if self._is_root else "wait"
        self._party_loss = PartyLoss(self.node, self._members, self._table, policy, self._on_party_change)
        self._aggregator = Aggregator(
            delivery=delivery, upstream=upstream, own_rank=lambda: self._joining.party_index, table=self._table,
            above=wan, below=self._compression.below,
            warn=warn, commit=self._commit, on_arrival=self._party_loss.on_arrival,
            has_missed=self._members.has_missed, share_factor=self._members.share_factor,
        )  # fmt: skip
        self._local: LocalServices | None = None
        self._peers: Peers | None = None
        if upstream is None:
            self._services: Services = RootServices(
                self.node, self._members, self._aggregator, wan, self._state, placements
            )
        else:
            self._services = self._local = LocalServices(
                self.node, self._members, upstream, self._aggregator, wan, self._state, placements,
                lambda: self._joining.party_index,
            )  # fmt: skip
            self._peers = Peers(self.node)
            upstream.peers = self._peers.links
        self._straggler_monitor = StragglerMonitor(self.node, self._members, self._waits)
        self._contributions = ContributionService(settings, self.node, self._members, delivery, self._aggregator)
        self._joining = ServerJoining(settings, self.node, self._members, upstream, self._peers, self._on_joined)
        delivery.begin(self.node, upstream, self._contributions)
        self._state.restore(self._members, self._aggregator, self._services)
        self._joining.register()

    def run(self) -> Optimizer | None:
        """Serve until all members have said goodbye; return a root's optimizer, if one was set."""
        self._deadlocks.start(self.node.loop)
        self.node.loop.every(self._settings.number("heartbeat"), self._report)
        self._straggler_monitor.start()
        self._party_loss.start()
        if self._settings.incarnation and self._members.all_gone:  # killed while it said goodbye, or saved
            self.node.loop.call_later(min(SEARCH, self.node.timeout / 2), self.node.loop.stop)
        try:
            self.node.run()
        finally:
            self._services.close()
            self._report()
            self.node.close()
            self._state.close()
        return self._aggregator.optimizer

    def optimizer_state(self) -> Arrays:
        """Copies of the optimizer's arrays, named "key/slice/array"."""
        return self._table.copy_of("optimizer")

    def _commit(self, entry: SliceState) -> None:
        self._state.commit(
            entry, asynchronous=self._table.asynchronous, optimizers=self._aggregator.history.uses
        )  # fmt: skip

    # Members.

    def _on_link(self, link: Link) -> None:
        if link.hello.get("plane") == PEERS:
            if self._peers is None:
                raise BadMessage(f"{link.name} dials a global server as a local one")
            self._peers.arrive(link)
            return
        self._joining.check_identity(link)
        self._members.arrive(link)
        self._state.save_members(self._members)
        self.node.liveness.watch(link, self._party_loss.allowance(self._members.rank_of(link)))
        self._serve()

    def _on_renewed(self, link: Link) -> None:
        """The process at this link was restarted. Other processes send again the messages that it lost, and it repeats
        its requests.
        """
        self._aggregator.forget_requests(link)
        self._services.forget_requests(link)
        self._delivery.on_renewed(link)

    def _on_reconnect(self, link: Link, lane: Lane) -> None:
        if self._upstream is not None:
            self._upstream.repeat(link, lane)
            self._deadlocks.on_root_reconnect()
        self._delivery.on_reconnect(link, lane)
        if (member := self._members.at(link)) is not None:
            self._deadlocks.on_reconnect(member.rank)
            if lane == "control":
                self._aggregator.on_reconnect(link)

    def _on_asked(self, link: Link, header: Header) -> None:
        if self._upstream is None or link not in (*self._upstream.links, *self._upstream.peers.values()):
            raise BadMessage("a request for contributions from a process that is no global server of this one")
        if header.topic in ("again", "damaged"):
            self._upstream.again(link, header.request, damaged=header.topic == "damaged")
        else:
            self._delivery.on_asked(link, header)
            self._deadlocks.request_slice(header.key, header.slice, header.round)

    def _notify_roots(self) -> None:
        """Report to the roots, which wait for this party, that its members are stuck."""
        if self._upstream is not None and self._upstream.waiting:
            for root in self._upstream.links:
                root.control("stuck")

    def _on_party_change(self) -> None:
        """A party is left out, or takes part again."""
        self._state.save_members(self._members)
        self._services.members_changed()
        self.node.loop.submit(self._aggregator.members_changed)  # it may be in the middle of a contribution

    def _leave(self, request: Request) -> None:
        member = self._members.member(request.link)
        self._services.apply("leave", {}, member)
        request.answer()
        self._aggregator.members_changed()
        self._services.release_barriers()
        self._leave_above()

    def _leave_above(self) -> None:
        """When all members have left, the local server leaves too."""
        if self._upstream is not None and self._members.required_contributors() == []:
            self._delivery.leave()
            for root in self._upstream.links:
                self.node.rpc.ask(root, "leave", {}, lambda _: None, self.node.fail)

    def _on_goodbye(self, request: Request) -> None:
        self._services.apply("bye", {}, self._members.member(request.link))
        self.node.shutdown.answer_bye(request)
        self._end_if_over()

    def _end_if_over(self) -> None:
        # A member that was killed while it said goodbye says it again in its next life.
        if self._members.all_gone and not self.node.shutdown.has_begun:
            self.node.goodbye(self._upstream.links if self._upstream is not None else ())

    # Tensors.

    def _on_tensor(self, link: Link, header: Header, payload: memoryview | None) -> None:
        if self._delivery.receive(link, header, payload):
            return
        if header.kind == Kind.RESULT:
            if self._upstream is None:
                raise BadMessage("a result for a server that has no global server")
            self._upstream.on_result(link, header, payload)
            return
        rank = self._members.rank_of(link)
        if header.kind == Kind.EXCHANGE:
            self._contributions.accept(link, header, payload)
        elif header.kind == Kind.PULL:
            self._aggregator.values.on_pull(link, header, rank, payload)
            if self._members.set_up(rank):
                self._state.save_members(self._members)
                self._aggregator.members_changed()
        elif header.kind == Kind.PUSH:
            self._aggregator.values.on_push(link, header, payload)
        else:
            raise BadMessage(f"a {header.kind.name} that this delivery does not know")

    # Requests.

    def _on_request(self, request: Request) -> None:
        upstream = self._upstream
        if self._local is not None and upstream is not None and request.link in upstream.links:
            if request.topic == "stragglers":
                # Contributions in flight to the roots mean that no member of this party is behind.
                request.answer({"processes": [] if upstream.waiting else self._straggler_monitor.stragglers()})
                return
            if request.topic == "compression":
                self._local.use_codec(request)
                return
        if self._delivery.on_request(request):
            return
        rank = self._members.rank_of(request.link)
        if request.topic == "stuck":
            for other in self._contributions.brought_by(request.link, rank):
                self._deadlocks.stuck_elsewhere(other)
        elif request.topic == "leave":
            self._leave(request)
        elif request.topic == "bye":
            self._on_goodbye(request)
        else:
            self._services.receive(request)

    def _serve(self) -> None:
        """A member has arrived, or the roots are dialled: process all messages that waited for this."""
        self._services.serve()
        self._aggregator.members_changed()

    def _on_joined(self) -> None:
        self._serve()
        if self._settings.incarnation:  # perhaps it was killed while the job ended, and lost the last news
            self._leave_above()
            self.node.loop.call_later(PARTING, self._end_if_over)

    def _waits(self) -> Iterator[PendingWait]:
        """The current waits for members: in a round, for a master, or at a barrier."""
        missing = self._table.oldest()
        who = frozenset(self._members.initializing()) if self._members.complete else frozenset()
        if missing is not None and who:
            yield PendingWait("set an optimizer, pulled or left", missing[1], who, "and the first round waits for that")
        elif missing is not None and missing[2]:
            yield PendingWait(f"contributed to round {missing[0]}", missing[1], missing[2])
        barriers = list(self._services.at_barriers())
        # A member that waits in a round cannot reach a barrier. The round itself names its stragglers.
        rounds = (round_ for _, _, round_ in self._table.open_rounds()) if barriers else ()
        held = {rank for round_ in rounds for waiter in round_.waiting() for rank in waiter.ranks}
        for began, ranks in barriers:
            if late := ranks - held:
                yield PendingWait("reached a barrier", began, late)

    def _active(self) -> float:
        """See Liveness: scripts that agents have started may take any time until they join. So may a party that is out,
        until it is back.
        """
        joining = self._settings.supervised and not self._members.complete
        return time.monotonic() if joining or self._is_cut_off() else 0.0

    def _is_cut_off(self) -> bool:
        """Whether this party may be left out, because a root is silent."""
        roots = self._upstream.links if self._upstream is not None and self.node.absence else ()
        return any(time.monotonic() - root.health.heard > QUIET for root in roots)

    def _report(self) -> None:
        self.node.telemetry.awaited = self._straggler_monitor.awaited()
        self.node.telemetry.left_out = self._party_loss.left_out()
        self.node.telemetry.round = self._table.contributed
        self.node.encoded = self._compression.bytes
        if self._is_root and self._table.asynchronous:
            self.node.telemetry.versions = self._members.by_party(self._table.finished)
