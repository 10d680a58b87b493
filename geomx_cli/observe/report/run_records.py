"""A run: one job's records, of one network trained under one mode, by worker."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.observe.report.metadata import Metadata
from geomx_cli.observe.report.modes import title
from geomx_cli.observe.report.record import SUFFIX, RoundRecord, WorkerRecords, read_rounds

__all__ = ["OnProgress", "RunRecords"]

MANY = 8
FINISHED = ("", "done", "done in part")
OnProgress = Callable[[int, int], None]


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
    def read(cls, folder: Path, on_progress: OnProgress = lambda *_: None) -> "RunRecords":
        """Read all records of the run in `folder`, in either layout; `on_progress` gets the numbers of workers read
        and in total. Raises InvalidSettings if there are none, or its metadata are damaged.
        """
        metadata = Metadata.read(folder)
        places = list(_places(folder))
        if not places:
            raise InvalidSettings(f"there are no records in {folder}", "collect the job again")
        workers: dict[str, dict[str, WorkerRecords]] = {}
        with _mapping(len(places)) as mapping:
            for done, (place, worker) in enumerate(zip(places, mapping(WorkerRecords.read, places), strict=True), 1):
                workers.setdefault(place.parent.name, {})[place.name.removesuffix(SUFFIX)] = worker
                on_progress(done, len(places))
        network = metadata.network if metadata is not None else ""
        mode = metadata.mode if metadata is not None else ""
        return cls(folder, network or folder.parent.name, mode or folder.name, workers, metadata)

    @property
    def problems(self) -> list[str]:
        """The problems of all workers' records."""
        return [*self.unread, *(problem for worker in self.each() for problem in worker.problems)]

    @property
    def title(self) -> str:
        """The title of its mode."""
        return title(self.mode)

    @property
    def name(self) -> str:
        """The job's id, or the folder of records without metadata."""
        return self.metadata.job if self.metadata is not None else str(self.folder)

    @property
    def unfinished(self) -> str:
        """How the job ended if not by completing its training, as "failed", or that it runs; else, or if that is
        unknown, "". Reports average only over finished runs.
        """
        outcome = self.metadata.outcome if self.metadata is not None else ""
        return "" if outcome in FINISHED else outcome

    @property
    def warnings(self) -> list[str]:
        """Why its figures may not be those of its mode."""
        return self.metadata.warnings if self.metadata is not None else []

    @property
    def evaluator(self) -> WorkerRecords:
        """The worker whose accuracies are the run's: that of the metadata, else the one with most."""
        host, _, device = (self.metadata.evaluator if self.metadata is not None else "").partition("/")
        if (named := self.workers.get(host, {}).get(device)) is not None:
            return named
        return max(self.each(), key=lambda worker: len(worker.accuracies))

    def bytes_by(self, seconds: float) -> int | None:
        """Return what all workers had sent and received in rounds completed by then; None if not recorded."""
        if not any(worker.traffic for worker in self.each()):
            return None
        return sum(
            count
            for worker in self.each()
            for count, end in zip(worker.traffic, worker.elapsed, strict=False)
            if end <= seconds
        )

    def wan_bytes_by(self, seconds: float) -> int | None:
        """Return what had been sent between the parties when the `evaluator` had trained for so long; None if that is
        not recorded.
        """
        if self.metadata is None:
            return None
        return self.metadata.bytes_by(self.metadata.starts.get(self.metadata.evaluator, 0.0) + seconds)

    def each(self) -> Iterator[WorkerRecords]:
        """All workers."""
        for devices in self.workers.values():
            yield from devices.values()

    def rounds(self, name: str, first: int, last: int) -> Iterator[RoundRecord]:
        """Yield the readable rounds `first` to `last` of the worker HOST/DEVICE."""
        files = self.folder / f"{name}{SUFFIX}"
        return read_rounds(files if files.exists() else self.folder / name, first, last)


def _places(folder: Path) -> Iterator[Path]:
    """Yield the workers' files, or in ESync's layout their folders. Folders of runs in it are skipped."""
    try:
        for host in sorted(path for path in folder.iterdir() if path.is_dir() and not Metadata.exists(path)):
            yield from sorted(path for path in host.iterdir() if path.is_dir() or path.suffix == SUFFIX)
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
