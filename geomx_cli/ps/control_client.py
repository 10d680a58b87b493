"""The control requests that a worker sends to its servers: optimizer, codec, mode, barriers, and algorithms' own."""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

from geomx_cli.contract.codecs import complete_spec
from geomx_cli.core.errors import GeomxError
from geomx_cli.ps.cluster.bodies import MAX_DECLARED, Body
from geomx_cli.ps.cluster.partition import Tensor
from geomx_cli.ps.net.wire import number_base
from geomx_cli.ps.worker import Worker, WorkerInfo

__all__ = ["ControlClient", "DECLARED_AT_ONCE"]

_Result = TypeVar("_Result")

DECLARED_AT_ONCE = 2**30
"""Elements in one declaration, unless it is of one tensor: servers answer other requests between two of them."""


class ControlClient:
    """Methods may be called from any thread; all but `ask` block. They raise InvalidSettings for a request that a
    server refuses, TimedOut after the option `timeout` (barriers: `patience`), and PeerLost once the job has failed.

    key_of: the number of a declared tensor.
    barriers: how many of each scope this worker has asked for.
    """

    def __init__(self, worker: Worker, info: WorkerInfo, key_of: Callable[[str], int]) -> None:
        self._worker = worker
        self._info = info
        self._key_of = key_of
        self._by = worker.node.process
        self._calls = itertools.count(number_base(worker.node.settings.incarnation) + 1)
        self.barriers = {"party": 0, "all": 0}
        self._barriers_lock = threading.Lock()
        settings = worker.node.settings
        self._smallest = int(settings.number("compress_min"))
        # Seconds that an answer may take while the link works. A local server that relays a request allows its own link
        # the same time, not counting its silence, and answers if that link is lost.
        self._limit = settings.number("timeout") + (0.0 if info.at_root else settings.number("silence"))

    def set_optimizer(
        self,
        name: str,
        params: Mapping[str, float | int | bool],
        *,
        schedule: tuple[str, Mapping[str, Any]] | None = None,
        multipliers: Mapping[str, Mapping[str, float]] | None = None,
        serial: int = 0,
    ) -> None:
        """Have the roots update the model with this optimizer (see optimizers.py). Repeating it is free.

        schedule: name and numbers (see schedules.py), for a master that does not train. Training workers send the rate
        with their contributions.
        multipliers: `lr_mult` and `wd_mult` of single declared tensors.
        serial: 0 for the first optimizer, which takes effect at once. A later one takes over per tensor, with the first
        contribution that names its serial number among its hyper-parameters. If this worker does not train, it takes
        over in the round after the last one closed by any root.
        """
        by_key = [[self._key_of(tensor), dict(own)] for tensor, own in (multipliers or {}).items()]
        body: Body = {
            "name": name, "params": dict(params), "by": self._by, "schedule": schedule, "multipliers": by_key,
            "serial": serial,
        }  # fmt: skip
        if not self._info.trains:
            body |= self._hold_rounds(serial)
        self._request_roots("optimizer", body, "take the optimizer")

    def leave_optimizer_to_workers(self, kind: str, serial: int = 0) -> None:
        """Tell the roots that every worker runs an optimizer of this class itself. They refuse the next round unless
        all training workers have said so. serial: see `set_optimizer`.
        """
        serial = serial if self._info.trains else 0
        body = {"name": "", "params": {}, "by": self._by, "kind": kind, "serial": serial}
        self._request_roots("optimizer", body, "leave the optimizer to the workers")

    def _hold_rounds(self, serial: int) -> Body:
        """Stop the roots from closing rounds until they have the optimizer; returns its first round of each key."""
        closed: dict[int, int] = {}
        for answer in self._request_roots("optimizer", {"hold": True, "by": self._by}, "hold the rounds"):
            for key, round_ in answer["closed"]:
                closed[key] = max(round_, closed.get(key, 0))
        by_round = [[key, round_ + 1] for key, round_ in closed.items()]
        return {"serial": max(serial, 1) if closed else 0, "by_round": by_round}

    def set_compression(self, spec: str) -> None:
        """Encode every exchange with the global servers by the codec SPEC (see `--compress`); returns when all servers
        do so. Repeating it is free. Any worker may call it, before its first contribution.

        Raises InvalidSettings for an unknown codec, if another one is in use, and for the first one after a finished
        round.
        """
        spec = complete_spec(spec, self._smallest)
        self._request_roots("compression", {"spec": spec}, "take the codec")
        if self._info.flat:
            _in_loop(self._worker, lambda: self._worker.operations.compression.set(spec))

    def train_asynchronously(self) -> None:
        """Have the roots update the model with each party's contributions separately. Only the master may call it.
        Raises InvalidSettings for another worker, and if training has begun.
        """
        self._request_roots("mode", {"asynchronous": True}, "train parties asynchronously")

    def barrier(self, scope: Literal["party", "all"] = "party") -> None:
        """Wait until all workers of the party, or of the job, have called this; workers that have left do not count."""
        limit = self._worker.node.patience
        with self._barriers_lock:
            self.barriers[scope] += 1
            number = self.barriers[scope]
        future = self._ask("barrier", {"scope": scope, "number": number}, 0, limit)
        self._worker.wait(future, limit, f"the other workers at a barrier over {scope}")

    def be_patient(self, seconds: float) -> None:
        """Allow a round or barrier so many seconds without progress, here and at all servers, if the option `patience`
        is less. Repeating it is free.
        """
        if seconds > self._worker.node.patience:
            self._worker.node.patience = seconds
            self._request_each(self._servers, "patience", {"seconds": seconds}, "take the script's timeout")

    def declare(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Have the servers place these tensors; returns the placement of each, as in bodies.py."""
        asked, room = list[list[Tensor]](), 0
        for tensor in tensors:
            if tensor.size > room or len(asked[-1]) == MAX_DECLARED:
                asked, room = [*asked, []], DECLARED_AT_ONCE
            asked[-1].append(tensor)
            room -= tensor.size
        bodies = [[[item.name, item.size, item.dtype, item.row, item.shard] for item in items] for items in asked]
        futures = [self._ask("declare", {"tensors": body, "by": self._by}, 0, self._limit) for body in bodies]
        answers = [self._worker.wait(future, self._limit, "an answer to 'declare'") for future in futures]
        return [placement for answer in answers for placement in answer["placements"]]

    def compare(self, row: Body, by: str = "") -> None:
        """Send a row to ModelComparison, without waiting for an answer. by: the worker of the row: a worker of the
        group for which this worker sends (`--reduce torch`), by default this worker.
        """
        self.ask("compare", {**row, "by": by or self._by})

    def leave(self) -> None:
        """Tell the servers that this worker contributes no more."""
        self._request_each(self._servers, "leave", {}, "know that this worker leaves")

    def request(self, topic: str, body: Body, root: int | None = None) -> Body:
        """Send a request to the rank-0 server, which relays unknown topics to the rank-0 root.

        With `root`, that root answers, for topics that name one.
        """
        server = 0
        if root is not None:
            server, body = root if self._info.at_root else 0, {**body, "root": root}
        return self._worker.wait(self._ask(topic, body, server, self._limit), self._limit, f"an answer to {topic!r}")

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` in the client's thread, in which it must not wait; never after the client's end."""
        loop = self._worker.node.loop

        def begin() -> None:
            loop.call_later(seconds, action)

        loop.submit(begin)

    def check(self) -> None:
        """Raise the client's error, if the job has failed or this worker has left."""
        self._worker.check()

    def ask(self, topic: str, body: Body, seconds: float = 0.0) -> "Future[Body]":
        """Like `request`, but returns at once; a failure of the job is set on the future. seconds: how much longer the
        answer may take.
        """
        if topic == "store":  # counts once, however often it has to be repeated
            body = {**body, "by": self._by, "call": next(self._calls)}
        return self._ask(topic, body, 0, self._limit + seconds)

    @property
    def _servers(self) -> range:
        return range(len(self._worker.upstream.links))

    def _request_roots(self, topic: str, body: Body, what: str) -> list[Body]:
        """Send a request to all roots and return their answers; behind a local server that is a single empty one."""
        return self._request_each(self._servers if self._info.at_root else (0,), topic, body, what)

    def _request_each(self, servers: Sequence[int], topic: str, body: Body, what: str) -> list[Body]:
        """Send a request to these servers and return their answers. `what` describes it in the message of a failure."""
        futures = [self._ask(topic, body, server, self._limit) for server in servers]
        return [self._worker.wait(future, self._limit, f"the servers to {what}") for future in futures]

    def _ask(self, topic: str, body: Body, server: int, limit: float) -> "Future[Body]":
        self._worker.check()
        future: Future[Body] = Future()
        self._worker.node.loop.submit(lambda: self._worker.ask(future, topic, body, server, limit))
        return future


def _in_loop(worker: Worker, call: Callable[[], _Result]) -> _Result:
    """Call this in the worker's loop and return what it returns; raises what it raises."""
    called: Future[_Result] = Future()

    def run() -> None:
        try:
            called.set_result(call())
        except GeomxError as error:
            called.set_exception(error)

    worker.check()
    worker.node.loop.submit(run)
    return worker.wait(called, worker.node.timeout, "this worker's own loop")
