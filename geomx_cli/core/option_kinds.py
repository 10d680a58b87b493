"""The kinds of options: how their values are written as text, in TOML, in help and in messages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from geomx_cli.core import units
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.units import plain_number

__all__ = ["KINDS", "Kind"]

Kind = Literal["bool", "int", "float", "text", "duration", "size", "wan"]


@dataclass(frozen=True)
class _Kind:
    """One kind. `parse` reads a value of one of `types` from text; `hint` is for its ValueError.

    noun, example: what TOML has to contain, which may also be text with a unit if `has_unit`. metavar: in a command's
    help. format: writes a default for users. how: such values are written, if that is not obvious.
    """

    parse: Callable[[str], Any]
    types: tuple[type, ...]
    noun: str
    example: str
    metavar: str
    hint: str = ""
    has_unit: bool = False
    format: Callable[[Any], str] = str
    how: str = ""


def _parse_bool(text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in known:
        raise InvalidSettings(f"{text!r} is not yes or no", "write 1 or 0")
    return known[text.lower()]


def _parse_int(text: str) -> int:
    return int(plain_number(text))


def _parse_float(text: str) -> float:
    return float(plain_number(text))


def _parse_wan_text(text: str) -> str:
    units.parse_wan(text)
    return text


def _format_size(size: float) -> str:
    """Exactly, as a default may be typed again."""
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if size and size % scale == 0:
            return f"{size // scale:g}{unit}"
    return f"{size:g}"


KINDS: Mapping[Kind, _Kind] = {
    "bool": _Kind(_parse_bool, (bool,), "true or false", "true", "", format=lambda on: "yes" if on else "no"),
    "int": _Kind(_parse_int, (int,), "a whole number", "1", "NUMBER", "write digits, as in 4"),
    "float": _Kind(_parse_float, (float, int), "a number", "0.1", "NUMBER", "write digits, as in 0.05"),
    "text": _Kind(str, (str,), "text", '"text"', "TEXT"),
    "duration": _Kind(
        units.parse_duration, (float, int), "a duration", '"30s"', "DURATION", has_unit=True,
        format=lambda seconds: f"{seconds:g}s", how="As 300ms, 5s, 2m, 1.5h or 1d; a number alone is seconds.",
    ),
    "size": _Kind(
        units.parse_size, (int,), "a size", '"1MiB"', "SIZE", has_unit=True, format=_format_size,
        how="As 64k, 1MiB or 2GB; a number alone is bytes.",
    ),
    "wan": _Kind(_parse_wan_text, (str,), "a rate, round trip or both", '"100mbit,30ms"', "RATE[,RTT]"),
}  # fmt: skip
