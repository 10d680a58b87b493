"""Line numbers of tables and keys in a TOML text, which tomllib does not provide."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Lines", "Path"]

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
