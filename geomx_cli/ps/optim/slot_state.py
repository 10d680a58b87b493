"""An optimizer's state of one slot, and all of it as named arrays to save and load."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array

__all__ = ["WORK", "Slot", "SlotState", "export_states", "import_states"]

Slot = tuple[int, int]
WORK = {np.dtype(t): np.dtype(w) for t, w in (("f2", "f4"), ("f4", "f4"), ("f8", "f8"))}
"""The dtype in which weights of each dtype are updated."""
_NAME = re.compile(r"([0-9]+)/([0-9]+)/([a-z]+(?:\.(?:0|[1-9][0-9]*))?)")


class _Kind(Protocol):
    """A class of optimizers: its name, and the names of the arrays of a slot. See Optimizer."""

    name: ClassVar[str]
    required: ClassVar[tuple[str, ...]]
    occasional: ClassVar[tuple[str, ...]]
    by_member: ClassVar[tuple[str, ...]]


@dataclass(slots=True)
class SlotState:
    """The number of updates, flat arrays of the working dtype, and for fp16 weights an fp32 master.

    An array of a single member is called `what.member`, as in "backup.1".
    """

    step: int = 0
    master: Array | None = None
    arrays: dict[str, Array] = field(default_factory=dict)

    @classmethod
    def start(cls, weight: Array) -> "SlotState":
        """The state before the first update of this weight."""
        work = WORK[weight.dtype]
        return cls(master=None if weight.dtype == work else weight.astype(work).reshape(-1))

    def fits(self, weight: Array) -> bool:
        """Whether this is the state of a weight of this dtype and size."""
        work = WORK[weight.dtype]
        named = self.named().values()
        return (self.master is None) == (weight.dtype == work) and all(
            array.size == weight.size and array.dtype == work for array in named
        )

    def exact(self, weight: Array) -> Array:
        """The weight in the working dtype, flat."""
        return weight.reshape(-1) if self.master is None else self.master

    def named(self) -> dict[str, Array]:
        """All arrays, by name."""
        return self.arrays if self.master is None else {"master": self.master, **self.arrays}


def export_states(states: Mapping[Slot, SlotState]) -> dict[str, Array]:
    """Copies of all arrays, named "key/slice/what"; `step` is int64 of shape (1,)."""
    named: dict[str, Array] = {}
    for (key, index), state in sorted(states.items()):
        named[f"{key}/{index}/step"] = np.array([state.step], np.int64)
        named |= {f"{key}/{index}/{what}": array.copy() for what, array in state.named().items()}
    return named


def import_states(named: Mapping[str, Array], kind: _Kind) -> dict[Slot, SlotState]:
    """The states of which `export_states` returned these arrays, as copies. Raises InvalidSettings if they are not the
    whole state of such an optimizer.
    """
    slots: dict[Slot, dict[str, Array]] = {}
    for name, array in named.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise InvalidSettings(f"{name!r} does not name optimizer state", 'as in "3/0/step"')
        slots.setdefault((int(match[1]), int(match[2])), {})[match[3]] = array
    return {slot: _import_slot(slot, arrays, kind) for slot, arrays in slots.items()}


def _import_slot(slot: Slot, named: dict[str, Array], kind: _Kind) -> SlotState:
    known = {"master", *kind.required, *kind.occasional}
    arrays = {what: array.copy() for what, array in named.items() if what != "step"}
    step = named.get("step")
    good = step is not None and step.shape == (1,) and step.dtype.kind == "i" and step[0] >= 0
    own = {what for what in arrays if "." in what}
    members = {what.partition(".")[2] for what in own}
    whole = set(kind.required) <= arrays.keys() - own <= known
    whole = whole and own == {f"{what}.{member}" for what in kind.by_member for member in members}
    alike = len({(array.dtype, array.shape) for array in arrays.values()}) <= 1
    alike = alike and all(array.ndim == 1 and array.dtype in WORK.values() for array in arrays.values())
    if step is None or not (good and whole and alike):
        found, need = ", ".join(sorted(named)), ", ".join(("step", *kind.required))
        message = f"slot {slot[0]}/{slot[1]} has no state of {kind.name} in ({found})"
        raise InvalidSettings(message, f"it needs {need}, of one size and dtype")
    return SlotState(int(step[0]), arrays.pop("master", None), arrays)
