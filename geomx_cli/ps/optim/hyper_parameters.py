"""The hyper-parameters of optimizers and schedules: names, types, defaults and ranges."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType

from geomx_cli.core.errors import InvalidSettings

__all__ = ["MULTIPLIERS", "Field", "Value", "checked", "fields_of", "rate_field"]

Value = float | int | bool


@dataclass(frozen=True, slots=True)
class Field:
    """One hyper-parameter: its default (which determines the type) and its range, low <= value < high."""

    default: float | bool
    low: float = -math.inf
    high: float = math.inf
    optional: bool = False

    def check(self, name: str, value: Value | None) -> float | bool:
        """The value as float or bool. Raises InvalidSettings, naming `name`, for a wrong type or range."""
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
"""What a tensor may have of its own: factors of the learning rate and of the weight decay."""


def checked(
    owner: str, params: Mapping[str, Value | None], fields: Mapping[str, Field]
) -> dict[str, float | bool]:
    """`params` as floats and bools. Raises InvalidSettings, naming their owner, for a name that is not in `fields` and
    for a wrong type or range.
    """
    found = {}
    for name, value in params.items():
        if name not in fields:
            known = ", ".join(fields)
            raise InvalidSettings(f"{owner} has no hyper-parameter {name!r}", f"it has {known}")
        found[name] = fields[name].check(f"{name} of {owner}", value)
    return found
