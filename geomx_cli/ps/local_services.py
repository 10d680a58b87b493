"""How a local server answers control requests: it knows its party, and asks the roots about the rest."""

from collections import deque
from collections.abc import Callable
from functools import partial

from geomx_cli.core.errors import GeomxError, InvalidSettings
from geomx_cli.ps.aggregation.aggregator import Aggregator
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.cluster.members import Member, ServerMembers
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.partition import Placements
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.optimizer_service import OptimizerStateService
from geomx_cli.ps.server_state import ServerState
from geomx_cli.ps.services import Scope, Services, any_member

__all__ = ["LocalServices"]


class LocalServices(Services):
    """Asks the rank-0 root about what concerns the whole job. Relays unknown topics, which any member may use.

    own_party: the index of this server's party.
    """

    def __init__(
        self, node: Node, members: ServerMembers, upstream: UpstreamClient, aggregator: Aggregator, wan: Compression,
        state: ServerState, placements: Placements, own_party: Callable[[], int],
    ) -> None:  # fmt: skip
        super().__init__(node, members, aggregator, wan, state)
        self._upstream = upstream
        self._placements = placements
        self._own_party = own_party
        self._declaring: dict[Member, deque[Callable[[], None]]] = {}
        self._asked, self._passed = 0, 0  # barriers of the parties: reached by this party; passed by all
        self._commands |= {"placed": placements.assign}
        self._topics |= {
            "cluster": (self._on_cluster, any_member), "declare": (self._on_declare, self._check_name),
            "compression": (self._to_roots, any_member), "store": (self._on_store, self._check_store),
            "mode": (self._on_mode, self._check_master), "patience": (self._on_patience, any_member),
            "optimizer": (self._to_roots, self._check_name), "compare": (self._to_root, self._check_group),
            **dict.fromkeys(OptimizerStateService.TOPICS, (self._on_state, self._check_name)),
        }  # fmt: skip

    def use_codec(self, request: Request) -> None:
        """Use the codec that a root has set. Refuses an unknown codec, and a codec that differs from the one in use."""
        try:
            request.answer(self.apply("compression", request.body, Member(request.link.name, role="server")))
        except InvalidSettings as error:
            request.refuse(error)

    def _is_connected(self) -> bool:
        return bool(self._upstream.links)

    def _to_root(self, request: Request, sender: Member) -> None:
        self._node.rpc.ask(self._upstream.links[0], request.topic, request.body, request.answer, request.refuse)

    def _to_roots(self, request: Request, sender: Member) -> None:
        self._relay_to_all(request, self._upstream.links)

    def _on_other(self, request: Request, sender: Member) -> None:
        algorithm = self._aggregator.table.algorithm
        answer = algorithm.on_request(request.topic, request.body, False)
        if answer is None:
            self._to_root(request, sender)
            return
        if self._changes(request.topic, request.body):
            self._state.log(request.topic, request.body, sender)
        request.answer(answer)

    def _on_cluster(self, request: Request, sender: Member) -> None:
        """Complete the root's description of the job's members."""
        self.apply("cluster", request.body, sender)

        def complete(body: Body) -> None:
            request.answer({**body, "party_index": self._own_party(), "root": False, "trains": True})

        root, limit = self._upstream.links[0], self._node.joining
        self._node.rpc.ask(root, "cluster", request.body, complete, request.refuse, limit)

    def _on_declare(self, request: Request, sender: Member) -> None:
        """For each member, ask the root about one declaration at a time. A member may declare a tensor many times, and
        each answer of the root has all slices.
        """
        self._placements.tensors_of(request.body, sender)
        waiting = self._declaring.setdefault(sender, deque())
        waiting.append(partial(self._declare, request, sender))
        if len(waiting) == 1:
            waiting[0]()

    def _declare(self, request: Request, sender: Member) -> None:
        """Answer a member's declaration, if necessary after the root, and then continue with the member's next one."""

        def placed(body: Body) -> None:
            answer(self.apply("placed", {**request.body, "placements": body["placements"]}, sender))

        def answer(body: Body) -> None:
            request.answer(body, keep=False)
            go_on()

        def refuse(error: GeomxError) -> None:
            request.refuse(error)
            go_on()

        def go_on() -> None:
            waiting = self._declaring[sender]
            waiting.popleft()
            if waiting:
                self._node.loop.submit(waiting[0])

        known = self._placements.known(self._placements.tensors_of(request.body, sender))
        if known is not None:
            answer(known)
        else:
            self._node.rpc.ask(self._upstream.links[0], "declare", request.body, placed, refuse)

    def _on_patience(self, request: Request, sender: Member) -> None:
        """By the time the request is answered, all roots know the new patience."""
        self.apply("patience", request.body, sender)
        self._to_roots(request, sender)

    def _on_store(self, request: Request, sender: Member) -> None:
        """See KeyValues, which the rank-0 root has."""
        asks = request.body["op"] in ("get", "wait")
        limit = self._node.settings.number("timeout") + request.body.get("seconds", 0.0)
        answer = partial(request.answer, keep=not asks)
        self._node.rpc.ask(self._upstream.links[0], request.topic, request.body, answer, request.refuse, limit)

    def _on_mode(self, request: Request, sender: Member) -> None:
        """The first root decides before the others are asked."""
        first, *others = self._upstream.links
        then = partial(self._relay_to_all, request, others)
        self._node.rpc.ask(first, request.topic, request.body, lambda _: then(), request.refuse)

    def _on_state(self, request: Request, sender: Member) -> None:
        """Ask the root that the request names."""
        root, links = request.body.get("root", 0), self._upstream.links
        if root >= len(links):
            raise InvalidSettings(f"there is no global server {root}")
        answer = partial(request.answer, keep=request.topic != "state_read")
        self._node.rpc.ask(links[root], request.topic, request.body, answer, request.refuse)

    def _on_met(self, scope: Scope, number: int) -> None:
        """All members of the party have reached the barrier. If it is a barrier of all workers of the job, a barrier of
        the parties with the same number follows.
        """
        if scope == "party":
            super()._on_met(scope, number)
            return
        super()._on_met(scope, min(number, self._passed))
        if number <= self._asked:
            return
        self._asked = number

        def passed(_: Body) -> None:
            self._passed = max(self._passed, number)
            super(LocalServices, self)._on_met(scope, self._passed)

        def refused(error: GeomxError) -> None:
            self._asked = self._passed  # a repeat may ask again
            for waiting in self._past(scope, number):
                waiting.request.refuse(error)

        body, limit = {"scope": scope, "number": number}, self._node.patience
        self._node.rpc.ask(self._upstream.links[0], "barrier", body, passed, refused, limit, "idle")
