"""Compares the models that workers train, after those steps at which the models should be equal."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.cluster.bodies import Body

__all__ = ["EPOCH", "HALF", "LARGEST", "LATE", "SUMS", "TRAINED", "ModelComparison"]

SUMS = 4
"""Number of sums in the sketch of a tensor, each over a part of its elements. The tensor's Euclidean norm follows them.
"""
TRAINED, LATE, HALF = 1, 2, 4
"""Marks of a tensor: it is trained; it has been trained only since a later step; its elements have 16 bits."""
_ALIKE, _UNLIKE, _UNLIKE_HALF = 1e-3, 1e-2, 5e-2
"""Differences, relative to a tensor's norm, that rounding explains: on equal platforms, on others, there in 16 bits."""
_TINY = 1e-6
_EQUAL, _SCHEDULED, _SMALL = 1e-3, 0.3, 0.05
"""Relative differences that mean nothing: of constant hyper-parameters; of a hyper-parameter that a schedule changes;
and of that one relative to its largest value, as at the end of a schedule.
"""
_BEGIN = 3
"""The number of steps by which one worker's schedule may be later than another worker's."""
LARGEST = "largest "
"""Prefix of the name under which the largest value so far of a changing hyper-parameter is sent."""
EPOCH = "batches of an epoch"
"""The name under which a worker sends the number of its batches in an epoch; 0 if unknown."""
_OPEN = 64
"""Limit on the steps of a scope that wait for rows. With `--reduce torch`, parties send rows some seconds late."""
_SCOPES = 128
_HELD = 64 * 2**20
"""Limit on the bytes of all rows, and also on the bytes of all names."""
_OWN_NAMES = 2**20
"""Bytes of names that each worker may have, even if an equal share of the limit is smaller."""
_NAMED = 3
_ALONE = (
    "all workers take optimizer steps, and nothing was exchanged: each worker trains a model of its own",
    "use torch.distributed.init_process_group and DistributedDataParallel, or geomx_cli.torch.wrap",
)


@dataclass(frozen=True)
class _Row:
    """A worker's row: the sketch of its model, and its hyper-parameters. See bodies._Compare.

    sketch: array of shape (tensors, SUMS + 1).
    """

    layout: int
    marks: Array
    sketch: Array
    settings: Mapping[str, float]
    platform: str
    kind: str
    of: int

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        return self.sketch.nbytes + 200 * len(self.settings) + 1000


class ModelComparison:
    """Compares sketches of workers' models, at the first root. Reports the first difference, once.

    A scope is the set of an optimizer's tensors. Rows of a scope and step are compared once all workers of the scope
    have sent theirs, or once later steps have begun, because workers may choose other steps. Rows with different names
    of tensors are not compared with each other. Memory is bounded whatever members send. For the loop's thread only.

    say: receives a message and a hint.
    """

    def __init__(self, say: Callable[[str, str], None], workers: Callable[[], int]) -> None:
        self._say = say
        self._workers = workers
        self._scopes: dict[str, dict[int, dict[str, _Row]]] = {}
        self._names: dict[tuple[str, str], tuple[int, Sequence[str]]] = {}  # by scope and worker, with their layout
        self._named: Counter[str] = Counter()  # bytes of them, by worker
        self._late: dict[str, Mapping[str, _Differing]] = {}  # by scope and name, of the last comparison
        self._held = 0
        self._ended = False

    def add(self, body: Body) -> None:
        """Add a worker's row, see ControlClient.compare. Raises InvalidSettings for a row whose parts do not fit."""
        if self._ended:
            return
        scope, step, by = body["scope"], body["step"], body["by"]
        marks = np.frombuffer(body["marks"], np.uint8)
        sketch = np.frombuffer(body["sketch"], np.float32)
        if sketch.size != marks.size * (SUMS + 1) or len(body["names"]) not in (0, marks.size):
            raise InvalidSettings(f"a sketch of {sketch.size} numbers for {marks.size} tensors")
        if scope not in self._scopes and len(self._scopes) == _SCOPES:
            return
        steps = self._scopes.setdefault(scope, {})
        if body["names"]:
            self._keep_names(scope, by, body["layout"], body["names"])
        if step not in steps and len(steps) == _OPEN and step < min(steps):
            return
        rows = steps.setdefault(step, {})
        if by in rows or len(rows) >= self._workers():
            return
        table = sketch.reshape(-1, SUMS + 1)
        rows[by] = _Row(body["layout"], marks, table, body["settings"], body["platform"], body["kind"], body["of"])
        self._held += rows[by].size
        if len(rows) >= body["of"]:
            for earlier in sorted(other for other in steps if other <= step):
                self._close(scope, earlier)
        while len(steps) > _OPEN or (steps and self._held > _HELD):
            self._close(scope, min(steps))
        if self._ended:
            self._scopes.clear()
            self._names.clear()
            self._named.clear()

    def close(self) -> None:
        """No row follows: compare the rows that are left."""
        for scope, steps in self._scopes.items():
            for step in sorted(steps):
                self._close(scope, step)

    def _different_settings(self, scope: str, step: int, rows: Mapping[str, _Row]) -> tuple[str, str] | None:
        """The text of a warning about hyper-parameters that differ."""
        found, before = _different_settings(rows), self._late.get(scope, {})
        self._late[scope] = found
        for name, now in found.items():
            if now.counts(step, before.get(name)):
                message = f"workers train with different hyper-parameters: in step {step} {name} {now.where}"
                return message, "does a configuration, a schedule or a loaded checkpoint differ between workers?"
        return None

    def _keep_names(self, scope: str, by: str, layout: int, names: Sequence[str]) -> None:
        """Keep the names of a worker's tensors, if there is room. Without names, messages give the tensors' numbers."""
        _, former = self._names.pop((scope, by), (0, ()))
        self._named[by] -= _size_of(former)
        room = max(_HELD, _OWN_NAMES * self._workers())
        own = self._named[by] + _size_of(names)
        is_one_more = len(self._names) < _SCOPES * self._workers()
        if is_one_more and own <= room // self._workers() and self._named.total() - self._named[by] + own <= room:
            self._names[scope, by] = layout, names
            self._named[by] = own
        self._named += Counter()  # drops workers with a count of 0

    def _close(self, scope: str, step: int) -> None:
        rows = self._scopes[scope].pop(step)
        self._held -= sum(row.size for row in rows.values())
        layout, count = Counter(row.layout for row in rows.values()).most_common(1)[0]
        alike = {by: row for by, row in sorted(rows.items()) if row.layout == layout}
        if self._ended or count < 2 or len({row.marks.size for row in alike.values()}) > 1:
            return
        kinds = {row.kind for row in alike.values()}
        if kinds == {"alone"}:
            told = _ALONE if count >= max(row.of for row in alike.values()) else None
        elif kinds == {"settings"}:
            told = self._different_settings(scope, step, alike)
        elif (found := _Difference.between(alike)) is not None:
            known = (self._names.get((scope, by), (-1, ())) for by in alike)
            names = next((names for own, names in known if own == layout), ())
            told = found.told(alike, names, step)
        else:
            told = None
        if told is not None:
            self._ended = True
            self._say(*told)


@dataclass(frozen=True)
class _Difference:
    """Tensors that differ between workers.

    tensors: numbers of the tensors that are not the same in all workers.
    workers: the workers to which these tensors belong. In a pair, both.
    """

    tensors: Sequence[int]
    workers: Collection[str]

    @classmethod
    def between(cls, rows: Mapping[str, _Row]) -> "_Difference | None":
        """The difference between models of equal layout; None if there is none."""
        table = np.stack([row.sketch for row in rows.values()]).astype(np.float64)
        marks = np.bitwise_or.reduce([row.marks for row in rows.values()])
        bound = np.full(len(marks), _ALIKE)
        if len({row.platform for row in rows.values()}) > 1:
            bound = np.where(marks & HALF, _UNLIKE_HALF, _UNLIKE)
        trained = (marks & TRAINED) > 0
        if not (_apart(table, table[0], bound) & trained).any():  # as nearly always
            return None
        pair = len(table) == 2
        apart = _apart(table, table[0] if pair else _usual(table), bound) & trained
        names = list(rows)
        who = names if pair else [name for name, row in zip(names, apart, strict=True) if row.any()]
        tensors = [int(number) for number in np.flatnonzero(apart.any(axis=0))]
        return cls(tensors, who) if tensors else None

    def told(self, rows: Mapping[str, _Row], names: Sequence[str], step: int) -> tuple[str, str]:
        """A message and a hint."""
        first = self.tensors[0]
        tensors = [names[number] if names else f"tensor {number}" for number in self.tensors]
        one, other = self._examples(rows)
        if len(self.workers) == len(rows):
            where = f"{'differ' if len(tensors) > 1 else 'differs'} between workers {_listed(list(rows))}"
        else:
            verb = "are" if len(tensors) > 1 else "is"
            where = f"of {_listed(list(self.workers))} {verb} not that of the other workers"
        message = f"workers train different models: after {step - 1} steps {_listed(tensors)} {where}"
        spoiled = [name for name, row in rows.items() if not np.isfinite(row.sketch[first]).all()]
        if spoiled and len(spoiled) < len(rows):
            message += f"; {tensors[0]} has elements that are not finite in {_listed(spoiled)}"
        elif settings := _unequal(rows[one].settings, rows[other].settings):
            (name, own, its), *_ = settings
            message += f"; {name} is {own:g} in {one} and {its:g} in {other}"
        if np.bitwise_or.reduce([row.marks[first] for row in rows.values()]) & LATE:
            hint = f"{tensors[0]} was frozen in the first step: unfreeze it before DistributedDataParallel is built"
        else:
            hint = (
                "does a schedule, a loaded checkpoint, a scaler, no_sync or a change of weights differ between workers?"
            )
        return message, hint

    def _examples(self, rows: Mapping[str, _Row]) -> tuple[str, str]:
        """Return two workers that differ: one worker, and the worker whose first tensor differs most from its tensor.
        """
        one, first = next(iter(self.workers)), self.tensors[0]
        sketches = np.nan_to_num(np.stack([row.sketch[first] for row in rows.values()]).astype(np.float64))
        far = dict(zip(rows, np.abs(sketches - sketches[list(rows).index(one)]).sum(axis=1), strict=True))
        other = max((name for name in rows if name != one), key=far.__getitem__)
        return (one, other) if len(self.workers) == len(rows) else (other, one)


def _size_of(names: Sequence[str]) -> int:
    """About how many bytes they take."""
    return sum(100 + 4 * len(name) for name in names)


def _usual(table: Array) -> Array:
    """The median over the workers (axis 0) whose elements of a tensor are finite; 0 if no worker's are finite."""
    sound = np.isfinite(table).all(axis=2, keepdims=True)
    given = np.where(sound, table, np.where(sound.any(axis=0), np.nan, 0.0))
    usual: Array = np.nanmedian(given, axis=0)
    return usual


def _apart(table: Array, reference: Array, bound: Array) -> Array:
    """Which tensors (axis 1) of which workers (axis 0) are apart from the reference.

    They differ by more than rounding explains, or have elements that are not finite where another worker's are finite.
    """
    sound = np.isfinite(table).all(axis=2)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.linalg.norm(table[..., :SUMS] - reference[..., :SUMS], axis=2)
        scale = np.maximum(table[..., SUMS], reference[..., SUMS])
        far = (distance > bound * scale + _TINY) & np.isfinite(reference).all(axis=1)
        return np.where(sound, far, sound.any(axis=0))


@dataclass(frozen=True)
class _Differing:
    """A hyper-parameter that is not alike in all workers.

    values: its value, by worker.
    where: which workers have which value.
    scheduled: whether it has changed in any worker.
    epochs: the lengths of the workers' epochs.
    """

    values: Mapping[str, float]
    where: str
    scheduled: bool
    epochs: Collection[float]

    def counts(self, step: int, before: "_Differing | None") -> bool:
        """Whether it is a mistake.

        before: how it differed when last compared.

        Schedules depend on how many batches an epoch has. If all workers have equally many, a difference in a
        scheduled hyper-parameter counts in the first comparison, and later in the second comparison in a row. A worker
        that is a little late with a step of its schedule has taken the step by then, because the pauses grow. If
        lengths are unknown, a difference counts once it stays constant, as between two constants. A warm-up of another
        length changes it from step to step. If lengths differ, the second comparison shows whether it is a constant.
        """
        if not self.scheduled:
            return before is not None or len(self.epochs) < 2
        if min(self.epochs, default=0.0) > 0:
            return before is not None or step <= _BEGIN
        return before is not None and before.values == self.values


def _different_settings(rows: Mapping[str, _Row]) -> dict[str, _Differing]:
    """The hyper-parameters that differ and have to be alike, by name, without those that longer or shorter schedules
    change."""
    found: dict[str, _Differing] = {}
    epochs = {row.settings[EPOCH] for row in rows.values() if EPOCH in row.settings}
    common = [name for name in next(iter(rows.values())).settings if all(name in row.settings for row in rows.values())]
    for name in (name for name in common if name != EPOCH and not name.startswith(LARGEST)):
        largest = max(row.settings.get(LARGEST + name, 0.0) for row in rows.values())
        values = {by: row.settings[name] for by, row in rows.items()}
        given = list(values.values())
        usual = given[0] if len(given) == 2 else sorted(given)[len(given) // 2]
        if largest and len(epochs) > 1:
            continue
        bound = _SCHEDULED if largest else _EQUAL
        odd = [
            by for by, value in values.items()
            if abs(value - usual) > max(bound * max(abs(value), abs(usual)), _SMALL * largest)
        ]  # fmt: skip
        if odd:
            other = next(by for by in values if by not in odd)
            where = f"is {values[other]:g} in {other} and {values[odd[0]]:g} in {_listed(odd)}"
            found[name] = _Differing(values, where, largest > 0, epochs)
    return found


def _unequal(
    one: Mapping[str, float], other: Mapping[str, float]
) -> list[tuple[str, float, float]]:
    """The settings that both have and that differ, learning rates first."""
    names = sorted((name for name in one if name in other), key=lambda name: not name.startswith("lr"))
    return [(name, one[name], other[name]) for name in names if one[name] != other[name]]


def _listed(names: Sequence[str]) -> str:
    if len(names) > _NAMED:
        return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
