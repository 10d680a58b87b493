"""Validation of untrusted data from hosts: JSON against a schema, bounded numbers, text safe for a terminal."""

import json
import re
from typing import Any, TypeVar

from geomx_cli.core.errors import InvalidSettings

__all__ = ["check_whole", "convert", "decode", "first_line", "last_line", "plain", "plain_all"]

_SEQUENCES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?|[ -/]*[0-~])")
# Control characters except tab and newline, and bidirectional formatting characters.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_SURROGATES = re.compile("[\ud800-\udfff]")  # not text: no encoding has them, so they cannot be printed
_LINES = re.compile(r"\n(?=\S)")
_Kind = TypeVar("_Kind")


def plain(text: str) -> str:
    """Remove escape sequences, and control characters except tab and newline. Replace characters that cannot be
    encoded.
    """
    if text.isprintable():
        return text
    return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", _CONTROLS.sub("", _SEQUENCES.sub("", text)))


def plain_all(value: Any) -> Any:
    """Apply `plain` to all strings of JSON data, and indent their lines after the first, so that a reader cannot
    mistake them for lines of geomx itself.
    """
    match value:
        case str():
            return _LINES.sub("\n    ", plain(value))
        case dict():
            return {plain_all(name): plain_all(item) for name, item in value.items()}
        case list():
            return [plain_all(item) for item in value]
    return value


def first_line(error: BaseException, host: str = "") -> str:
    """Return the first line of an error's message, or its class name if the message is empty. A leading name of `host`
    is removed, because the context already names it.
    """
    line: str = next(iter(plain(str(error)).splitlines()), type(error).__name__)
    return line.removeprefix(f"host {host}: ").removeprefix(f"host {host} ")


def last_line(text: str, otherwise: str) -> str:
    """Return the last line of a command's output, or `otherwise` if it is empty."""
    return next(reversed(plain(text).strip().splitlines()), otherwise)


def check_whole(what: str, value: object, least: int, most: int) -> None:
    """Raise InvalidSettings unless `value` is an integer (not a bool) from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidSettings(f"{what} is {value!r}", f"it is a whole number from {least} to {most}")


def convert(value: Any, kind: type[_Kind]) -> _Kind:
    """Convert JSON data to a msgspec struct or TypedDict, with `plain_all` applied. Raises ValueError."""
    from geomx_cli.core.typed import to_type  # lazy: the plug-in scan loads this module

    try:
        return to_type(plain_all(value), kind)
    except (RecursionError, OverflowError) as error:
        raise ValueError(f"malformed: {error}") from None


def decode(data: bytes | str, kind: type[_Kind]) -> _Kind:
    """Parse JSON and `convert` it."""
    try:
        return convert(json.loads(data), kind)
    except RecursionError as error:
        raise ValueError(f"malformed: {error}") from None
