"""One option of the table: its definition, and its value as text."""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from geomx_cli.core import units
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.units import plain_number

__all__ = [
    "Group", "KINDS", "Kind", "Option", "Value", "check", "decode", "did_you_mean", "encode", "nearest", "text_of",
]  # fmt: skip

# The hint for a mistyped word.

_WORD = 100  # maximum characters compared


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return "did you mean NAME?" for the known name nearest to `word`, or "" if none is near. Case and leading dashes
    do not count. Of equally near names, a name with the same first letter wins, and then the alphabetical order
    decides.
    """
    bare = _bare(word)
    names = {_bare(name): name for name in known}
    close = difflib.get_close_matches(bare, names, n=len(names) or 1, cutoff=cutoff)
    if not close:
        return ""
    matcher = difflib.SequenceMatcher(b=bare)

    def likeness(name: str) -> tuple[float, bool]:
        matcher.set_seq1(name)
        return round(matcher.ratio(), 2), name[:1] == bare[:1]

    return f"did you mean {names[max(sorted(close), key=likeness)]}?"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the hint for an unknown word: the nearest known one, or all."""
    names = list(known)
    return did_you_mean(word, names) or f"choose one of {', '.join(names)}"


def _bare(word: str) -> str:
    return word[:_WORD].lower().lstrip("-")


# The kinds of options: how their values are written as text, in TOML, in help and in messages.

Kind = Literal["bool", "int", "float", "text", "duration", "size", "wan"]


@dataclass(frozen=True)
class _Kind:
    """One kind of options.

    parse: reads a value of one of `types` from text.
    hint: for the ValueError of `parse`.
    noun, example: the value that TOML has to contain. It may also be text with a unit if `has_unit`.
    metavar: the value's name in a command's help.
    format: writes a default for users.
    how: how such values are written, if that is not obvious.
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
    """Write a number exactly, because a user may type a default again."""
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


Value = bool | int | float | str
Group = Literal["cluster", "synchronisation", "transport", "training"]


@dataclass(frozen=True)
class Option:
    """One option.

    env: the variable that passes it to processes.
    suggestions: values that a shell offers, if many are valid. With `takes_codec`, names of codecs.
    minimum, maximum, below: a number must be within `minimum` and `maximum` and less than `below`, or equal the
        default.
    word: the text that users read and may write for the default, such as "auto", "never" or "none".
    written: the `choices` that only geomx writes, for processes. Users are not offered them.
    """

    name: str
    kind: Kind
    default: Value
    env: str
    help: str
    group: Group
    choices: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    takes_codec: bool = False
    minimum: float = -math.inf
    maximum: float = math.inf
    below: float = math.inf
    word: str = ""
    written: frozenset[str] = frozenset()

    @property
    def offered(self) -> tuple[str, ...]:
        """The choices that a user has; () if the option has none."""
        return tuple((choice or self.word) for choice in self.choices if choice not in self.written)

    @property
    def flag(self) -> str:
        """Its command-line flag, e.g. `--batch-size`."""
        return "--" + self.name.replace("_", "-")

    @property
    def default_text(self) -> str:
        """The default as a user writes it, with a unit: "6s", "1MiB", "auto"; "" for none."""
        return self.word or KINDS[self.kind].format(self.default)

    def allows(self, number: float) -> bool:
        """Whether a number is the default or within the bounds."""
        return number == self.default or (self.minimum <= number <= self.maximum and number < self.below)

    @property
    def span(self) -> str:
        """The bounds of a number as text: "from 1 to 1024", "from 0", "from 0 and below 1", or "" if unbounded."""
        words = (("from ", self.minimum), ("to ", self.maximum), ("and below ", self.below))
        return " ".join(word + self._plain(bound) for word, bound in words if abs(bound) != math.inf)

    @property
    def stands_apart(self) -> str:
        """The default as text if it has a word, or is a number outside the bounds, otherwise ""."""
        value = self.default
        if self.word:
            return self.word
        if isinstance(value, str) or (self.minimum <= value <= self.maximum and value < self.below):
            return ""
        return self._plain(value)

    def _plain(self, number: float) -> str:
        return f"{number:.10g}" + ("s" if self.kind == "duration" and number else "")


def decode(option: Option, text: str) -> Value:
    """Parse the text of a value. Raises InvalidSettings with a hint on valid values."""
    kind = KINDS[option.kind]
    if option.word and text.strip() == option.word:
        return option.default
    try:
        value = kind.parse(text.strip())
    except InvalidSettings as error:
        raise InvalidSettings(f"{option.flag} ({option.env}): {error.message}", error.hint) from None
    except ValueError:
        raise InvalidSettings(f"{option.flag} ({option.env}): {text!r} is not {kind.noun}", kind.hint) from None
    return check(option, value)


def check(option: Option, value: Value) -> Value:
    """Return `value` if the option allows it. Raises InvalidSettings otherwise."""
    if option.choices and value not in option.choices:
        raise InvalidSettings(
            f"{option.flag} ({option.env}): there is no {value!r}", nearest(str(value), option.offered)
        )
    if not isinstance(value, str) and not option.allows(value):
        apart = f"{option.stands_apart}, or " if option.stands_apart else ""
        raise InvalidSettings(
            f"{option.flag} ({option.env}): {value} is out of range", f"write {apart}a number {option.span}".rstrip()
        )
    return value


def encode(option: Option, value: Value) -> str:
    """Return `value` as text that `decode` parses."""
    if option.kind == "bool":
        return "1" if value else "0"
    # Units follow numbers without exponent.
    return f"{Decimal(repr(value)):f}" if option.kind == "duration" else str(value)


def text_of(value: Value) -> str:
    """Return the value of an option as a user writes it: 40, not 40.0."""
    return f"{value:.12g}" if isinstance(value, float) else str(value)
