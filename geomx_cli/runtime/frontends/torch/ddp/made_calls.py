"""The collective calls that a worker has made. Other workers read them if they wait for a call that this worker did not
make, or that differs.
"""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from geomx_cli.core.errors import GeomxError, InvalidSettings, TrainingFailed
from geomx_cli.core.futures import after
from geomx_cli.runtime.frontends.torch import data

if TYPE_CHECKING:
    from geomx_cli.ps.cluster.bodies import Body
    from geomx_cli.ps.control_client import ControlClient
    from geomx_cli.runtime.frontends import ScriptSession

__all__ = ["ALIKE", "MadeCalls", "PASS", "SkippedBatches"]


class SkippedBatches:
    """Notices that one worker alone skips a batch, for example because its loss is not finite. From then on gradients
    do not match.

    Compares which batch of a DataLoader each worker trains on, in the backward passes of one group. A worker has
    skipped a batch if the others run a backward pass with every batch and stay behind it by the same number.

    told: the warning, "" before it. The worker of rank 0 prints it once.
    """

    def __init__(self, session: "ScriptSession", rank: int) -> None:
        self._session = session
        self._rank = rank
        self._before: Sequence[int] = ()
        self._suspected = ""
        self.told = ""

    @property
    def number(self) -> int:
        """The batch that this worker trains on, from 1 on; 0 if it came from no DataLoader."""
        return min(data.number_of_batch(), 2**32 - 1)

    def compare(self, numbers: Sequence[int]) -> None:
        """Note `number` of each worker in their next backward pass, by rank."""
        before, self._before = self._before, numbers
        suspected, self._suspected = self._suspected, ""
        if self.told or not before or 0 in numbers:
            return
        steps = [number - last for number, last in zip(numbers, before, strict=True)]
        if min(steps) < 1:  # an epoch has begun, or a worker has looked at other batches meanwhile
            self._before = () if max(steps) > 0 else numbers
        elif suspected:
            self.told = suspected
            if not self._rank:
                text = "its gradients belong to later batches than those of the others, and it has fewer"
                self._session.warn(f"{suspected}: from now on {text}", affects_result=True)
        elif max(steps) > min(steps):
            rank = steps.index(max(steps))
            first, last = before[rank] + 1, numbers[rank] - min(steps)
            which = f"batch {first}" if first == last else f"batches {first} to {last}"
            self._suspected = f"worker {rank} skipped {which} of its DataLoader, and others did not"


PASS = "a backward pass"
_KEPT = 256
"""Number of latest calls whose text is kept."""
_SECONDS = 5.0
"""Seconds that the servers may take to return the notes that workers have left behind."""
_LONG = 2.0
"""Seconds of a wait within a backward pass after which workers look at each other's calls."""
_TEXT = 200
"""Characters of the latest call that an ended worker leaves."""
_LINE = re.compile(rb"(\d{1,5}) (\d{1,18}) (\d{1,18}) ([ -~]{0,%d})" % _TEXT)
"""Format of an ended worker's note: its rank, the numbers of its calls and backward passes, and the latest call."""
_MOST = 1 << 16
"""Limit on the bytes of the calls of a backward pass."""
ALIKE = "all workers must call torch.distributed alike, in the same order, with tensors of equal sizes"


class MadeCalls:
    """The script's calls in the process group number `group`, as the worker of this rank has made them."""

    def __init__(self, control: "ControlClient", group: int, rank: int, batches: "SkippedBatches") -> None:
        self._control = control
        self._key = f"ended/{group}"
        self._rank = rank
        self._batches = batches
        self._texts: dict[int, str] = {}
        self._count = 0
        self._passes = 0

    def state(self) -> dict[str, int]:
        """Return the state between calls. `load` continues from it."""
        return {"count": self._count, "passes": self._passes}

    def load(self, state: Mapping[str, int]) -> None:
        """See `state`."""
        self._count, self._passes = state["count"], state["passes"]

    def note(self, call: str) -> None:
        """This worker makes a call."""
        self._count += 1
        self._passes += call == PASS
        self._texts[self._count] = call
        self._texts.pop(self._count - _KEPT, None)

    def leave_behind(self) -> "Future[Body]":
        """The script has ended. Tell the other workers, which may wait for a call of this one."""
        line = f"{self._rank} {self._count} {self._passes} {self._texts.get(self._count, '')[:_TEXT]}\n"
        return self._control.ask("store", {"op": "append", "keys": [self._key], "values": [line.encode()]})

    def missing(self) -> "Future[None]":
        """A future that fails if another worker has ended, and does not take part in a call of this one."""
        failed: Future[None] = Future()

        def explain(asked: "Future[Body]") -> None:
            values = asked.result()["values"] if asked.exception() is None else []
            failed.set_exception(self._error(b"".join(values)))

        body = {"op": "get", "keys": [self._key], "seconds": _SECONDS}
        self._control.ask("store", body, _SECONDS).add_done_callback(explain)
        return failed

    def calls_differ(self, which: str, own: Sequence[str], one: int, other: int) -> "Future[InvalidSettings]":
        """Why the latest backward pass differs between the workers of two ranks. All workers call this, and send the
        calls that they have made in the pass (`own`).

        which: the number of the operation.
        """
        which = f"backward pass {self._passes} ({which})"
        keys = [f"calls/{self._key}/{which}/{rank}" for rank in (self._rank, one, other)]
        told = "\n".join(own).encode("ascii", "replace")[:_MOST]
        self._control.ask("store", {"op": "set", "keys": keys[:1], "values": [told]})
        read = self._control.ask("store", {"op": "get", "keys": keys[1:], "seconds": _SECONDS}, _SECONDS)

        def explain() -> InvalidSettings:
            lists = [text.decode("ascii", "replace").splitlines() for text in read.result()["values"]]
            pairs = enumerate(zip_longest(*lists, fillvalue="none"), 1) if len(lists) == 2 else ()
            for at, (its, others) in pairs:
                if its != others:
                    what = f"in {which} worker {one}'s call {at} is {its}, and worker {other}'s is {others}"
                    return InvalidSettings(what, ALIKE)
            return InvalidSettings(f"worker {one} and worker {other} make other calls in {which}", ALIKE)

        return after([read], explain)

    def look_in_pass(
        self, which: str, own: Sequence[str], waits: "Future[Any]", workers: int
    ) -> "Future[InvalidSettings]":
        """Why `waits` does not end. This worker waits for it after the calls `own` in its latest backward pass. The
        reason: the worker of the next rank waits in the same pass after other calls. If that worker does not wait, the
        future is never done. Each worker checks only one other, because a comparison of all would cross the WAN too
        often.
        """
        which = f"backward pass {self._passes} ({which})"
        found: Future[InvalidSettings] = Future()
        rank = (self._rank + 1) % workers
        own_key, key = (f"pass/{self._key}/{which}/{each}" for each in (self._rank, rank))
        told = "\n".join(own).encode("ascii", "replace")[:_MOST]

        def look() -> None:
            if waits.done():
                return
            body = {"op": "get", "keys": [key], "seconds": _SECONDS}
            with suppress(GeomxError):  # the job has failed, and the wait with it
                self._control.ask("store", {"op": "set", "keys": [own_key], "values": [told]})
                waits.add_done_callback(forget)
                self._control.ask("store", body, _SECONDS).add_done_callback(compare)

        def forget(_: "Future[Any]") -> None:
            with suppress(GeomxError):
                self._control.ask("store", {"op": "delete", "keys": [own_key]})

        def compare(asked: "Future[Body]") -> None:
            for text in asked.result()["values"] if asked.exception() is None else ():
                both = (each.decode("ascii", "replace").splitlines() for each in (told, text))  # cut at the same byte
                pairs = enumerate(zip(*both, strict=False), 1)
                if (other := next(((at, pair) for at, pair in pairs if pair[0] != pair[1]), None)) is not None:
                    at, pair = other
                    (one, its), (two, others) = sorted(zip((self._rank, rank), pair, strict=True))
                    what = f"in {which} worker {one}'s call {at} is {its}, and worker {two}'s is {others}"
                    found.set_result(InvalidSettings(what, ALIKE))
                    return
            self._control.later(_LONG, look)

        if workers > 1 and not waits.done():
            self._control.later(_LONG, look)
        return found

    def _error(self, left: bytes) -> TrainingFailed:
        """left: the notes that ended workers have left behind."""
        lines = (found.groups() for line in left.splitlines() if (found := _LINE.fullmatch(line)) is not None)
        ended = {int(rank): [text.decode() for text in rest] for rank, *rest in lines}
        first = min((int(count) for count, *_ in ended.values()), default=self._count - 1)
        ranks = [rank for rank, (count, *_) in sorted(ended.items()) if int(count) == first]
        call = self._texts.get(first + 1, self._texts[self._count])
        who = f"worker{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks[:8]))}" if ranks else "another worker"
        what = f"worker {self._rank}'s operation {first + 1} is {call}, and {who} ended before it"
        if ranks:
            _, passes, latest = ended[ranks[0]]
            what += f", after {latest or 'none'}" + f"; backward passes: {self._passes} and {passes}"
        if self._batches.told:
            return TrainingFailed(what, f"{self._batches.told}: let all workers skip it, or none")
        if call == PASS:
            hint = "let all workers train on equally many batches, as DistributedSampler divides them"
            return TrainingFailed(what, f"{hint}; none may skip one, or stop early, by itself")
        return TrainingFailed(what, "call it in all workers, and not where a condition holds in some, as rank == 0")
