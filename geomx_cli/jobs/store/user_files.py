"""Files copied to hosts behind SSH: the user's script, and the paths of --sync."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.core.units import format_bytes
from geomx_cli.hosts import File

__all__ = ["UserFiles", "pack"]

_LIMIT = 512 << 20
_LEFT = frozenset({".git", ".hg", ".svn", ".venv", "__pycache__", "node_modules"})


@dataclass(frozen=True)
class UserFiles:
    """Files by path relative to their folder on the host, and the script's command rewritten to these paths."""

    files: Mapping[str, File] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """SHA-256 over all paths and contents; "" without files."""
        digest = hashlib.sha256()
        for path, file in self.files.items():
            digest.update(f"{path}\0{len(file.data)}\0".encode())
            digest.update(file.data)
        return digest.hexdigest() if self.files else ""

    def on(self, folder: str) -> dict[str, File]:
        """Return the files by path on a host whose folder for them is `folder`."""
        return {f"{folder}/{path}": file for path, file in self.files.items()}


def pack(script: Sequence[str], paths: Sequence[Path]) -> UserFiles:
    """Pack the script, which is the first word of its command that is a local file, or of a module (python -m) here its
    top-level package, and `paths`: files, and folders with their contents except version control data and Python
    caches.

    Links are followed. Paths below the current folder keep their relative position, so that a script finds them; others
    go to the top level under their own name. Raises InvalidSettings for a missing path, two paths with the same target,
    or a cycle of links; CheckFailed for unreadable files, or more than 512 MiB in total.
    """
    places: dict[str, Path] = {}
    words: dict[str, str] = {}
    named = next((word for word in script if _is_file(word)), None)
    if named is not None:
        words[named] = _place(Path(named))
        places[words[named]] = Path(named).resolve()
    for path in (*_module(script), *paths):
        for place, source in _each(path):
            if places.setdefault(place, source) != source:
                hint = "rename one of them, or start from a folder that has both below it"
                raise InvalidSettings(f"{places[place]} and {source} would both become {place}", hint)
    size = sum(source.stat().st_size for source in places.values())
    if size > _LIMIT:
        raise CheckFailed(
            f"the files to take along have {format_bytes(size)}, more than {format_bytes(_LIMIT)}",
            "put large data on the hosts beforehand, and name fewer paths with --sync",
        )
    return UserFiles({place: _read(source) for place, source in sorted(places.items())}, words)


def _module(script: Sequence[str]) -> list[Path]:
    """Return the file or the folder in the current one from which `python -m` takes the command's module."""
    place = next((at for at, word in enumerate(script[:-1]) if word == "-m"), 0)
    before = all(word.startswith("-") for word in script[1:place])
    if not place or not before or not Path(script[0]).name.startswith("python"):
        return []
    top = script[place + 1].partition(".")[0]
    return [path for path in (Path(top), Path(f"{top}.py")) if path.exists()][:1]


def _is_file(word: str) -> bool:
    """Return whether a word of the command is a user's file, not a system program."""
    try:
        return Path(word).is_file() and not Path(word).resolve().is_relative_to("/usr") and not _is_program(word)
    except OSError:
        return False


def _is_program(word: str) -> bool:
    """Return whether `word` is an interpreter path, such as .venv/bin/python, which differs between hosts."""
    return Path(word).name.startswith("python") and os.access(word, os.X_OK) and Path(word).suffix != ".py"


def _each(path: Path) -> Iterator[tuple[str, Path]]:
    if not path.exists():
        raise InvalidSettings(f"--sync {path}: there is no such file or folder", "correct the path")
    if path.is_file():
        yield _place(path), path.resolve()
        return
    for source in _below(path, ()):
        yield str(Path(_place(path), source.relative_to(path))), source.resolve()


def _below(folder: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    """Yield all files below; `above`: the resolved ancestor folders, to detect cycles."""
    real = folder.resolve()
    if real in above:
        raise InvalidSettings(f"--sync: {folder} is a link to a folder that it lies in", "remove it, or name less")
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise CheckFailed(f"cannot read {folder}: {error.strerror}", "make it readable, or name less") from None
    for entry in entries:
        if entry.is_file():
            yield entry
        elif entry.is_dir() and entry.name not in _LEFT:
            yield from _below(entry, (*above, real))


def _place(path: Path) -> str:
    here = Path.cwd()
    absolute = Path(os.path.normpath(here / path))  # do not resolve links: a link keeps its name
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else absolute.name


def _read(source: Path) -> File:
    try:
        return File(source.read_bytes(), 0o700 if os.access(source, os.X_OK) else 0o600)
    except OSError as error:
        raise CheckFailed(f"cannot read {source}: {error.strerror}", "make it readable, or leave it out") from None
