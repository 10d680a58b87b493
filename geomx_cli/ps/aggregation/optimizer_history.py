"""Selects the optimizer that a root runs on a slice in a round: the first optimizer, or one set during training.

When a worker sets another optimizer, neither all workers nor all slices are in the same round. So a later optimizer is
only registered when it is set. In each slice it takes over in the first round in which a contribution names its serial
number. Or a master that does not train determines the round. Both are the same round at all roots.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.aggregation.rounds import SERIAL
from geomx_cli.ps.aggregation.slices import SliceState
from geomx_cli.ps.optim.optimizers import Optimizer

__all__ = ["Hyper", "OptimizerHistory", "Successor"]

Hyper = dict[str, float]

_KEPT = 65
"""Limits: optimizers kept for slices, which may be in different rounds; optimizers that no slice uses yet."""


@dataclass(frozen=True, slots=True)
class Successor:
    """A later optimizer with per-key hyper-parameters.

    by_round: the first round of each key that the optimizer updates. If `by_round` lacks a key, the optimizer updates
        it from the key's first round. Without `by_round`, contributions name the optimizer.
    by: the process that has set the optimizer.
    """

    optimizer: Optimizer | None
    by_key: Mapping[int, Hyper] = field(default_factory=dict)
    by_round: Mapping[int, int] | None = None
    by: str = ""

    def begins(self, key: int, round_: int) -> bool:
        """Whether the optimizer updates the key in this round, regardless of contributions."""
        return self.by_round is not None and round_ >= self.by_round.get(key, 1)


class OptimizerHistory:
    """The optimizers set so far. A slice's own hyper-parameters, including its optimizer's serial number, are stored
    with the slice.

    on_workers: class name of an optimizer that runs on the workers from serial number `since` on, otherwise "". Then a
        root runs no optimizer, and only checks that all workers run one.
    taken: the newest serial number that a slice has.
    uses: how often an optimizer has replaced all earlier ones.
    Used by the loop's thread only.
    """

    def __init__(self) -> None:
        self._known: dict[int, Successor] = {0: Successor(None)}
        self.on_workers = ""
        self.since = self.taken = self.uses = 0
        self._expected = 0
        self._workers: set[str] = set()

    @property
    def newest(self) -> Optimizer | None:
        """The optimizer that was set last."""
        return self._known[max(self._known)].optimizer

    def use(self, optimizer: Optimizer | None, by_key: Mapping[int, Hyper]) -> None:
        """Run this optimizer on all slices from now on, and discard all earlier ones."""
        self._known = {0: Successor(optimizer, by_key)}
        self.uses += 1

    def add(self, serial: int, successor: Successor) -> None:
        """Register an optimizer that takes over slice by slice. Drops optimizers that no slice and no contribution in
        flight can have. Of the optimizers that no slice uses yet, it drops only the same process's.
        """
        self._known[serial] = successor
        present = [known for known in sorted(self._known) if known <= self.taken]
        later = [known for known in sorted(self._known) if known > self.taken and self._known[known].by == successor.by]
        for old in (*present[:-_KEPT], *later[:-_KEPT]):
            del self._known[old]

    def knows(self, serial: int) -> bool:
        """Whether the optimizer is registered, and not dropped."""
        return serial in self._known

    def leave_to_workers(self, kind: str, worker: str, of: int, serial: int) -> None:
        """Record that this worker runs an optimizer of this class itself. All `of` training workers have to run it. The
        worker is "" for a master that requests this and does not train.
        """
        if serial != self.since:
            self._workers.clear()
        self.on_workers, self.since, self._expected = kind, serial, of
        self._known.setdefault(serial, Successor(None))
        if worker:
            self._workers.add(worker)

    def choose(
        self, entry: SliceState, round_: int, news: Mapping[str, float],
        ignored: Callable[[str, str], None] = lambda _, __: None,
    ) -> Optimizer | None:  # fmt: skip
        """The optimizer for this round of a slice, with the slice's hyper-parameters. Updates the hyper-parameters from
        `news` in place. If the optimizer differs from the one before, drops the earlier one's arrays.

        ignored: gets the name of each hyper-parameter that is not used, and why: its optimizer is unknown, or does not
            take it.
        Raises InvalidSettings if an optimizer should run on the workers and some lack it.
        """
        key, hyper = entry.key, entry.hyper
        now = int(hyper.get(SERIAL, 0))
        if now < int(news.get(SERIAL, 0)) not in self._known:
            ignored(SERIAL, f"asks for optimizer {news[SERIAL]:g}, which nobody has set")
            news = {}
        following = [serial for serial, item in self._known.items() if serial and item.begins(key, round_)]
        asked = max(int(news.get(SERIAL, 0)), *following, now)
        self.taken = max(self.taken, asked)
        if self.on_workers and asked >= self.since:
            self._check_workers()
        if asked > now:
            entry.optimizer_state.clear()
            hyper.clear()
            hyper[SERIAL] = asked
        if int(news.get(SERIAL, 0)) >= now:  # otherwise they are for a replaced optimizer
            hyper.update(_without_serial(news))
        chosen = self.present(hyper)
        if chosen is not None:
            by_key = self._at(hyper).by_key.get(key, {})
            try:
                chosen.tune(_without_serial(by_key | hyper))
            except InvalidSettings:
                self._drop_unusable(chosen, hyper, ignored)
                chosen.tune(_without_serial(by_key | hyper))
        return chosen

    def present(self, hyper: Hyper) -> Optimizer | None:
        """The current optimizer of a slice with these hyper-parameters."""
        return self._at(hyper).optimizer

    def _at(self, hyper: Hyper) -> Successor:
        return self._known.get(int(hyper.get(SERIAL, 0))) or self._known[min(self._known)]

    @staticmethod
    def _drop_unusable(chosen: Optimizer, hyper: Hyper, ignored: Callable[[str, str], None]) -> None:
        """Remove from `hyper` the hyper-parameters that this optimizer does not take."""
        for name, value in _without_serial(hyper).items():
            try:
                chosen.tune({name: value})
            except InvalidSettings as error:
                del hyper[name]
                ignored(name, f"sets a hyper-parameter: {error.message}")

    def _check_workers(self) -> None:
        if len(self._workers) < self._expected:
            count = f"{len(self._workers)} of {self._expected}"
            raise InvalidSettings(
                f"the optimizer {self.on_workers} cannot run on the servers, and only {count} workers have set it",
                "call kv.set_optimizer in every worker, or use one that the servers can run",
            )


def _without_serial(hyper: Mapping[str, float]) -> Hyper:
    return {name: value for name, value in hyper.items() if name != SERIAL}
