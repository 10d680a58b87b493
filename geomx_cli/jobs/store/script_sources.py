"""The user's script and what it imports from its own folder, as text and parsed; nothing is executed."""

import ast
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from geomx_cli.inventory import Inventory
from geomx_cli.jobs.store.script import python_file

__all__ = ["Source", "sources_of"]

_MOST_FILES, _MOST_BYTES = 200, 1 << 20


@dataclass(frozen=True)
class Source:
    """One file. name: for messages. text: at most 1 MiB of it, "" if it cannot be read."""

    path: Path
    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module | None:
        """The parsed file; None if it is of another Python version, or not Python."""
        try:
            return ast.parse(self.text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def sources_of(script: Sequence[str], inventory: Inventory) -> list[Source] | str:
    """Return the script and at most 199 of the files that it imports, the script first; or as a clause why it cannot be
    read here.
    """
    word, module = _python_code(script)
    base = _folder(word, inventory)
    if base is None or not (base / word).is_file():
        return f"{word} cannot be read here" if word else f"{script[0]} is no Python file"
    path = base / word
    return list(_read(path, base if module else path.parent))


def _python_code(script: Sequence[str]) -> tuple[str, bool]:
    """Return the Python file that a command runs ("" if unknown), and whether it is given as a module (-m)."""
    if script[1:2] == ("-m",) and len(script) > 2 and script[0].rpartition("/")[2].startswith("python"):
        return script[2].replace(".", "/") + ".py", True
    return python_file(script) or next((word for word in script if word.endswith(".py")), ""), False


def _folder(word: str, inventory: Inventory) -> Path | None:
    """The job's working directory here, or on a host that copies its files from here; None if neither exists."""
    if not word:
        return None
    for host in inventory.hosts:
        if host.shares_files or not host.workdir:
            return Path(host.workdir or Path.cwd())
    return Path("/") if Path(word).is_absolute() else None


def _read(script: Path, folder: Path) -> Iterator[Source]:
    waiting, seen = [script], {script}
    while waiting:
        path = waiting.pop(0)
        source = Source(path, str(path.relative_to(folder)), _text(path))
        yield source
        for other in _imported(source.tree, path, folder) if source.tree is not None else ():
            if other not in seen and len(seen) < _MOST_FILES:
                seen.add(other)
                waiting.append(other)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _imported(tree: ast.AST, path: Path, folder: Path) -> Iterator[Path]:
    """Yield the files in `folder` that the module at `path` imports, as far as static analysis tells."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                yield from _files(folder, item.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else folder
            parts = node.module.split(".") if node.module else []
            if base == folder or folder in base.parents:
                yield from _files(base, parts)
                for item in node.names:  # an imported name may be a module
                    yield from _files(base, [*parts, item.name])


def _files(base: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yield the files executed by importing `parts`: the module and each package's __init__.py."""
    place = base
    for part in parts:
        place = place / part
        for path in (place.with_name(f"{part}.py"), place / "__init__.py"):
            if os.path.isfile(path):  # noqa: PTH113
                yield path
        if not os.path.isdir(place):  # noqa: PTH112  # a name may be longer than Path allows
            return
