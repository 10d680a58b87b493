"""The files that users begin with: copies of those in templates/."""

from collections.abc import Mapping
from pathlib import Path

from geomx_cli.core.errors import CheckFailed, UsageError

__all__ = ["FILES", "FOLDER", "templates", "write", "write_template"]

FILES = ("hosts.toml", "train.py")
_PACKAGE = Path(__file__).parents[1]
FOLDER = next((path for path in (_PACKAGE / "templates", _PACKAGE.parent / "templates") if path.is_dir()), _PACKAGE)
"""Where they lie: inside an installed package, or beside that of a checkout."""


def write(directory: Path) -> list[tuple[Path, bool]]:
    """Copy each of FILES to `directory`, which is made if need be, and tell which are new.

    A file that is there already is never touched. Raises CheckFailed where nothing can be written.
    """
    return [(directory / name, _copy(directory, name, force=False)) for name in FILES]


def templates() -> Mapping[str, str]:
    """The scripts to begin with: what a user calls each, as in "cnn-hfa", and its file."""
    names = (item.name for item in FOLDER.iterdir())
    scripts = sorted(name for name in names if name.endswith(".py") and name not in FILES)
    return {name.removesuffix(".py").replace("_", "-"): name for name in scripts}


def write_template(directory: Path, name: str, *, force: bool) -> tuple[Path, str]:
    """Copy one of `templates` to `directory`, which is made if need be; the file, and the command that runs it there.

    Raises UsageError for an unknown name, and CheckFailed where nothing can be written, or the file is there already
    and there is no `force`.
    """
    known = templates()
    if name not in known:
        raise UsageError(f"there is no template {name!r}", f"choose one of {', '.join(known)}")
    path = directory / known[name]
    if not _copy(directory, known[name], force=force):
        raise CheckFailed(f"{path} is there already", "--force writes over it")
    # The first line of each says what it does, and how it is run.
    return path, path.read_text().splitlines()[0].partition(": ")[2]


def _copy(directory: Path, name: str, *, force: bool) -> bool:
    """Whether the file has been written: not where it is there already, unless with `force`."""
    content = (FOLDER / name).read_bytes()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / name).open("wb" if force else "xb") as file:
            file.write(content)
    except FileExistsError:
        if directory.is_dir():
            return False
        raise CheckFailed(f"{directory} is no directory", "name another one") from None
    except OSError as error:
        hint = "name another directory, or let it be written to"
        raise CheckFailed(f"cannot write to {directory}: {error.strerror}", hint) from None
    return True
