"""A worker in the cluster: how it joins, its servers and peers, its messages, and how it ends."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from geomx_cli.contract.codecs import complete_lan_spec, complete_spec
from geomx_cli.contract.config import NodeSettings
from geomx_cli.core.errors import GeomxError, InvalidSettings, PeerLost, TimedOut
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.aggregation.algorithm import WorkerDelivery
from geomx_cli.ps.aggregation.codec import parse_codec
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.cluster.liveness import NEWS, Activity, newest
from geomx_cli.ps.cluster.members import CENTRAL
from geomx_cli.ps.cluster.membership import Membership
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.net.lanes import Lane
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import BadMessage, Header, Kind
from geomx_cli.ps.operation_queue import OperationQueue
from geomx_cli.ps.peers import Peers

__all__ = ["Worker", "WorkerInfo"]

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's position in the job.

    at_root: whether its servers are the roots.
    flat: whether there is only one plane.
    master_trains: whether the job's master trains.
    """

    rank: int
    global_rank: int
    party_index: int
    num_all_workers: int
    trains: bool
    at_root: bool
    flat: bool
    master_trains: bool


class Worker:
    """A worker's loop, of which `run` is the thread's body.

    ready: receives the WorkerInfo once connected.
    ends: is set when the worker has failed, or has said goodbye, after all workers that dial it.
    error: why no further operation is possible; None while operations are possible.
    failure: the same as `error`, except that it is None if the worker has just left.
    others_active: see Client.follow.

    Other threads may call `check` and `wait`. Call the other methods in the worker's loop. When the loop ends, pending
    and later operations fail with `error`.
    """

    def __init__(self, settings: NodeSettings, events: EventLog, delivery: WorkerDelivery) -> None:
        if settings.local is None:
            raise InvalidSettings("a worker needs a plane", "set DMLC_PS_ROOT_URI")
        self.ready: Future[WorkerInfo] = Future()
        self.ends: Future[None] = Future()
        self.error: GeomxError | None = None
        self.failure: GeomxError | None = None
        self.upstream = UpstreamClient(settings.incarnation)
        self.node = Node(
            settings, events, on_tensor=self._on_tensor, on_request=self._on_request, on_link=self._on_link,
            on_reconnect=self._on_reconnect, on_asked=self._on_asked, active=self._active,
        )  # fmt: skip
        self.peers = Peers(self.node)
        self.upstream.peers = self.peers.links
        self._activity = Activity()
        self.others_active: Callable[[], float] = lambda: 0.0
        self._delivery = delivery
        delivery.begin(self.node, self.upstream, self.peers.links)
        self.operations = OperationQueue(self.node, self.upstream, delivery)
        self._settings = settings
        self._plane = settings.local
        self._rank = -1
        self._failed_operations = False

    def run(self) -> None:
        """Run the worker until it is stopped or the job fails."""
        error: GeomxError = InvalidSettings("this worker has left the job", "close it last")
        try:
            endpoints = self.peers.listen()
            self.node.join(
                self._plane, "worker", self._dial_servers, rank=self._settings.rank, endpoints=endpoints
            )
            self.node.loop.every(1.0, self._check_patience)
            self.node.run()
        except GeomxError as caught:
            error = self.failure = caught.with_traceback(None)  # it gets one where it is raised: `is_raised`
        except Exception as caught:
            error = self.failure = PeerLost(f"the client's loop failed: {caught!r}")
            raise
        finally:
            self._give_up(error)
            self.node.close()

    @property
    def is_raised(self) -> bool:
        """Whether the failure has reached a thread of the caller, or will reach it where it waits."""
        return self.failure is not None and (self.failure.__traceback__ is not None or self._failed_operations)

    def check(self) -> None:
        """Raise `error`, if any."""
        if self.error is not None:
            raise self.error

    def wait(self, future: "Future[_Result]", limit: float, what: str) -> _Result:
        """Wait for the result. Raises TimedOut after `limit` seconds. Progress on the links and a restored connection
        restart this time. `what` describes the result in the error's message.
        """
        while True:
            try:
                return future.result(limit + 5)
            except TimeoutError:
                if time.monotonic() - newest(self.upstream.links) > limit + NEWS:
                    hint = self._hint("see the other processes' logs")
                    raise TimedOut(f"waited {limit:g} s for {what}", hint) from None

    def ask(self, future: "Future[Body]", topic: str, body: Body, server: int, limit: float) -> None:
        """Send a request to one server. The answer is set on `future`. At a barrier the limit counts from the last
        progress.
        """
        if self.error is not None:
            future.set_exception(self.error)
        else:
            link = self.upstream.links[server]
            self.node.rpc.ask(
                link, topic, body, future.set_result, future.set_exception, limit,
                "idle" if topic == "barrier" else "alive",
            )  # fmt: skip

    def send_again(self, header: Header, payload: Array | None, done: "Future[None]") -> None:
        """Send a slice of a contribution of this worker's earlier life; `done` is set with its result."""
        if self.error is not None:
            done.set_exception(self.error)
            return
        content = None if payload is None else payload.data
        self._delivery.up(header.server, header, content, lambda *_: done.set_result(None))

    def leave(self) -> None:
        """This worker contributes no more."""
        if self.error is None:
            self._delivery.leave()

    def goodbye(self) -> None:
        """Say goodbye once all workers that dial this one have said it. `run` returns when every peer knows."""
        if self.error is None:
            self.peers.when_gone(self._say_goodbye)

    def _say_goodbye(self) -> None:
        self.node.goodbye([*self.upstream.links, *self.peers.to_part_from()])
        if not self.ends.done():
            self.ends.set_result(None)

    def _give_up(self, error: GeomxError) -> None:
        self.error = error
        self._failed_operations = self.operations.age() > 0
        self.operations.give_up(error)
        self.node.rpc.give_up(error)
        if not self.ready.done():
            self.ready.set_exception(error)
        if not self.ends.done():
            self.ends.set_result(None)

    def _dial_servers(self, membership: Membership) -> None:
        self._rank = membership.rank
        for member in membership.servers():
            link = self.node.transport.dial(
                member.endpoint_for(self._settings.host, self._settings.party), member.process,
                wide_area=member.party != self._settings.party, plane="local", rank=self._rank,
            )  # fmt: skip
            self.upstream.links.append(link)
            self.node.liveness.watch(link)
        self.peers.join(membership, membership.rank)
        asked = {"rank_scope": self._settings.text("rank_scope")}
        limit = self.node.joining  # a server answers once the members of its planes have joined
        self.node.rpc.ask(self.upstream.links[0], "cluster", asked, self._on_cluster, self.node.fail, limit)

    def _on_cluster(self, body: Body) -> None:
        flat, at_root, trains = bool(body["flat"]), bool(body["root"]), bool(body["trains"])
        if not trains and self._settings.text("rank_scope") == "global":
            what = "with GEOMX_RANK_SCOPE=global the worker of global rank 0 is the master, and there is no other"
            hint = "leave out the central party's scheduler and worker, or set DMLC_ENABLE_CENTRAL_WORKER=1 there"
            self.node.fail(InvalidSettings(what, hint))
            return
        workers = [int(count) for count in body["workers"]]
        central = at_root and not flat
        planned = self._settings.party_index
        party_index = -1 if central else int(body["party_index"])  # in a flat cluster only the plan knows parties
        if flat and planned is not None:
            party_index = planned
        before = 0 if flat else sum(workers if central else workers[:party_index])
        self.operations.contributors = (self._rank + CENTRAL if central else self._rank,)
        self._encode(flat=flat, gradients=bool(body["gradients"]))
        info = WorkerInfo(
            rank=self._rank,
            global_rank=before + self._rank if trains else -1,
            party_index=party_index,
            num_all_workers=sum(workers) + int(body["central"]),
            trains=trains,
            at_root=at_root,
            flat=flat,
            master_trains=flat or int(body["central"]) > 0,
        )
        self.peers.when_here(lambda: self._start(info))

    def _encode(self, *, flat: bool, gradients: bool) -> None:
        """Encode exchanges with this worker's servers."""
        compression, settings = self.operations.compression, self._settings
        smallest = int(settings.number("compress_min"))
        compression.gradients = gradients
        lan = complete_lan_spec(settings.text("compress_lan"), smallest)
        if not flat:
            compression.set(lan)
        elif parse_codec(lan) is not None:
            what = "in a flat cluster no local servers exchange with workers: there is nothing for --compress-lan"
            hint = "leave GEOMX_COMPRESS_LAN out; --compress encodes what workers and servers exchange"
            raise InvalidSettings(what, hint)
        else:
            compression.plane = "wan"
            compression.set(complete_spec(settings.text("compress"), smallest))

    def _start(self, info: WorkerInfo) -> None:
        self.node.telemetry.state = "training"
        self.ready.set_result(info)

    def waits(self, waits: bool) -> None:
        """Whether the script waits for other workers, and so does not run."""
        self._activity.waits = waits

    def _active(self) -> float:
        return max(self._activity.last(), self.others_active())

    def _check_patience(self) -> None:
        """Fail if a round is pending and nothing has moved for longer than the option `patience`."""
        moved = newest([*self.upstream.links, *self.peers.links.values()])
        limit, idle = self.node.patience, time.monotonic() - moved
        if min(self.operations.age(), idle) > limit + NEWS:
            message = f"waited {limit:g} s for the result of a round"
            self.node.fail(TimedOut(message, self._hint("is a worker stuck, or out of step?")))

    def _hint(self, usual: str) -> str:
        """Return what a process says that waits in vain: a server that has refused its messages will not answer."""
        links = [link for link in list(self.upstream.links) if link.refusals]
        return f"{links[0].name} refused a message of this process: {links[0].refusals[0]}" if links else usual

    def _on_link(self, link: Link) -> None:
        self.peers.arrive(link)

    def _on_reconnect(self, link: Link, lane: Lane) -> None:
        self.upstream.repeat(link, lane)
        self._delivery.on_reconnect(link, lane)

    def _on_tensor(self, link: Link, header: Header, payload: memoryview | None) -> None:
        if self._delivery.receive(link, header, payload):
            return
        if header.kind != Kind.RESULT:
            raise BadMessage(f"a {header.kind.name} for a worker")
        self.upstream.on_result(link, header, payload)

    def _on_asked(self, link: Link, header: Header) -> None:
        if header.topic in ("again", "damaged"):
            self.upstream.again(link, header.request, damaged=header.topic == "damaged")
        else:
            self._delivery.on_asked(link, header)

    def _on_request(self, request: Request) -> None:
        if request.topic == "bye":
            self.peers.on_bye(request)
        elif not self._delivery.on_request(request):
            raise BadMessage(f"unknown topic {request.topic!r} for a worker")
