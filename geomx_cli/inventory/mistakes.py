"""Collects the errors of a user's file, to report them together."""

from dataclasses import dataclass, field
from typing import NoReturn

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.inventory.lines import Lines, Path

__all__ = ["Mistakes", "shortened"]

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
