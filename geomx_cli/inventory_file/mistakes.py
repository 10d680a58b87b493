"""The mistakes that are found in a file that a person writes, reported all at once."""

from dataclasses import dataclass, field
from typing import NoReturn

from geomx_cli.errors import InvalidSettings
from geomx_cli.inventory_file.lines import Lines, Path

__all__ = ["Mistakes"]


@dataclass
class Mistakes:
    """What is wrong in the file called `name`, by line. `keys` are those that something was said about."""

    name: str
    lines: Lines
    keys: set[str] = field(default_factory=set)
    _found: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, path: Path, message: str, hint: str) -> None:
        """At the line of a key or table."""
        if path and isinstance(path[-1], str):
            self.keys.add(path[-1])
        self.add_at(self.lines.of_path(path), message, hint)

    def add_at(self, line: int, message: str, hint: str) -> None:
        """At a line."""
        if (line, message, hint) not in self._found:
            self._found.append((line, message, hint))

    def raise_if_any(self) -> None:
        """Raise InvalidSettings if there is a mistake."""
        if self._found:
            self._raise()

    def _raise(self) -> NoReturn:
        entries = [(f"{self.name}:{line}: {message}", hint) for line, message, hint in sorted(self._found)]
        if len(entries) == 1:
            raise InvalidSettings(*entries[0])
        text = "".join(f"\n  {message}\n    {hint}" for message, hint in entries)
        raise InvalidSettings(f"{self.name} has {len(entries)} mistakes:{text}")
