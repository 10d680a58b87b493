"""The mistakes that are found in a file that a user writes, reported all at once."""

from dataclasses import dataclass, field
from typing import NoReturn

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.inventory.lines import Lines, Path

__all__ = ["Mistakes", "shortened"]

_LONGEST = 1000  # characters of a message or hint: it may quote what the file has
_MOST = 50  # that are told at once


@dataclass
class Mistakes:
    """What is wrong in the file called `name`, by line. `keys` are those that something was said about."""

    name: str
    lines: Lines
    keys: set[str] = field(default_factory=set)
    _found: set[tuple[int, str, str]] = field(default_factory=set)

    def add(self, path: Path, message: str, hint: str) -> None:
        """At the line of a key or table."""
        if path and isinstance(path[-1], str):
            self.keys.add(path[-1])
        self.add_at(self.lines.of_path(path), message, hint)

    def add_at(self, line: int, message: str, hint: str) -> None:
        """At a line."""
        self._found.add((line, shortened(message), shortened(hint)))

    def raise_if_any(self) -> None:
        """Raise InvalidSettings if there is a mistake."""
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
    """`text` with something left out in its middle if it is very long."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-100:]}"
