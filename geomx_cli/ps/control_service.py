"""The control requests that a server answers: cluster layout, placement, optimizer, codec, mode, barriers."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from geomx_cli.core.conventions import party_of
from geomx_cli.core.errors import GeomxError, InvalidSettings, TrainingFailed
from geomx_cli.core.events import WarningRaised
from geomx_cli.ps.aggregation.aggregator import Aggregator
from geomx_cli.ps.aggregation.codec import parse_codec
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.cluster.barrier import Barrier
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.cluster.key_values import KeyValues
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.cluster.server_members import ServerMembers
from geomx_cli.ps.model_comparison import ModelComparison
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.optimizer_service import OptimizerService
from geomx_cli.ps.optimizer_state_service import OptimizerStateService
from geomx_cli.ps.placement_service import PlacementService

__all__ = ["ControlService"]

_Handler = Callable[[Request], None]
_Check = Callable[[Request], None]
"""Raises InvalidSettings for a request that its sender may not make."""


class ControlService:
    """Answers control requests. They are queued until all members have arrived and the roots are dialled.

    A local server asks the rank-0 root about anything that concerns the whole job, and relays unknown topics, which any
    member may ask about. `own_party`: the index of a local server's party. Used by the loop's thread only.
    """

    def __init__(
        self, node: Node, members: ServerMembers, upstream: UpstreamClient | None, aggregator: Aggregator,
        wan: Compression, placements: PlacementService, own_party: Callable[[], int],
    ) -> None:  # fmt: skip
        self._node = node
        self._members = members
        self._upstream = upstream
        self._aggregator = aggregator
        self._wan = wan
        self._own_party = own_party
        self._waiting: list[Request] = []
        self._optimizer_service = OptimizerService(aggregator, members)
        self._rank_scope = ""
        self._barriers = {"party": Barrier(members.of_own_plane), "all": Barrier(members.training)}
        self._topics: dict[str, tuple[_Handler, _Check]] = {
            "cluster": (self._on_cluster, _any_member),
            "declare": (placements.declare, self._check_name),
            "barrier": (self._on_barrier, _any_member),
            "compression": (self._on_compression, _any_member),
            "store": (self._on_store, _any_member),
            "mode": (self._on_mode, self._check_master),
            "patience": (self._on_patience, _any_member),
            "optimizer": (self._on_optimizer, self._check_name),
            "compare": (self._on_compare, self._check_group),
            **dict.fromkeys(OptimizerStateService.TOPICS, (self._on_state, self._check_name)),
        }
        self._key_values = KeyValues(node.loop, lambda link: int(link.hello["workers"]))
        self._optimizer_states = OptimizerStateService(
            aggregator, node.settings.number("timeout"), lambda: len(members.training())
        )
        planned = node.settings.num_all_workers  # of which members speak for others with `--reduce torch`
        self._comparison = ModelComparison(self._on_difference, lambda: max(planned, members.workers()))

    def take(self, request: Request) -> None:
        """Answer `request`, now or later; a malformed one is counted and refused."""
        self._waiting.append(request)
        self.serve()

    def serve(self) -> None:
        """Answer the queued requests if the cluster is complete."""
        while self._waiting and self._members.complete and (self._upstream is None or self._upstream.links):
            self._answer(self._waiting.pop(0))

    def use_codec(self, request: Request) -> None:
        """Use the codec that a root has set; refuses an unknown one, and another one than is in use."""
        try:
            self._wan.set(request.body["spec"])
        except InvalidSettings as error:
            request.refuse(error)
        else:
            request.answer()

    def release_barriers(self) -> None:
        """Release the barriers that are complete now."""
        for scope, barrier in self._barriers.items():
            while released := barrier.release():
                if scope == "party" or self._upstream is None:
                    for request in released:
                        request.answer()
                else:
                    self._barrier_above(released)

    def at_barriers(self) -> Iterator[tuple[float, frozenset[int]]]:
        """For each barrier with waiting members: since when (time.monotonic seconds), and the missing ranks."""
        for barrier in self._barriers.values():
            if (waiting := barrier.waiting()) is not None and waiting[1]:
                yield waiting

    def _answer(self, request: Request) -> None:
        try:
            handle, check = self._topics.get(request.topic, (self._relay, _any_member))
            check(request)
            handle(request)
        except GeomxError as error:
            request.refuse(error)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            text = f"a malformed request {request.topic!r}: {error!r}"
            self._node.transport.count_refused(request.link, "malformed", text)
            request.refuse(InvalidSettings(text))

    def close(self) -> None:
        """No request follows."""
        self._comparison.close()

    def _on_compare(self, request: Request) -> None:
        """See ModelComparison. The worker does not wait for the answer."""
        if self._upstream is not None:
            self._relay_to_all(request, self._upstream.links[:1])
            return
        self._comparison.take(request.body)
        request.answer()

    def _on_difference(self, message: str, hint: str) -> None:
        """Workers train different models: mark the job's result, or end the job (`--strict`)."""
        if self._node.settings.options["strict"]:
            self._node.fail(TrainingFailed(message, hint))
        else:
            self._node.events.write(WarningRaised(message=f"{message}; {hint}", affects_result=True))

    def _relay(self, request: Request) -> None:
        """Relay a topic that only the algorithm or the roots handle."""
        answer = self._aggregator.table.algorithm.on_request(request.topic, request.body, self._upstream is None)
        if answer is not None:
            request.answer(answer)
            return
        if self._upstream is None:
            raise InvalidSettings(f"unknown request {request.topic!r}")
        self._node.rpc.ask(self._upstream.links[0], request.topic, request.body, request.answer, request.refuse)

    def _on_patience(self, request: Request) -> None:
        """A script allows more than the option `patience`; all roots know when it is answered."""
        self._node.patience = max(self._node.patience, request.body["seconds"])
        self._relay_to_all(request, self._upstream.links if self._upstream is not None else ())

    def _on_store(self, request: Request) -> None:
        """See KeyValues, which the rank-0 root has."""
        if self._upstream is None:
            self._key_values.serve(request)
            return
        asks = request.body["op"] in ("get", "wait")
        limit = self._node.settings.number("timeout") + request.body.get("seconds", 0.0)
        answer = partial(request.answer, keep=not asks)
        self._node.rpc.ask(self._upstream.links[0], request.topic, request.body, answer, request.refuse, limit)

    def _on_cluster(self, request: Request) -> None:
        """Describe the job's members: answered by the rank-0 root, completed by the local server."""
        if self._upstream is not None:
            self._rank_scope = self._rank_scope or _scope(request)

            def complete(body: Body) -> None:
                request.answer({**body, "party_index": self._own_party(), "root": False, "trains": True})

            root, limit = self._upstream.links[0], self._node.joining
            self._node.rpc.ask(root, "cluster", request.body, complete, request.refuse, limit)
            return
        self._check_rank_scope(_scope(request))
        request.answer(
            {
                "workers": self._members.workers_by_party(),
                "central": self._members.central_workers(),
                "root": True,
                "flat": self._node.settings.upper is None,
                "trains": self._members.trains(self._members.rank_of(request.link)),
                "gradients": not self._aggregator.table.algorithm.starts_from_value,
                "party_index": -1,
            }
        )

    def _check_rank_scope(self, scope: str) -> None:
        """Check that all workers use the same rank scope: otherwise there are two masters, or none, and no common
        barrier.
        """
        self._rank_scope = self._rank_scope or scope
        if scope != self._rank_scope and self._node.settings.upper is not None:
            what = f"its rank scope is {scope}, and that of other workers {self._rank_scope}"
            raise InvalidSettings(what, "give all workers of the job the same GEOMX_RANK_SCOPE")

    def _check_name(self, request: Request) -> None:
        """Check that a request is made in the name of its sender. Raises InvalidSettings, and logs it, if it is not.

        A local server checks its own workers; a root then only that a worker is of the local server's party, which
        names tell unless processes were started by hand.
        """
        by, link = request.body["by"], request.link
        if self._members.is_party(self._members.rank_of(link)):
            matches = "/" not in link.name or party_of(by) == party_of(link.name)
        else:
            matches = by == link.name
        if not matches:
            what = f"{link.name} makes the request {request.topic!r} in the name of {by}"
            raise self._refusal(link, what, "each process makes requests in its own name")

    def _check_group(self, request: Request) -> None:
        """See `_check_name`; with `--reduce torch` a member speaks for its party's other workers."""
        speaks = self._node.settings.options["reduce"] == "torch"
        if not (speaks and party_of(request.body["by"]) == party_of(request.link.name)):
            self._check_name(request)

    def _check_master(self, request: Request) -> None:
        """Check that a request is made by the master worker, or for a party that may have it. Raises InvalidSettings,
        and logs it, if it is not.
        """
        settings, link = self._node.settings, request.link
        rank = self._members.rank_of(link)
        if settings.rank is not None:
            scope = "global" if settings.text("rank_scope") == "global" else "party"
        else:  # by hand only workers are sure to have the option
            scope = self._rank_scope or ("party" if self._node.memberships[0].rank == 0 else "")
        if not self._members.may_be_master(rank, scope):
            who = f"a worker of {link.name}" if self._members.is_party(rank) else link.name
            what = f"{who} asks for asynchronous training, and is not the master worker"
            raise self._refusal(link, what, "let the master worker create the store of type dist_async")

    def _refusal(self, link: Link, what: str, hint: str) -> InvalidSettings:
        """The error for a request that `link` may not make; logs it here too."""
        self._node.transport.count_refused(link, "malformed", what)
        return InvalidSettings(what, hint)

    def _on_optimizer(self, request: Request) -> None:
        """See OptimizerService. Forwarded to all roots."""
        if self._upstream is not None:
            self._relay_to_all(request, self._upstream.links)
        else:
            self._node.loop.call_later(0.0, self._close_held_rounds)
            request.answer(self._optimizer_service.serve(request.body, self._members.rank_of(request.link)))

    def _close_held_rounds(self) -> None:
        """Close the rounds that were held. An error there fails the job, not the request."""
        try:
            self._aggregator.members_changed()
        except GeomxError as error:
            self._node.fail(error)

    def _on_mode(self, request: Request) -> None:
        """Make the roots handle each party's contributions separately, as the master's script requests by its store's
        type. Raises InvalidSettings once rounds have begun.

        The first root decides before the others are asked.
        """
        if self._upstream is not None:
            first, *others = self._upstream.links
            then = partial(self._relay_to_all, request, others)
            self._node.rpc.ask(first, request.topic, request.body, lambda _: then(), request.refuse)
            return
        if request.body["asynchronous"] and not self._aggregator.switch_to_async():
            raise InvalidSettings("the rounds have begun", "create the store before training starts")
        request.answer()

    def _on_compression(self, request: Request) -> None:
        """Set the codec at all global servers, then at all local servers, before answering any requester. Any worker
        may ask for it. Raises InvalidSettings for another codec than is in use, and for the first one once a round is
        finished.
        """
        if self._upstream is not None:
            self._relay_to_all(request, self._upstream.links)
            return
        spec = request.body["spec"]
        if parse_codec(spec) is not None and not self._wan.spec and self._aggregator.table.last_round:
            what = f"gradient compression {spec} is asked for, and training has begun"
            raise InvalidSettings(what, "let all workers call set_gradient_compression before their first push")
        self._wan.set(spec)
        self._relay_to_all(request, self._members.local_servers())

    def _on_state(self, request: Request) -> None:
        """Access the optimizer's state at the root named in the request. Answers that can be read again are not stored.
        """
        keep = request.topic != "state_read"
        if self._upstream is None:
            rest = self._optimizer_states.rest(request.link) if request.topic == "state_open" else 0.0
            if rest > 0:
                self._node.loop.call_later(rest, partial(self._answer, request))
            else:
                request.answer(self._optimizer_states.serve(request.topic, request.body, request.link), keep=keep)
            return
        root, links = request.body.get("root", 0), self._upstream.links
        if root >= len(links):
            raise InvalidSettings(f"there is no global server {root}")
        answer = partial(request.answer, keep=keep)
        self._node.rpc.ask(links[root], request.topic, request.body, answer, request.refuse)

    def _relay_to_all(self, request: Request, links: Sequence[Link]) -> None:
        """Relay to all these links, and answer when all have given the same answer."""
        if not links:
            request.answer()
            return
        missing = set(range(len(links)))
        errors: list[GeomxError] = []

        def answered(index: int, _: Body) -> None:
            missing.discard(index)
            if not missing:
                request.refuse(errors[0]) if errors else request.answer()

        def failed(index: int, error: GeomxError) -> None:
            errors.append(error)
            answered(index, {})

        for index, link in enumerate(links):
            self._node.rpc.ask(link, request.topic, request.body, partial(answered, index), partial(failed, index))

    def _on_barrier(self, request: Request) -> None:
        self._barriers[request.body["scope"]].ask(self._members.rank_of(request.link), request)
        self.release_barriers()

    def _barrier_above(self, released: list[Request]) -> None:
        """All members of the party have arrived: enter the barrier of the parties."""
        assert self._upstream is not None

        def answer(body: Body) -> None:
            for request in released:
                request.answer()

        def refuse(error: GeomxError) -> None:
            for request in released:
                request.refuse(error)

        limit = self._node.patience
        self._node.rpc.ask(self._upstream.links[0], "barrier", {"scope": "all"}, answer, refuse, limit, "idle")


def _any_member(request: Request) -> None:
    """Any member may make this request."""


def _scope(request: Request) -> str:
    """The rank scope of a worker that asks for the cluster's layout."""
    return "global" if request.body.get("rank_scope") == "global" else "party"
