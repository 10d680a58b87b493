"""Finds the folders of runs.

    BASE/NETWORK/MODE/RUN/HOST/DEVICE.jsonl      RUN is the job's id
    BASE/NETWORK/MODE/HOST/DEVICE/iter-N.txt     ESync's layout: one run for each mode

Both have the metadata, job.json, in the run's folder. Records of ESync's own workers have none.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.option import did_you_mean, nearest
from geomx_cli.observe.report.metadata import Metadata
from geomx_cli.observe.report.modes import FOLDERS, MODES, NON_IID, place_of

__all__ = ["one_run", "runs_below", "runs_in"]

_LEVELS = 3


def runs_in(base: Path, network: str) -> list[Path]:
    """Return all runs of a network, in the order of their modes. Raises InvalidSettings if there are none."""
    found = [path for path in _search(base / network, _LEVELS - 1) if path.parent != base]
    if not found:
        raise InvalidSettings(f"there are no records in {base / network}", _what_there_is(base))
    modes = {path: path.relative_to(base / network).parts[0] for path in found}
    return sorted(found, key=lambda path: (place_of(modes[path]), path))


def one_run(base: Path, network: str, mode: str, name: str = "") -> Path:
    """Return the run of a mode: the only one, or the one whose folder's name begins with `name`. Raises InvalidSettings
    if there is none, or more than one.
    """
    folder = base / network / mode
    found = list(_search(folder, 1))
    if not found and mode not in FOLDERS:
        hint = did_you_mean(mode, FOLDERS) or f"choose one of {', '.join(MODES)}, or one with {NON_IID}"
        raise InvalidSettings(f"there is no mode {mode!r}", hint)
    if not found:
        raise InvalidSettings(f"there are no records in {folder}", _what_there_is(base))
    matching = [path for path in found if path.name.startswith(name)]
    if len(matching) > 1:
        names = ", ".join(path.name for path in matching)
        hint = f"geomx compare {folder} shows all of them; or choose one with --run: {names}"
        raise InvalidSettings(f"{folder} has {len(matching)} runs", hint)
    if not matching:
        raise InvalidSettings(f"{folder} has no run {name!r}", nearest(name, [path.name for path in found]))
    return matching[0]


def runs_below(folder: Path) -> list[Path]:
    """Return the runs in a folder: the folder of a run, of a mode, of a network, or of several networks."""
    return list(_search(folder, _LEVELS))


def _search(folder: Path, levels: int) -> Iterator[Path]:
    is_run = _is_run(folder)
    if is_run:
        yield folder
    if levels:
        for inner in _folders(folder):  # a mode's folder may have a run in ESync's layout, and others below it
            yield from _search(inner, 0 if is_run else levels - 1)


def _is_run(folder: Path) -> bool:
    return Metadata.exists(folder) or (
        folder.name in FOLDERS and any(next(device.glob("iter-*.txt"), None) for device in _devices(folder))
    )


def _devices(folder: Path) -> Iterator[Path]:
    for host in _folders(folder):
        yield from _folders(host)


def _folders(folder: Path) -> Sequence[Path]:
    """Return the folders in a folder; none if it is no folder. Raises InvalidSettings if it cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise InvalidSettings(f"cannot read {error.filename}: {error.strerror}", "see who may read it") from None


def _what_there_is(base: Path) -> str:
    """List the runs in a folder, for an error message."""
    if not base.is_dir():
        return f"there is no folder {base}; geomx logs collect --to DIR writes records to DIR"
    found = sorted({"/".join(path.relative_to(base).parts[:2]) for path in _search(base, _LEVELS) if path != base})
    return f"there are those of {', '.join(found)}" if found else f"geomx logs collect --to {base} writes records there"
