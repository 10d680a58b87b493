"""Starter files for users, copied from templates/."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from geomx_cli.core.errors import CheckFailed, UsageError
from geomx_cli.core.option import nearest

__all__ = ["FILES", "FOLDER", "summaries", "templates", "write", "write_template"]

FILES = ("hosts.toml", "train.py")
_SCRIPTS = {"torch": "torch_script.py", "mxnet": "train.py"}
"""The template of train.py for each framework."""
_PACKAGE = Path(__file__).parents[1]
FOLDER = next((path for path in (_PACKAGE / "templates", _PACKAGE.parent / "templates") if path.is_dir()), _PACKAGE)
"""Directory of the templates: inside an installed package, or next to it in a checkout."""


def write(directory: Path) -> list[tuple[Path, bool]]:
    """Copy each of FILES to `directory`, and create the directory if necessary. Return for each file whether it is new.
    The script is for the first framework that is installed here, or for PyTorch if none is.

    Existing files are never overwritten. Raises CheckFailed if writing fails.
    """
    script = next((file for framework, file in _SCRIPTS.items() if find_spec(framework)), _SCRIPTS["torch"])
    sources = zip((FILES[0], script), FILES, strict=True)
    return [(directory / name, _copy(directory, source, name, force=False)) for source, name in sources]


def templates() -> Mapping[str, str]:
    """Return the script templates: user-visible name, e.g. "cnn-sweep", to file name. A script that had the name of a
    module that it imports would shadow the module. So `torch` is torch_script.py.
    """
    names = (item.name for item in FOLDER.iterdir())
    scripts = sorted(name for name in names if name.endswith(".py") and name not in FILES)
    return {name.removesuffix(".py").removesuffix("_script").replace("_", "-"): name for name in scripts}


def summaries() -> Mapping[str, str]:
    """Return a line about each of `templates`."""
    return {name: _first_line(FOLDER / file)[0] for name, file in templates().items()}


def write_template(directory: Path, name: str, *, force: bool) -> tuple[Path, str]:
    """Copy one of `templates` to `directory`, and create the directory if necessary. Return the copy's path, and the
    command that runs it.

    Raises UsageError for an unknown name, and CheckFailed if writing fails, or if the file exists and `force` is
    False.
    """
    known = templates()
    if name not in known:
        raise UsageError(f"there is no template {name!r}", nearest(name, known))
    path = directory / known[name]
    if not _copy(directory, known[name], known[name], force=force):
        raise CheckFailed(f"{path} is there already", "--force writes over it")
    return path, _first_line(path)[1]


def _first_line(path: Path) -> tuple[str, str]:
    """The summary and the command in a template's first line, which has the form "summary: command"."""
    summary, _, command = path.read_text().splitlines()[0].strip('"').partition(": ")
    return summary, command


def _copy(directory: Path, source: str, name: str, *, force: bool) -> bool:
    """Copy a template to a file, and write the file's name into the copy. Return False if the file exists and `force`
    is False.
    """
    content = (FOLDER / source).read_bytes().replace(source.encode(), name.encode())
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
