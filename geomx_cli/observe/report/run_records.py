"""A trial: one network trained under one mode, with its workers' records in BASE/NETWORK/MODE/HOST/DEVICE."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.observe.report.metadata import FILE_NAME, Metadata
from geomx_cli.observe.report.record import WorkerRecords

__all__ = ["MODES", "NON_IID", "RunRecords", "modes_in", "place_of", "title"]

MODES: Mapping[str, str] = {name: title for name, (title, _) in plugins.modes().items()}
"""Titles of the modes in figures and files. The suffix "-niid" marks data split by class."""

NON_IID = "-niid"
FOLDERS = tuple(mode + suffix for mode in MODES for suffix in ("", NON_IID))
"""Folders of trials of the modes known here; other modes are identified by their job.json."""
MANY = 8


@dataclass(frozen=True)
class RunRecords:
    """`workers` by host and device, sorted. `metadata`: None for ESync's own records.

    unread: why records of some hosts are missing.
    """

    folder: Path
    network: str
    mode: str
    workers: Mapping[str, Mapping[str, WorkerRecords]]
    metadata: Metadata | None = None
    unread: tuple[str, ...] = ()

    @classmethod
    def read(
        cls, base: Path, network: str, mode: str, told: Callable[[int, int], None] = lambda *_: None
    ) -> "RunRecords":
        """Read all records; `told` gets the numbers of workers read and in total. Raises InvalidSettings if there are
        none.
        """
        folder = base / network / mode
        places = list(_places(folder))
        if not places and mode not in FOLDERS:
            known = f"choose one of {', '.join(MODES)}, or one with {NON_IID}"
            raise InvalidSettings(f"there is no mode {mode!r}", known)
        if not places:
            raise InvalidSettings(f"there are no records in {folder}", _what_there_is(base))
        workers: dict[str, dict[str, WorkerRecords]] = {}
        with _mapping(len(places)) as mapping:
            for done, (place, worker) in enumerate(zip(places, mapping(WorkerRecords.read, places), strict=True), 1):
                workers.setdefault(place.parent.name, {})[place.name] = worker
                told(done, len(places))
        return cls(folder, network, mode, workers, Metadata.read(folder))

    @property
    def problems(self) -> list[str]:
        """The problems of all workers' records."""
        return [*self.unread, *(problem for worker in self.each() for problem in worker.problems)]

    @property
    def title(self) -> str:
        """The title of its mode."""
        return title(self.mode)

    @property
    def evaluator(self) -> WorkerRecords:
        """The worker that evaluates."""
        return max(self.each(), key=lambda worker: len(worker.accuracies))

    def bytes_by(self, seconds: float) -> int:
        """Return what all workers had sent and received in rounds completed by then."""
        return sum(
            count
            for worker in self.each()
            for count, end in zip(worker.traffic, worker.elapsed, strict=True)
            if end <= seconds
        )

    def each(self) -> Iterator[WorkerRecords]:
        """All workers."""
        for devices in self.workers.values():
            yield from devices.values()


def _places(folder: Path) -> Iterator[Path]:
    """Yield the workers' folders."""
    try:
        for host in sorted(path for path in folder.iterdir() if path.is_dir()):
            yield from sorted(path for path in host.iterdir() if path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise InvalidSettings(f"cannot read {error.filename}: {error.strerror}", "see who may read it") from None


@contextmanager
def _mapping(count: int) -> Iterator[Callable[..., Iterable[WorkerRecords]]]:
    """Yield a `map`, over several processes if there is enough work."""
    if count < MANY:
        yield map
        return
    with ProcessPoolExecutor() as pool:
        yield pool.map


def modes_in(base: Path, network: str) -> list[str]:
    """Return the modes with trials of a network, from the folders. Raises InvalidSettings if there are none."""
    found = sorted((path.name for path in (base / network).glob("*") if _is_trial(path)), key=place_of)
    if not found:
        raise InvalidSettings(f"there are no records in {base / network}", _what_there_is(base))
    return found


def place_of(mode: str) -> tuple[int, str]:
    """Sort key for modes: in the order of MODES, unknown ones last."""
    return FOLDERS.index(mode) if mode in FOLDERS else len(FOLDERS), mode


def _is_trial(folder: Path) -> bool:
    return folder.is_dir() and (folder.name in FOLDERS or (folder / FILE_NAME).exists())


def _what_there_is(base: Path) -> str:
    """List the trials in a folder, for an error message."""
    if not base.is_dir():
        return f"there is no folder {base}; geomx logs collect --to DIR writes records to DIR"
    found = sorted(f"{path.parent.name}/{path.name}" for path in base.glob("*/*") if _is_trial(path))
    return f"there are those of {', '.join(found)}" if found else f"geomx logs collect --to {base} writes records there"


def title(mode: str) -> str:
    """Return a mode's title, as in "ESync", or "ESync-Non-IID"; an unknown mode's title is its name."""
    plain = mode.removesuffix(NON_IID)
    return MODES.get(plain, plain) + ("-Non-IID" if mode.endswith(NON_IID) else "")
