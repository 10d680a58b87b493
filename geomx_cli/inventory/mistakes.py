"""Collects the errors of a user's file, to report them together."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from geomx_cli.core.errors import InvalidSettings

__all__ = ["Lines", "Mistakes", "Path", "shortened"]

# Line numbers of tables and keys in a TOML text, which tomllib does not provide.

Path = tuple[str | int, ...]
"""Keys from the top, e.g. ("host", 1, "ports"); elements of an array of tables by index."""

_KEY = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
_KEYS = rf"{_KEY}(?:[ \t]*\.[ \t]*{_KEY})*"
_HEADER = re.compile(rf"\[(\[?)[ \t]*({_KEYS})[ \t]*\]\]?")
_ASSIGNMENT = re.compile(rf"({_KEYS})[ \t]*=")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)+")
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'|#[^\n]*|[\[\]{}\n]", re.DOTALL
)


@dataclass(frozen=True)
class Lines:
    """The line numbers, from 1, of tables and keys."""

    by_path: Mapping[Path, int]

    @classmethod
    def of(cls, text: str) -> "Lines":
        """Scan a text that `tomllib` accepts."""
        found: dict[Path, int] = {}
        table: Path = ()
        counts: dict[Path, int] = {}
        position, line, counted = 0, 1, 0
        while position < len(text):
            if blank := _BLANK.match(text, position):
                position = blank.end()
                continue
            line, counted = line + text.count("\n", counted, position), position
            if header := _HEADER.match(text, position):
                table = _table(_keys(header[2]), counts, another=bool(header[1]))
                found.setdefault(table, line)
                position = header.end()
            elif assignment := _ASSIGNMENT.match(text, position):
                found.setdefault(table + _keys(assignment[1]), line)
                position = _line_after_value(text, assignment.end())
            else:
                break
        return cls(found)

    def of_path(self, path: Path) -> int:
        """Return the line of `path`, or of its nearest enclosing table; 1 if there is none."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.by_path:
                return self.by_path[path[:length]]
        return 1


def _table(keys: Path, counts: dict[Path, int], *, another: bool) -> Path:
    """Return the path of a header's table: in the last element of an array of tables, or with `another` in a new one.
    """
    path: Path = ()
    for place, key in enumerate(keys):
        path += (key,)
        if another and place == len(keys) - 1:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path += (counts[path],)
    return path


def _keys(text: str) -> Path:
    """Split a dotted key and remove quotes."""
    found: list[str] = []
    value: Any = tomllib.loads(f"{text} = 0")
    while isinstance(value, dict):
        ((key, value),) = value.items()
        found.append(key)
    return tuple(found)


def _line_after_value(text: str, position: int) -> int:
    """Return the position after the line on which the value starting at `position` ends."""
    depth = 0
    for token in _TOKEN.finditer(text, position):
        if token[0] == "\n" and depth == 0:
            return token.end()
        depth += (token[0] in "[{") - (token[0] in "]}")
    return len(text)


_LONGEST = 1000  # maximum characters of a message or hint, which may quote the file
_MOST = 50  # maximum number reported


@dataclass
class Mistakes:
    """The errors in the file called `name`, by line. `keys`: names of the keys with errors."""

    name: str
    lines: Lines
    keys: set[str] = field(default_factory=set)
    _found: set[tuple[int, str, str]] = field(default_factory=set)

    def add(self, path: Path, message: str, hint: str) -> None:
        """Add an error at the line of a key or table."""
        if path and isinstance(path[-1], str):
            self.keys.add(path[-1])
        self.add_at(self.lines.of_path(path), message, hint)

    def add_inherited(self, host: int, key: str, message: str, hint: str) -> None:
        """Add an error in the key of a host at its line: under the host, in [defaults], or else that of the host."""
        shared = ("host", host, key) not in self.lines.by_path and ("defaults", key) in self.lines.by_path
        self.add(("defaults", key) if shared else ("host", host, key), message, hint)

    def add_at(self, line: int, message: str, hint: str) -> None:
        """Add an error at a line."""
        self._found.add((line, shortened(message), shortened(hint)))

    def raise_if_any(self) -> None:
        """Raise InvalidSettings if there are errors."""
        if self._found:
            self._raise()

    def _raise(self) -> NoReturn:
        entries = [(f"{self.name}:{line}: {message}", hint) for line, message, hint in sorted(self._found)[:_MOST]]
        if len(entries) == 1:
            raise InvalidSettings(*entries[0])
        text = "".join(f"\n  {message}\n    {hint}" for message, hint in entries)
        more = f"\n  and {len(self._found) - _MOST} more" if len(self._found) > _MOST else ""
        raise InvalidSettings(f"{self.name} has {len(self._found)} mistakes:{text}{more}")


def shortened(text: str) -> str:
    """Elide the middle of a very long text."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-100:]}"
