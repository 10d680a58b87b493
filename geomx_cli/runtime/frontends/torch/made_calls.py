"""The collective calls that a worker has made, told to those that wait for one that it did not make."""

from concurrent.futures import Future
from typing import TYPE_CHECKING

from geomx_cli.core.errors import TrainingFailed

if TYPE_CHECKING:
    from geomx_cli.ps.cluster.bodies import Body
    from geomx_cli.ps.control_client import ControlClient
    from geomx_cli.runtime.frontends.torch.skipped_batches import SkippedBatches

__all__ = ["PASS", "MadeCalls"]

PASS = "a backward pass"
_KEPT = 256
"""Latest calls of which the text is kept."""
_SECONDS = 5.0
"""That the servers may take to tell what workers have left behind."""


class MadeCalls:
    """The script's calls in the process group number `group`, of the worker of this rank."""

    def __init__(self, control: "ControlClient", group: int, rank: int, batches: "SkippedBatches") -> None:
        self._control = control
        self._key = f"ended/{group}"
        self._rank = rank
        self._batches = batches
        self._texts: dict[int, str] = {}
        self._count = 0
        self._passes = 0

    def note(self, call: str) -> None:
        """This worker makes a call."""
        self._count += 1
        self._passes += call == PASS
        self._texts[self._count] = call
        self._texts.pop(self._count - _KEPT, None)

    def leave_behind(self) -> "Future[Body]":
        """The script has ended: tell the others, which may wait for a call of it."""
        line = f"{self._rank} {self._count} {self._passes} {self._texts.get(self._count, '')}\n"
        return self._control.ask("store", {"op": "append", "keys": [self._key], "values": [line.encode()]})

    def missing(self) -> "Future[None]":
        """A future that fails: another worker has ended, and does not take part in a call of this one."""
        failed: Future[None] = Future()

        def explain(asked: "Future[Body]") -> None:
            values = asked.result()["values"] if asked.exception() is None else []
            failed.set_exception(self._error(b"".join(values).decode()))

        body = {"op": "get", "keys": [self._key], "seconds": _SECONDS}
        self._control.ask("store", body, _SECONDS).add_done_callback(explain)
        return failed

    def _error(self, left: str) -> TrainingFailed:
        """left: what ended workers have left behind."""
        ended = {int(rank): rest for rank, *rest in (line.split(" ", 3) for line in left.splitlines())}
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
