"""Parsing and formatting of durations, sizes, rates and links: "30ms", "1MiB", "100mbit", "100mbit,30ms"."""

import re
from collections.abc import Sequence

from geomx_cli.core.errors import InvalidSettings

__all__ = [
    "counted",
    "format_bytes",
    "format_duration",
    "parse_duration",
    "parse_rate",
    "parse_size",
    "parse_wan",
    "plain_number",
    "some_of",
]

_DURATIONS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9}
_SIZES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30}
_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_LONGEST_TRIP = 60.0
_EXAMPLE_WAN = (
    "write a rate (kbit, mbit or gbit), a round trip (us, ms or s), or both with a comma between: 100mbit,30ms"
)
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def _parse(text: str, scale: dict[str, float] | dict[str, int], kind: str, example: str) -> float:
    match = _NUMBER.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in scale:
        units = ", ".join(name for name in scale if name)
        raise InvalidSettings(f"{text!r} is not a {kind}", f"write a number and one of {units}, as in {example}")
    return float(match.group(1)) * scale[unit]


def plain_number(text: str) -> str:
    """The text of a number. Raises ValueError for spaces, underscores and digits of other scripts, which int and float
    accept.
    """
    if not text.isascii() or "_" in text or text != text.strip():
        raise ValueError(f"{text!r} is no plain number")
    return text


def parse_duration(text: str) -> float:
    """Parse a duration to seconds: "5s", "300ms", "2m", "1.5h" or a bare number of seconds."""
    return _parse(text, _DURATIONS, "duration", '"30ms"')


def parse_size(text: str) -> int:
    """Parse a size to bytes: "1MiB", "64k", "2GB" or a bare number of bytes."""
    return int(_parse(text, _SIZES, "size", '"1MiB"'))


def parse_rate(text: str) -> float:
    """Parse a rate to bits per second: "100mbit", "1gbit" or "512kbit"; the unit is required."""
    return _parse(text, _RATES, "rate", '"100mbit"')


def parse_wan(text: str) -> tuple[float, float]:
    """Parse a link, e.g. "100mbit,30ms", to (bits per second, round trip in seconds). A missing part is 0; "" is (0,
    0).

    Raises InvalidSettings that names the invalid part: a part without a unit of rate or time, a duplicate, a rate of 0,
    or a round trip of more than a minute.
    """
    rate = trip = None
    for part in (part.strip() for part in text.split(",") if text.strip()):
        match = _NUMBER.fullmatch(part)
        unit = match.group(2).lower() if match else ""
        if unit in _RATES and rate is None:
            rate = parse_rate(part)
        elif unit in _DURATIONS and unit and trip is None:
            trip = parse_duration(part)
        else:
            raise _wrong_part(part, match.group(2) if match else None)
    if rate == 0:
        raise InvalidSettings("a link of 0 bit/s carries nothing", "leave out --wan for links that are not shaped")
    if trip is not None and trip > _LONGEST_TRIP:
        raise InvalidSettings(f"a round trip of {format_duration(trip)} is more than a minute", _EXAMPLE_WAN)
    return rate or 0.0, trip or 0.0


def _wrong_part(part: str, unit: str | None) -> InvalidSettings:
    """Build the error for one part of a link; `unit` follows its number, None if it has no number."""
    if unit is None:
        several = len(part.split()) > 1
        what = "has no comma between its parts" if several else "is neither a rate nor a round trip"
    elif unit.lower() in _RATES:
        what = "is a second rate"
    elif not unit:
        what = "has no unit"
    elif unit.lower() in _DURATIONS:
        what = "is a second round trip"
    else:
        what = f"has the unit {unit!r}, which is neither one of a rate nor of a time"
    return InvalidSettings(f"{part!r} {what}", _EXAMPLE_WAN)


def counted(count: int, noun: str) -> str:
    """Pluralize a noun: "1 host", "2 hosts", "2 processes"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def some_of(texts: Sequence[str], most: int) -> str:
    """Join the first `most` texts: "one; two; and 3 more"."""
    more = len(texts) - most
    return "; ".join([*texts[:most], *([f"and {more} more"] if more > 0 else [])])


def format_duration(seconds: float, like: float | None = None) -> str:
    """Format a duration: "850 ms", "4.2 s", "3 min 05 s", "1 h 02 min". If `like` is given, with that duration's
    precision: "5 s" if it has minutes.
    """
    scale = seconds if like is None else like
    if scale < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if scale < 59.95:
        return f"{seconds:.1f} s"
    if scale < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    hours, rest = divmod(round(seconds) // 60, 60)
    return f"{hours} h {rest:02d} min" if hours else f"{rest} min"


def format_bytes(count: float, like: float | None = None) -> str:
    """Format a size in decimal units: "715 kB", "46.8 MB". If `like` is given, in that size's unit and with its
    decimals.
    """
    size = count if like is None else like
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            number = f"{count / scale:.3g}" if like is None else f"{count / scale:.{_decimals(size / scale)}f}"
            return f"{number} {unit}"
    return f"{count:.0f} B"


def _decimals(value: float) -> int:
    """The number of decimals that give three significant digits of `value`; at least 1."""
    return 2 if value < 10 else 1 if value < 100 else 0
