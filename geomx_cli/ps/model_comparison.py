"""Compares the models that workers train, in steps after which these should be equal."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.cluster.bodies import Body

__all__ = ["HALF", "LATE", "SUMS", "TRAINED", "ModelComparison"]

SUMS = 4
"""Sums in the sketch of a tensor, each over a part of its elements; the Euclidean norm of all follows them."""
TRAINED, LATE, HALF = 1, 2, 4
"""Marks of a tensor: it is trained, only since a later step than the first, and has elements of 16 bits."""
_ALIKE, _UNLIKE, _UNLIKE_HALF = 1e-3, 1e-2, 5e-2
"""Differences, relative to a tensor's norm, that rounding explains: on equal platforms, else, and there of 16 bits."""
_TINY = 1e-6
_OPEN = 4
"""Steps of a scope that wait for rows."""
_SCOPES = _LAYOUTS = 64
"""Scopes of all, and lists of names that are kept of one worker."""
_HELD = 64 * 2**20
"""Bytes of all rows."""
_NAMED = 3


@dataclass(frozen=True)
class _Row:
    """What one worker has sent of its model. sketch: of shape (tensors, SUMS + 1). settings: hyper-parameters."""

    layout: int
    marks: Array
    sketch: Array
    settings: Mapping[str, float]
    platform: str


class ModelComparison:
    """Takes sketches of workers' models, at the first root. Says the first difference, once.

    A scope is an optimizer's tensors; rows of a scope and step are compared once all of its workers have sent theirs,
    or once later steps have begun, as workers may choose other steps. Rows with other names of tensors are not
    compared with each other. Memory is bounded whatever members send. For the loop's thread only.

    say: gets a message and a hint.
    """

    def __init__(self, say: Callable[[str, str], None], workers: Callable[[], int]) -> None:
        self._say = say
        self._workers = workers
        self._scopes: dict[str, dict[int, dict[str, _Row]]] = {}
        self._names: dict[tuple[str, int], Sequence[str]] = {}
        self._named = Counter[str]()
        self._held = 0
        self._ended = False

    def take(self, body: Body) -> None:
        """Take a worker's row; see ControlClient.compare. Raises InvalidSettings for one whose parts do not fit."""
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
        layout = (scope, body["layout"])
        if body["names"] and layout not in self._names and self._named[by] < _LAYOUTS:
            self._named[by] += 1
            self._names[layout] = body["names"]
        if step not in steps and len(steps) == _OPEN and step < min(steps):
            return
        rows = steps.setdefault(step, {})
        if by in rows or len(rows) >= self._workers():
            return
        rows[by] = _Row(body["layout"], marks, sketch.reshape(-1, SUMS + 1), body["settings"], body["platform"])
        self._held += sketch.nbytes
        if len(rows) >= body["of"]:
            for earlier in [other for other in steps if other <= step]:
                self._close(scope, earlier)
        while len(steps) > _OPEN or (steps and self._held > _HELD):
            self._close(scope, min(steps))

    def close(self) -> None:
        """No row follows: compare those that are left."""
        for scope, steps in self._scopes.items():
            for step in sorted(steps):
                self._close(scope, step)

    def _close(self, scope: str, step: int) -> None:
        rows = self._scopes[scope].pop(step)
        self._held -= sum(row.sketch.nbytes for row in rows.values())
        layout, count = Counter(row.layout for row in rows.values()).most_common(1)[0]
        alike = {by: row for by, row in sorted(rows.items()) if row.layout == layout}
        if self._ended or count < 2 or len({row.marks.size for row in alike.values()}) > 1:
            return
        found = _Difference.between(alike)
        if found is not None:
            self._ended = True
            self._say(*found.told(alike, self._names.get((scope, layout), ()), step))


@dataclass(frozen=True)
class _Difference:
    """tensors: numbers of those that are not the same in all workers. workers: those to which they belong, which in a
    pair are both.
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
        apart = _apart(table, table[0] if pair else np.median(table, axis=0), bound) & trained
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
        """Two workers that differ."""
        others = [name for name in rows if name not in self.workers]
        one = next(iter(self.workers))
        return (others[0], one) if others else (one, next(name for name in rows if name != one))


def _apart(table: Array, reference: Array, bound: Array) -> Array:
    """Which tensors (axis 1) of which workers (axis 0) differ from the reference by more than rounding explains."""
    sound, expected = np.isfinite(table).all(axis=2), np.isfinite(reference).all(axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.linalg.norm(table[..., :SUMS] - reference[..., :SUMS], axis=2)
        scale = np.maximum(table[..., SUMS], reference[..., SUMS])
        return np.where(sound & expected, distance > bound * scale + _TINY, sound != expected)


def _unequal(
    one: Mapping[str, float], other: Mapping[str, float]
) -> list[tuple[str, float, float]]:
    """The settings that both have and that differ, rates first."""
    names = sorted((name for name in one if name in other), key=lambda name: not name.startswith("lr"))
    return [(name, one[name], other[name]) for name in names if one[name] != other[name]]


def _listed(names: Sequence[str]) -> str:
    if len(names) > _NAMED:
        return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
