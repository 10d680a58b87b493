"""The control requests that a server answers: cluster layout, placement, optimizer, codec, mode, barriers.

A request that changes the server's state is a *command*. `Services.apply` changes the state. The result depends only on
topic, body and sender, and `apply` answers no one. So the same commands in the same order lead to the same state again.
Other conditions, such as whether rounds have begun, are added to the body. The rest of this module decides who may make
a request, which servers have to know of it, and when it is answered.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from geomx_cli.core.conventions import party_of
from geomx_cli.core.errors import GeomxError, InvalidSettings, TrainingFailed
from geomx_cli.core.events import WarningRaised
from geomx_cli.ps.aggregation.aggregator import Aggregator
from geomx_cli.ps.aggregation.codec import parse_codec
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.cluster.key_values import CHANGING, KeyValues, KeyValueService
from geomx_cli.ps.cluster.members import Barrier, Member, ServerMembers
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.partition import Placements
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.model_comparison import ModelComparison
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import encode_body
from geomx_cli.ps.optimizer_service import OptimizerService, OptimizerStateService
from geomx_cli.ps.server_state import ServerState

__all__ = ["RootServices", "Scope", "Services", "any_member"]

_Handler = Callable[[Request, Member], None]
_Check = Callable[[Request, Member], None]
"""Raises InvalidSettings for a request that its sender may not make."""
Scope = Literal["party", "all"]


@dataclass(frozen=True, slots=True)
class _AtBarrier:
    """A request that waits for its barrier, and since when, in time.monotonic seconds."""

    number: int
    request: Request
    since: float = field(default_factory=time.monotonic)


class Services:
    """Answers control requests. They are queued until all members have arrived and the roots are dialled. Used by the
    loop's thread only.
    """

    _is_root = False

    def __init__(
        self, node: Node, members: ServerMembers, aggregator: Aggregator, wan: Compression, state: ServerState
    ) -> None:
        self._node = node
        self._members = members
        self._state = state
        self._aggregator = aggregator
        self._wan = wan
        self._queue: list[Request] = []
        self._rank_scope = ""
        self._kept: set[bytes] = set()  # requests of the algorithm that are saved
        self._barriers: dict[Scope, Barrier] = {
            "party": Barrier(members.of_own_plane), "all": Barrier(members.training)
        }  # fmt: skip
        self._at_barriers: dict[Scope, list[_AtBarrier]] = {"party": [], "all": []}
        self._commands: dict[str, Callable[[Body, Member], Body]] = {
            "cluster": self._set_rank_scope, "barrier": self._reach_barrier, "compression": self._set_codec,
            "patience": self._set_patience, "leave": self._leave, "bye": self._bye,
        }  # fmt: skip
        self._topics: dict[str, tuple[_Handler, _Check]] = {"barrier": (self._on_barrier, any_member)}
        # Topics of which a job may have any number of commands: one that gives their state, and one that sets it.
        self._summaries: dict[str, tuple[Callable[[], Body], Callable[[Body], None]]] = {
            "barrier": (self._barriers_reached, self._load_barriers)
        }  # fmt: skip
        state.summarise = lambda: {topic: save() for topic, (save, _) in self._summaries.items()}

    def apply(self, topic: str, body: Body, sender: Member) -> Body:
        """Change the state as a command says, and save the command. Returns the answer.

        Raises InvalidSettings for a refused command, and KeyError and the like for a malformed one. Such a command
        changes nothing, with one exception: a master whose optimizer is refused counts as set up.
        """
        body = self._decided(topic, body)
        try:
            answer = self._do(topic, body, sender)
            if self._changes(topic, body):
                self._state.log(topic, body, sender)
        finally:
            self._state.save_members(self._members)
        return answer

    def apply_again(self, topic: str, body: Body, sender: Member) -> None:
        """Change the state as a command says that an earlier life has saved; see `apply`."""
        self._do(topic, body, sender)
        self._changes(topic, body)

    def load_summary(self, topic: str, body: Body) -> None:
        """Change the state as all saved commands of this topic have, up to a moment."""
        self._summaries[topic][1](body)

    def _do(self, topic: str, body: Body, sender: Member) -> Body:
        if (command := self._commands.get(topic)) is not None:
            return command(body, sender)
        answer = self._aggregator.table.algorithm.on_request(topic, body, self._is_root)
        if answer is None:
            raise InvalidSettings(f"unknown request {topic!r}")
        return answer

    def _decided(self, topic: str, body: Body) -> Body:
        """The body of a command, completed from the state of the rounds. A replay has no rounds yet."""
        return {**body, "begun": self._aggregator.table.last_round > 0} if topic == "optimizer" else body

    def _changes(self, topic: str, body: Body) -> bool:
        """Whether a command has changed the state. False if an earlier command has made the same change."""
        if topic == "store":
            return body["op"] in CHANGING
        if topic in self._commands:
            return True
        if not self._aggregator.table.algorithm.keeps(topic, body):
            return False
        known, what = len(self._kept), encode_body({"topic": topic, "body": dict(body)})
        self._kept.add(what)  # workers poll: each of these is saved once
        return len(self._kept) > known

    def receive(self, request: Request) -> None:
        """Answer `request`, now or later; a malformed one is counted and refused."""
        self._queue.append(request)
        self.serve()

    def serve(self) -> None:
        """Answer the queued requests if the cluster is complete."""
        while self._queue and self._members.complete and self._is_connected():
            self._answer(self._queue.pop(0))

    def close(self) -> None:
        """No request follows."""

    def forget_requests(self, link: Link) -> None:
        """The process at this link was restarted, so it asks for everything again."""
        self._queue = [request for request in self._queue if request.link is not link]
        for scope, waiting in self._at_barriers.items():
            self._at_barriers[scope] = [item for item in waiting if item.request.link is not link]

    def members_changed(self) -> None:
        """Barriers may wait for other members now."""
        for barrier in self._barriers.values():
            barrier.update()
        self.release_barriers()

    def release_barriers(self) -> None:
        """A member has left: answer the requests at barriers that are complete without it."""
        for scope, barrier in self._barriers.items():
            self._on_met(scope, barrier.met)

    def at_barriers(self) -> Iterator[tuple[float, frozenset[int]]]:
        """For each barrier with waiting members: since when (time.monotonic seconds), and the missing ranks."""
        for scope, barrier in self._barriers.items():
            begun = [waiting.since for waiting in self._at_barriers[scope] if waiting.number > barrier.met]
            if begun and (missing := barrier.missing()):
                yield min(begun), missing

    def _is_connected(self) -> bool:
        """Whether the roots are dialled, if there are any above."""
        return True

    def _answer(self, request: Request) -> None:
        try:
            sender = self._members.member(request.link)
            handle, check = self._topics.get(request.topic, (self._on_other, any_member))
            check(request, sender)
            handle(request, sender)
        except GeomxError as error:
            request.refuse(error)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            text = f"a malformed request {request.topic!r}: {error!r}"
            self._node.transport.count_refused(request.link, "malformed", text)
            request.refuse(InvalidSettings(text))

    def _on_other(self, request: Request, sender: Member) -> None:
        """A topic that only the algorithm or the roots know."""
        raise NotImplementedError

    def _on_command(self, request: Request, sender: Member) -> None:
        request.answer(self.apply(request.topic, request.body, sender))

    def _on_barrier(self, request: Request, sender: Member) -> None:
        scope: Scope = request.body["scope"]
        self.apply("barrier", request.body, sender)
        self._at_barriers[scope].append(_AtBarrier(request.body["number"], request))
        self._on_met(scope, self._barriers[scope].met)

    def _on_met(self, scope: Scope, number: int) -> None:
        """All members have reached this barrier: answer the requests that wait for it or an earlier one."""
        for waiting in self._past(scope, number):
            waiting.request.answer()

    def _past(self, scope: Scope, number: int) -> list[_AtBarrier]:
        """Remove and return the requests that wait for this barrier or an earlier one."""
        waiting = self._at_barriers[scope]
        self._at_barriers[scope] = [item for item in waiting if item.number > number]
        return [item for item in waiting if item.number <= number]

    def _relay_to_all(self, request: Request, links: Sequence[Link]) -> None:
        """Relay to all these links, and answer when all have answered."""
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

    # Commands of all servers.

    def _set_rank_scope(self, body: Body, _: Member) -> Body:
        self._rank_scope = self._rank_scope or _scope(body)
        return {}

    def _reach_barrier(self, body: Body, sender: Member) -> Body:
        self._barriers[body["scope"]].reach(sender.rank, body["number"])
        return {}

    def _barriers_reached(self) -> Body:
        return {scope: barrier.state() for scope, barrier in self._barriers.items()}

    def _load_barriers(self, body: Body) -> None:
        for scope, barrier in self._barriers.items():
            barrier.load(body[scope])

    def _set_codec(self, body: Body, _: Member) -> Body:
        self._wan.set(body["spec"])
        return {}

    def _set_patience(self, body: Body, _: Member) -> Body:
        """A script allows more than the option `patience`."""
        self._node.patience = max(self._node.patience, body["seconds"])
        return {}

    def _leave(self, _: Body, sender: Member) -> Body:
        self._members.leave(sender)
        for barrier in self._barriers.values():
            barrier.update()
        return {}

    def _bye(self, _: Body, sender: Member) -> Body:
        self._members.part_with(sender)
        return {}

    # Who may make a request.

    def _check_name(self, request: Request, sender: Member) -> None:
        """Check that a request is made in the name of its sender. Raises InvalidSettings, and logs it, if it is not.

        A local server checks its own workers. A root checks only that a worker belongs to the local server's party.
        Names show the party unless processes were started by hand.
        """
        by, name = request.body["by"], sender.process
        if self._members.is_party(sender.rank):
            matches = "/" not in name or party_of(by) == party_of(name)
        else:
            matches = by == name
        if not matches:
            what = f"{name} makes the request {request.topic!r} in the name of {by}"
            raise self._refusal(request.link, what, "each process makes requests in its own name")

    def _check_store(self, request: Request, sender: Member) -> None:
        """See `_check_name`, for a call that says who makes it."""
        if "by" in request.body:
            self._check_name(request, sender)

    def _check_group(self, request: Request, sender: Member) -> None:
        """See `_check_name`. With `--reduce torch` a member may speak for other workers of its party."""
        speaks = self._node.settings.options["reduce"] == "torch"
        if not (speaks and party_of(request.body["by"]) == party_of(sender.process)):
            self._check_name(request, sender)

    def _check_master(self, request: Request, sender: Member) -> None:
        """Check that a request is made by the master worker, or for a party that may have it. Raises InvalidSettings,
        and logs it, if it is not.
        """
        settings = self._node.settings
        if settings.rank is not None:
            scope = "global" if settings.text("rank_scope") == "global" else "party"
        else:  # by hand only workers are sure to have the option
            scope = self._rank_scope or ("party" if self._node.memberships[0].rank == 0 else "")
        if not self._members.may_be_master(sender.rank, scope):
            who = f"a worker of {sender.process}" if self._members.is_party(sender.rank) else sender.process
            what = f"{who} asks for asynchronous training, and is not the master worker"
            raise self._refusal(request.link, what, "let the master worker create the store of type dist_async")

    def _refusal(self, link: Link, what: str, hint: str) -> InvalidSettings:
        """The error for a request that `link` may not make; logs it here too."""
        self._node.transport.count_refused(link, "malformed", what)
        return InvalidSettings(what, hint)


class RootServices(Services):
    """The requests that a root answers. The rank-0 root answers requests about the whole job."""

    _is_root = True

    def __init__(
        self, node: Node, members: ServerMembers, aggregator: Aggregator, wan: Compression, state: ServerState,
        placements: Placements,
    ) -> None:  # fmt: skip
        super().__init__(node, members, aggregator, wan, state)
        self._values = KeyValues()
        self._summaries["store"] = self._values.state, self._values.load
        self._commands |= {
            "declare": placements.place, "optimizer": OptimizerService(aggregator, members).apply,
            "mode": self._set_mode, "store": self._values.apply,
        }  # fmt: skip
        self._topics |= {
            "cluster": (self._on_cluster, any_member), "declare": (self._on_declare, self._check_name),
            "compression": (self._on_compression, any_member), "store": (self._on_store, self._check_store),
            "mode": (self._on_command, self._check_master), "patience": (self._on_command, any_member),
            "optimizer": (self._on_optimizer, self._check_name), "compare": (self._on_compare, self._check_group),
            **dict.fromkeys(OptimizerStateService.TOPICS, (self._on_state, self._check_name)),
        }  # fmt: skip
        self._store = KeyValueService(node.loop, self._values, partial(self.apply, "store"))
        self._states = OptimizerStateService(
            aggregator, node.settings.number("timeout"), lambda: len(members.training())
        )
        planned = node.settings.num_all_workers  # of which members speak for others with `--reduce torch`
        self._comparison = ModelComparison(self._on_difference, lambda: max(planned, members.workers()))

    def close(self) -> None:
        """See Services."""
        self._comparison.close()

    def forget_requests(self, link: Link) -> None:
        """See Services."""
        super().forget_requests(link)
        self._store.forget_requests(link)

    def _on_other(self, request: Request, sender: Member) -> None:
        request.answer(self.apply(request.topic, request.body, sender))

    def _on_cluster(self, request: Request, sender: Member) -> None:
        """Describe the job's members; a local server completes the answer."""
        self.apply("cluster", request.body, sender)
        request.answer(
            {
                "workers": self._members.workers_by_party(),
                "central": self._members.central_workers(),
                "root": True,
                "flat": self._node.settings.upper is None,
                "trains": self._members.trains(sender.rank),
                "gradients": not self._aggregator.table.algorithm.starts_from_value,
                "party_index": -1,
            }
        )

    def _set_rank_scope(self, body: Body, sender: Member) -> Body:
        """All workers have to use the same rank scope. Otherwise there are two masters, or none, and no common barrier.
        """
        super()._set_rank_scope(body, sender)
        scope = _scope(body)
        if scope != self._rank_scope and self._node.settings.upper is not None:
            what = f"its rank scope is {scope}, and that of other workers {self._rank_scope}"
            raise InvalidSettings(what, "give all workers of the job the same GEOMX_RANK_SCOPE")
        return {}

    def _on_declare(self, request: Request, sender: Member) -> None:
        request.answer(self.apply("declare", request.body, sender), keep=False)

    def _on_compression(self, request: Request, sender: Member) -> None:
        """Set the codec here, and then at all local servers. The requester gets its answer after that."""
        self.apply("compression", request.body, sender)
        self._relay_to_all(request, self._members.local_servers())

    def _set_codec(self, body: Body, sender: Member) -> Body:
        """Any worker may set it. Raises InvalidSettings for a codec that differs from the one in use, and for the first
        codec once a round is finished.
        """
        spec = body["spec"]
        if parse_codec(spec) is not None and not self._wan.spec and self._aggregator.table.last_round:
            what = f"gradient compression {spec} is asked for, and training has begun"
            raise InvalidSettings(what, "let all workers call set_gradient_compression before their first push")
        return super()._set_codec(body, sender)

    def _set_mode(self, body: Body, _: Member) -> Body:
        """Handle each party's contributions separately. The master's script requests this by its store's type. Raises
        InvalidSettings once rounds have begun.
        """
        if body["asynchronous"] and not self._aggregator.switch_to_async():
            raise InvalidSettings("the rounds have begun", "create the store before training starts")
        return {}

    def _on_store(self, request: Request, sender: Member) -> None:
        self._store.serve(request, sender)

    def _on_optimizer(self, request: Request, sender: Member) -> None:
        self._node.loop.call_later(0.0, self._close_held_rounds)
        self._on_command(request, sender)

    def _close_held_rounds(self) -> None:
        """Close the rounds that were held. An error there fails the job, not the request."""
        try:
            self._aggregator.members_changed()
        except GeomxError as error:
            self._node.fail(error)

    def _on_compare(self, request: Request, sender: Member) -> None:
        """See ModelComparison. The worker does not wait for the answer."""
        self._comparison.add(request.body)
        request.answer()

    def _on_difference(self, message: str, hint: str) -> None:
        """Workers train different models: mark the job's result, or end the job (`--strict`)."""
        if self._node.settings.options["strict"]:
            self._node.fail(TrainingFailed(message, hint))
        else:
            self._node.events.write(WarningRaised(message=f"{message}; {hint}", affects_result=True))

    def _on_state(self, request: Request, sender: Member) -> None:
        """Read or write the optimizer's state. Answers that can be read again are not stored."""
        rest = self._states.rest(sender) if request.topic == "state_open" else 0.0
        if rest > 0:
            self._node.loop.call_later(rest, partial(self._answer, request))
        else:
            answer = self._states.serve(request.topic, request.body, sender)
            request.answer(answer, keep=request.topic != "state_read")


def any_member(request: Request, sender: Member) -> None:
    """Any member may make this request."""


def _scope(body: Body) -> str:
    """The rank scope of a worker that asks for the cluster's layout."""
    return "global" if body.get("rank_scope") == "global" else "party"
