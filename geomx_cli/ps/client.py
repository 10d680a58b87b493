"""What a worker uses: declare, init, exchange, pull, barrier. Buffers in, futures out.

The client has one thread, which runs the loop; every public method may be called from any thread. Nothing waits for
ever: a round or barrier has the option `patience` as its limit, everything else `timeout`, and the failure of any
process of the job ends all waits with PeerLost, which every later call raises again.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from geomx_cli.errors import GeomxError, InvalidSettings, PeerLost, TimedOut
from geomx_cli.events import EventLog
from geomx_cli.ps.config import NodeSettings
from geomx_cli.ps.exchange import Exchange
from geomx_cli.ps.link import Link
from geomx_cli.ps.members import CENTRAL
from geomx_cli.ps.membership import Membership
from geomx_cli.ps.node import Node, Request
from geomx_cli.ps.partition import Placement, Slice, Tensor
from geomx_cli.ps.uplink import Delivery, Uplink
from geomx_cli.ps.wire import Array, BadMessage, Header, Kind, dtype_code

__all__ = ["Client"]

Body = dict[str, Any]


class Client:
    """A worker's end of the parameter server; connected when the constructor returns.

    rank, num_workers: within the party's plane. party_index: -1 for the central party. global_rank: over all training
    workers, -1 for a master worker that does not train. num_all_workers: training workers of the job.
    trains: whether this worker's contributions count. is_master: whether it configures the servers.
    """

    def __init__(self, settings: NodeSettings, events: EventLog, delivery: Delivery) -> None:
        if settings.local is None:
            raise InvalidSettings("a worker needs a plane", "set DMLC_PS_ROOT_URI")
        self.settings = settings
        self.events = events
        self.party = settings.party
        self.is_master = settings.master
        self.num_workers = settings.local.workers
        self.rank = self.global_rank = self.party_index = -1
        self.num_all_workers = settings.num_all_workers
        self.trains = True
        self._uplink = Uplink(delivery)
        self._placements: dict[str, Placement] = {}
        self._rounds: dict[str, int] = {}
        self._latest: dict[str, Exchange] = {}
        self._open: set[Exchange] = set()
        self._error: GeomxError | None = None
        self._cluster: Body = {}
        self._node = Node(settings, events, on_tensor=self._on_tensor, on_request=self._on_request)
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="geomx-client", daemon=True)
        self._thread.start()
        self._wait(self._ready, settings.number("timeout") + 10, "the cluster")

    # Tensors.

    def declare(self, tensors: Sequence[Tensor]) -> None:
        """Tell the servers of `tensors`; blocks. The same again is free. Raises InvalidSettings if they disagree."""
        new = [tensor for tensor in tensors if self._known(tensor) is None]
        if not new:
            return
        body = self.control("declare", {"tensors": [[item.name, item.size, item.dtype] for item in new]})
        for tensor, (key, slices) in zip(new, body["placements"], strict=True):
            self._placements[tensor.name] = Placement(key, tensor, tuple(Slice(*item) for item in slices))

    def init(self, name: str, value: Array) -> None:
        """Give the initial value of a declared tensor: the master's counts, in a flat cluster rank 0's; blocks.

        For everybody else this does nothing. value: 1-D, contiguous, of the declared size and dtype.
        """
        if not (self.rank == 0 if self._cluster["flat"] else self.is_master):
            return
        placement = self._placement(name, value)
        exchange = Exchange(None, len(placement.slices))
        self._start(exchange, placement, Kind.PUSH, value, 0, 0.0, 0, {})
        self._wait(exchange.done, self.settings.number("timeout"), f"the servers to take the initial value of {name!r}")

    def exchange(
        self,
        name: str,
        src: Array,
        out: Array | None,
        *,
        priority: int = 0,
        weight: float = 1.0,
        hyper: Mapping[str, float] | None = None,
    ) -> Exchange:
        """Contribute `src` to this key's next round; its result goes to `out`, or is kept for `pull`. Returns at once.

        src, out: 1-D, contiguous, of the declared size and dtype. `src` must not change before `.sent`. A higher
        priority goes first. `weight` travels with the contribution; `hyper` holds hyper-parameters for the optimizer.
        """
        self._check()
        placement = self._placement(name, src)
        exchange = Exchange(out, len(placement.slices))
        self._rounds[name] = self._rounds.get(name, 0) + 1
        self._latest[name] = exchange
        args = (src, self._rounds[name], weight, priority, dict(hyper or {}))
        self._start(exchange, placement, Kind.EXCHANGE, *args)
        return exchange

    def pull(self, name: str, out: Array, *, priority: int = 0) -> "Future[None]":
        """Copy to `out` the result of this worker's latest exchange of the key, or without one the servers' value."""
        self._check()
        placement = self._placement(name, out)
        latest = self._latest.get(name)
        if latest is None:
            exchange = Exchange(out, len(placement.slices))
            self._start(exchange, placement, Kind.PULL, None, 0, 0.0, priority, {})
            return exchange.done
        done: Future[None] = Future()

        def copy(finished: "Future[None]") -> None:
            error = finished.exception()
            if error is not None:
                done.set_exception(error)
            else:
                latest.copy_to(out)
                done.set_result(None)

        latest.done.add_done_callback(copy)
        return done

    # Requests.

    def set_optimizer(self, name: str, params: Mapping[str, float | int | bool]) -> None:
        """Have the roots update the model with this optimizer (see ps/optimizers.py); blocks. The same again is free."""
        body = {"name": name, "params": dict(params), "by": self._node.process}
        servers = range(len(self._uplink.links)) if self._cluster["root"] else (0,)
        for future in [self._ask("optimizer", body, server) for server in servers]:
            self._wait(future, self.settings.number("timeout"), "the servers to take the optimizer")

    def barrier(self, scope: Literal["party", "all"] = "party") -> None:
        """Wait until all workers of the party, or of the job, have come here. Those that have left are not waited for."""
        limit = self.settings.number("patience")
        future = self._ask("barrier", {"scope": scope}, 0, limit)
        self._wait(future, limit, f"the other workers at a barrier over {scope}")

    def control(self, topic: str, body: Body) -> Body:
        """Ask the rank-0 server, which relays to the rank-0 root what it does not answer itself; blocks."""
        limit = self.settings.number("timeout")
        answer: Body = self._wait(self._ask(topic, body, 0, limit), limit, f"an answer to {topic!r}")
        return answer

    # Telemetry.

    def report(self, **telemetry: Any) -> None:
        """Set fields of this process's telemetry."""
        self._node.telemetry.update(telemetry)

    def traffic(self) -> dict[str, list[int]]:
        """Bytes so far: {"lan": [sent, received], "wan": [sent, received]}."""
        return self._node.transport.traffic()

    # The end.

    def leave(self) -> None:
        """This worker owes no more contributions. Waits for the results of those under way."""
        for exchange in list(self._open):
            self._wait(exchange.done, self.settings.number("patience"), "the last rounds")
        self._tell_servers("leave")

    def close(self, error: GeomxError | None = None) -> None:
        """Say farewell and end the client's thread; with `error`, tell everybody that this worker has failed."""
        if not self._thread.is_alive():
            return
        if error is not None:
            self._node.loop.submit(lambda: self._node.fail(error))
        else:
            self._tell_servers("bye")
            self._node.loop.submit(self._farewell)
        self._thread.join(10)

    def _farewell(self) -> None:
        for membership in self._node.memberships:
            membership.farewell()
        self._node.loop.stop()

    def _tell_servers(self, topic: str) -> None:
        def tell() -> None:
            for link in self._uplink.links:
                link.control(topic)

        self._check()
        self._node.loop.submit(tell)

    # Helpers of the calling threads.

    def _known(self, tensor: Tensor) -> Placement | None:
        placement = self._placements.get(tensor.name)
        if placement is not None and placement.tensor != tensor:
            raise InvalidSettings(f"key {tensor.name!r} was declared as {placement.tensor}, now as {tensor}")
        return placement

    def _placement(self, name: str, array: Array) -> Placement:
        placement = self._placements.get(name)
        if placement is None:
            raise InvalidSettings(f"key {name!r} has not been initialised", "call init first")
        tensor = placement.tensor
        if (array.size, str(array.dtype)) != (tensor.size, tensor.dtype):
            raise InvalidSettings(
                f"key {name!r} has {tensor.size} elements of {tensor.dtype}, not {array.size} of {array.dtype}"
            )
        return placement

    def _start(
        self,
        exchange: Exchange,
        placement: Placement,
        kind: Kind,
        src: Array | None,
        round_: int,
        weight: float,
        priority: int,
        hyper: dict[str, float],
    ) -> None:
        """Queue all slices of a tensor."""
        dtype = dtype_code(src.dtype if src is not None else exchange.out.dtype)  # type: ignore[union-attr]
        voice = (self._contributor,) if self.trains and kind == Kind.EXCHANGE else ()
        data = None if src is None else memoryview(src.data)

        def queue() -> None:
            if self._error is not None:
                exchange.fail(self._error)
                return
            self._open.add(exchange)
            for index, piece in enumerate(placement.slices):
                header = Header(
                    kind=kind, key=placement.key, slice=index, root=piece.root, offset=piece.offset,
                    length=piece.length, dtype=dtype, round=round_, contributors=voice, weight=weight,
                    priority=priority, hyper=hyper,
                )  # fmt: skip
                part = None if data is None else data[piece.offset : piece.offset + piece.length].cast("B")
                self._uplink.send(piece.server, header, part, self._taker(exchange, piece.offset))

        self._node.loop.submit(queue)

    def _taker(self, exchange: Exchange, offset: int) -> Callable[[Header, Array], None]:
        def take(header: Header, array: Array) -> None:
            exchange.contributors, exchange.weight = header.contributors, header.weight
            exchange.take(offset, array)
            if exchange.missing == 0:
                self._open.discard(exchange)

        return take

    def _ask(self, topic: str, body: Body, server: int, limit: float = 0.0) -> "Future[Body]":
        future: Future[Body] = Future()

        def ask() -> None:
            if self._error is not None:
                future.set_exception(self._error)
            else:
                link = self._uplink.links[server]
                self._node.request(link, topic, body, future.set_result, future.set_exception, limit)

        self._check()
        self._node.loop.submit(ask)
        return future

    def _wait(self, future: "Future[Any]", limit: float, what: str) -> Any:
        try:
            return future.result(limit + 5)
        except TimeoutError:
            raise TimedOut(f"waited {limit:g} s for {what}", "see the other processes' logs") from None

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # The loop's thread.

    def _run(self) -> None:
        try:
            assert self.settings.local is not None
            self._node.join(self.settings.local, "worker", self._dial_servers, rank=self.settings.rank)
            self._node.loop.every(1.0, self._check_patience)
            self._node.run()
        except GeomxError as error:
            self._give_up(error)
        except Exception as error:
            self._give_up(PeerLost(f"the client's loop failed: {error!r}"))
            raise
        finally:
            self._node.close()

    def _give_up(self, error: GeomxError) -> None:
        self._error = error
        for exchange in self._open:
            exchange.fail(error)
        self._open.clear()
        self._node.fail_requests(error)
        if not self._ready.done():
            self._ready.set_exception(error)

    def _dial_servers(self, membership: Membership) -> None:
        self.rank = membership.rank
        for member in membership.servers():
            link = self._node.transport.dial(
                member.endpoint_for(self.settings.host), member.process,
                wide_area=member.party != self.settings.party, plane="local", rank=self.rank,
            )  # fmt: skip
            self._uplink.links.append(link)
        self._node.request(self._uplink.links[0], "cluster", {}, self._on_cluster, self._node.fail)

    def _on_cluster(self, body: Body) -> None:
        self._cluster = body
        self.trains = bool(body["trains"])
        workers = [int(count) for count in body["workers"]]
        self.num_all_workers = sum(workers) + int(body["central"])
        self.party_index = int(body["party_index"])
        if self.settings.party_index is not None:
            self.party_index = self.settings.party_index
        before = self.rank if body["flat"] else self.rank + sum(workers[: self.party_index])
        if body["root"] and not body["flat"]:
            before = self.rank + sum(workers)
        self.global_rank = before if self.trains else -1
        self._contributor = self.rank + CENTRAL if body["root"] and not body["flat"] else self.rank
        self._node.telemetry["state"] = "training"
        self._ready.set_result(None)

    def _check_patience(self) -> None:
        """Fail when a round takes longer than anybody should wait."""
        limit = self.settings.number("patience")
        late = [item for item in self._open if item.age() > limit]
        if late:
            self._node.fail(TimedOut(f"waited {limit:g} s for the result of a round", "is a worker stuck, or out of step?"))

    def _on_tensor(self, link: Link, header: Header, payload: memoryview | None) -> None:
        if header.kind != Kind.RESULT:
            raise BadMessage(f"a {header.kind.name} for a worker")
        self._uplink.on_result(link, header, payload)

    def _on_request(self, request: Request) -> None:
        raise BadMessage(f"unknown topic {request.topic!r} for a worker")
