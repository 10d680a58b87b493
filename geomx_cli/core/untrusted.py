"""What comes from a host, before it is believed: JSON as it was agreed on, numbers within bounds, text that does a
terminal no harm.
"""

import json
import re
from typing import Any, TypeVar

from geomx_cli.core.errors import InvalidSettings

__all__ = ["check_whole", "convert", "decode", "first_line", "last_line", "plain", "plain_all"]

_SEQUENCES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?|[ -/]*[0-~])")
# All control characters but tab and newline, and those that turn the direction of the text around them.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_Kind = TypeVar("_Kind")


def plain(text: str) -> str:
    """`text` as a terminal may get it: no escape sequences, and of control characters only tab and newline."""
    return _CONTROLS.sub("", _SEQUENCES.sub("", text))


def plain_all(value: Any) -> Any:
    """JSON data with all its texts plain."""
    match value:
        case str():
            return plain(value)
        case dict():
            return {plain_all(name): plain_all(item) for name, item in value.items()}
        case list():
            return [plain_all(item) for item in value]
    return value


def first_line(error: BaseException, host: str = "") -> str:
    """The first line of an error's words, or its class where it has none; without the name of the host that leads it,
    for where that stands before it anyway.
    """
    line: str = next(iter(plain(str(error)).splitlines()), type(error).__name__)
    return line.removeprefix(f"host {host}: ").removeprefix(f"host {host} ")


def last_line(text: str, otherwise: str) -> str:
    """The last line of what a command has said, or `otherwise` where it said nothing."""
    return next(reversed(plain(text).strip().splitlines()), otherwise)


def check_whole(what: str, value: object, least: int, most: int) -> None:
    """Raises InvalidSettings for anything but an integer (a bool is none) from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidSettings(f"{what} is {value!r}", f"it is a whole number from {least} to {most}")


def convert(value: Any, kind: type[_Kind]) -> _Kind:
    """JSON data of a host, with all texts plain, as a msgspec struct or TypedDict. Raises ValueError where it is none.
    """
    import msgspec  # here, as a scan of plug-ins loads this module

    try:
        return msgspec.convert(plain_all(value), kind)
    except (RecursionError, OverflowError) as error:
        raise ValueError(f"malformed: {error}") from None


def decode(data: bytes | str, kind: type[_Kind]) -> _Kind:
    """The same of JSON that is yet to be read."""
    try:
        return convert(json.loads(data), kind)
    except RecursionError as error:
        raise ValueError(f"malformed: {error}") from None
