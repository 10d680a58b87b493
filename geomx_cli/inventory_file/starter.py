"""The files that a person begins with: copies of those in templates/."""

from importlib import resources
from pathlib import Path

from geomx_cli.errors import CheckFailed

__all__ = ["FILES", "write"]

FILES = ("hosts.toml", "train.py")


def write(directory: Path) -> list[tuple[Path, bool]]:
    """Copy each of FILES to `directory`, which is made if need be, and tell which are new.

    A file that is there already is never touched. Raises CheckFailed where nothing can be written.
    """
    found = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            path = directory / name
            content = resources.files("geomx_cli").joinpath("templates", name).read_bytes()
            try:
                with path.open("xb") as file:
                    file.write(content)
                found.append((path, True))
            except FileExistsError:
                found.append((path, False))
    except OSError as error:
        hint = "name another directory, or let it be written to"
        raise CheckFailed(f"cannot write to {directory}: {error.strerror}", hint) from None
    return found
