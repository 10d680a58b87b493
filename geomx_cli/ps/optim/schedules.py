"""Learning-rate schedules of `mxnet.lr_scheduler` 1.9.1, which a root follows by the number of updates.

A schedule is sent as its name and numbers, never as code. They are MXNet's attributes under MXNet's names, with their
values at the time of sending. MXNet's schedulers are stateful. Here the rate is a function of the number of updates
alone, because slices may be at different numbers. The results are bit-identical if updates are counted from 1.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any, ClassVar

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.option import nearest

__all__ = [
    "Field", "MULTIPLIERS", "SCHEDULES", "Schedule", "Value", "checked", "create", "fields_of", "optional",
    "rate_field",
]  # fmt: skip

# The hyper-parameters of optimizers and schedules: names, types, defaults and ranges.

Value = float | int | bool


@dataclass(frozen=True, slots=True)
class Field:
    """One hyper-parameter: its default (which determines the type) and its range, low <= value < high."""

    default: float | bool
    low: float = -math.inf
    high: float = math.inf
    optional: bool = False

    def check(self, name: str, value: Value | None) -> float | bool:
        """The value as float or bool. Raises InvalidSettings that names `name` for a wrong type or range."""
        if isinstance(self.default, bool):
            if isinstance(value, bool):
                return value
            raise InvalidSettings(f"{name} must be true or false, not {value!r}")
        if value is None and self.optional:
            return 0.0
        if not isinstance(value, Real) or isinstance(value, bool):
            raise InvalidSettings(f"{name} must be a number, not {value!r}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not (math.isfinite(number) and self.low <= number < self.high):
            least = f" of {self.low:g} or more" if self.low > -math.inf else ""
            below = f", below {self.high:g}" if self.high < math.inf else ""
            raise InvalidSettings(f"{name} must be a finite number{least}{below}, not {number!r}")
        return number


def fields_of(learning_rate: float, wd: float = 0.0, **own: Field) -> Mapping[str, Field]:
    """The hyper-parameters common to all optimizers, with these defaults, and an optimizer's own."""
    common = {
        "learning_rate": Field(learning_rate),
        "wd": Field(wd, low=0.0),
        "rescale_grad": Field(1.0),
        "clip_gradient": Field(0.0, optional=True),
    }
    return MappingProxyType(common | own)


def rate_field(default: float) -> Field:
    """A momentum or the decay rate of a moving average."""
    return Field(default, low=0.0, high=1.0)


MULTIPLIERS: Mapping[str, Field] = MappingProxyType({"lr_mult": Field(1.0), "wd_mult": Field(1.0)})
"""The hyper-parameters that a tensor may have of its own: factors of the learning rate and of the weight decay."""


def checked(
    owner: str, params: Mapping[str, Value | None], fields: Mapping[str, Field]
) -> dict[str, float | bool]:
    """`params` as floats and bools. Raises InvalidSettings that names their owner for a name that is not in `fields`,
    and for a wrong type or range.
    """
    found = {}
    for name, value in params.items():
        if name not in fields:
            known = ", ".join(fields)
            raise InvalidSettings(f"{owner} has no hyper-parameter {name!r}", f"it has {known}")
        found[name] = fields[name].check(f"{name} of {owner}", value)
    return found


MAX_STEPS = 4096
"""Limit on the steps of a `multifactor`."""
_MAX_REDUCTIONS = 2**20


def _fields(**own: Field) -> Mapping[str, Field]:
    common = {
        "base_lr": Field(0.01),
        "warmup_steps": Field(0.0, low=0.0),
        "warmup_begin_lr": Field(0.0),
        "warmup_final_lr": Field(0.01),
        "warmup_constant": Field(False),
    }
    return MappingProxyType(common | own)


class Schedule(ABC):
    """The learning rate of each update. Raises InvalidSettings for a missing, wrong or out-of-range number."""

    name: ClassVar[str]
    fields: ClassVar[Mapping[str, Field]]

    def __init__(self, params: Mapping[str, Any]) -> None:
        what = f"the schedule {self.name}"
        if params.keys() != self.fields.keys():
            wrong = ", ".join(sorted(map(str, params.keys() ^ self.fields.keys())))
            raise InvalidSettings(f"{what} has unknown or missing numbers: {wrong}", f"it has {', '.join(self.fields)}")
        self._params = {key: field.check(f"{key} of {what}", params[key]) for key, field in self.fields.items()}

    def rate(self, update: int) -> float:
        """The learning rate of a slice's update number `update`, counted from 1."""
        p = self._params
        if update >= p["warmup_steps"]:
            return self._after_warmup(update)
        if p["warmup_constant"]:
            return p["warmup_begin_lr"]
        rise = (p["warmup_final_lr"] - p["warmup_begin_lr"]) * float(update) / p["warmup_steps"]
        return p["warmup_begin_lr"] + rise

    @abstractmethod
    def _after_warmup(self, update: int) -> float:
        """The rate after the warm-up."""


class Factor(Schedule):
    """Multiplies the rate by `factor` after every `step` updates beyond `count`, down to `stop_factor_lr`."""

    name = "factor"
    fields = _fields(
        step=Field(1.0, low=1.0),
        factor=Field(1.0, high=math.nextafter(1.0, 2.0)),
        stop_factor_lr=Field(1e-8),
        count=Field(0.0, low=0.0),
    )

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__(params)
        self._ends = [self._params["count"] + self._params["step"]]
        self._rates = [float(self._params["base_lr"])]

    def _after_warmup(self, update: int) -> float:
        while update > self._ends[-1] and len(self._rates) < _MAX_REDUCTIONS:
            # Multiply repeatedly, as MXNet does: a power would round differently.
            reduced = max(self._rates[-1] * self._params["factor"], self._params["stop_factor_lr"])
            if reduced == self._rates[-1]:
                return reduced
            self._rates.append(reduced)
            self._ends.append(self._ends[-1] + self._params["step"])
        return self._rates[min(bisect_left(self._ends, update), len(self._rates) - 1)]


class MultiFactor(Schedule):
    """Multiplies the rate by `factor` after each of the update numbers in `steps`, which increase."""

    name = "multifactor"
    fields = _fields(factor=Factor.fields["factor"])

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__({key: value for key, value in params.items() if key != "steps"})
        steps = params.get("steps")
        if not isinstance(steps, (list, tuple)) or len(steps) > MAX_STEPS:
            raise InvalidSettings(f"steps of the schedule {self.name} must be a list of at most {MAX_STEPS} numbers")
        self._steps = [Field(1.0, low=1.0).check(f"steps of the schedule {self.name}", step) for step in steps]
        if any(late <= early for early, late in zip(self._steps, self._steps[1:], strict=False)):
            raise InvalidSettings(f"steps of the schedule {self.name} must rise")
        self._rates = [float(self._params["base_lr"])]
        for _ in self._steps:
            self._rates.append(self._rates[-1] * self._params["factor"])

    def _after_warmup(self, update: int) -> float:
        return self._rates[bisect_left(self._steps, update)]


class _Falling(Schedule):
    """Falls from `base_lr_orig` at the end of the warm-up to `final_lr` at `max_update`, and stays there."""

    fields = _fields(max_update=Field(1.0, low=1.0), base_lr_orig=Field(0.01), final_lr=Field(0.0))

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__(params)
        if self._params["max_update"] == self._params["warmup_steps"]:
            raise InvalidSettings(f"max_update of the schedule {self.name} must differ from its warmup_steps")

    def _after_warmup(self, update: int) -> float:
        p = self._params
        if p["max_update"] < p["warmup_steps"]:
            return p["base_lr"]
        steps, done = p["max_update"] - p["warmup_steps"], min(float(update), p["max_update"]) - p["warmup_steps"]
        return p["final_lr"] + (p["base_lr_orig"] - p["final_lr"]) * self._left(done, steps)

    @abstractmethod
    def _left(self, done: float, steps: float) -> float:
        """The remaining fraction of the fall after `done` of `steps` updates: from 1 to 0."""


class Poly(_Falling):
    """A polynomial of degree `power`."""

    name = "poly"
    fields = MappingProxyType({**_Falling.fields, "power": Field(2.0, low=0.0)})

    def _left(self, done: float, steps: float) -> float:
        return float(pow(1 - done / steps, self._params["power"]))


class Cosine(_Falling):
    """Half a period of a cosine."""

    name = "cosine"

    def _left(self, done: float, steps: float) -> float:
        return (1 + math.cos(math.pi * done / steps)) / 2


SCHEDULES: Mapping[str, type[Schedule]] = MappingProxyType(
    {kind.name: kind for kind in (Factor, MultiFactor, Poly, Cosine)}
)


def create(name: str, params: Mapping[str, Any]) -> Schedule:
    """The schedule called `name`. Raises InvalidSettings for an unknown name or wrong numbers."""
    if name not in SCHEDULES:
        raise InvalidSettings(f"no learning-rate schedule is called {name!r}", nearest(name, SCHEDULES))
    return SCHEDULES[name](params)


def optional(given: tuple[str, Mapping[str, Any]] | None) -> Schedule | None:
    """The schedule of this name and numbers; None for None. Raises the same errors as `create`."""
    return None if given is None else create(*given)
