"""A run: one job's records, of one network trained under one mode, by worker."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geomx_cli.core import plugins
from geomx_cli.core.conventions import file_name
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.datasets.catalog import is_iid
from geomx_cli.jobs.store.job_state import UNDECIDED
from geomx_cli.jobs.view.progress import evaluator
from geomx_cli.jobs.view.reducer import result_warnings
from geomx_cli.observe.report.metadata import Metadata, traffic, wan_bytes
from geomx_cli.observe.report.modes import NON_IID, title
from geomx_cli.observe.report.process_log import ProcessLog
from geomx_cli.observe.report.record import SUFFIX, RoundRecord, WorkerRecords, read_rounds
from geomx_cli.plan import Plan, Process

__all__ = ["JobRecords", "OnProgress", "RunRecords", "mode_of", "network_of"]

# A job as a run, from its processes' event logs. Workers are identified as HOST/DEVICE. HOST is the host's name in the
# inventory (on one machine, the party's name). DEVICE is `cpu`, `gpu1`, or `cpu0`, `cpu1`, ... if several train on the
# CPU.


def network_of(plan: Plan) -> str:
    """Return the network's name of a job's run, or the script's name."""
    script = next((Path(word).stem for word in plan.spec.script if word.endswith(".py")), "")
    return file_name(script or (plan.spec.script[0] if plan.spec.script else str(plan.spec.options["network"])))


def mode_of(options: Mapping[str, Any]) -> str:
    """Return the algorithm, or a variant of it, with "-niid" if the workers' data are not identically distributed."""
    return plugins.mode(options) + ("" if is_iid(str(options["split"])) else NON_IID)


@dataclass(frozen=True)
class JobRecords:
    """logs: the log of each process of the plan, by name. state: the job's state as known here; "" if unknown."""

    plan: Plan
    logs: Mapping[str, ProcessLog]
    state: str = ""

    @classmethod
    def read(cls, plan: Plan, events: Path, state: str = "") -> "JobRecords":
        """Read the event logs in a folder."""
        logs = {one.name: ProcessLog.read(events / f"{one.file_name}.jsonl", one) for one in plan.processes}
        return cls(plan, logs, state)

    @property
    def places(self) -> dict[str, tuple[str, str]]:
        """Return host and device of each training worker, by name."""
        plain = {process.name: (process.host, _device(process)) for process in self._training()}
        there, taken, found = Counter(plain.values()), Counter[tuple[str, str]](), {}
        for name, (host, device) in plain.items():
            dash = "-" if device[-1].isdigit() else ""  # a second worker on gpu1 must not become gpu11
            number = f"{dash}{taken[host, device]}" if there[host, device] > 1 else ""
            taken[host, device] += 1
            found[name] = (host, device + number)
        return found

    @property
    def metadata(self) -> Metadata:
        """Return the metadata of the records."""
        parties = {process.name: process.party for process in self.plan.processes}
        seconds, counts = wan_bytes(list(self.logs.values()))
        return Metadata(
            job=self.plan.job, topology=self.plan.topology, options=dict(self.plan.spec.options),
            traffic=traffic(parties, self.logs), seconds=seconds, wan_bytes=counts, starts=self._starts(),
            evaluation_on_clock=None if self.plan.spec.script else True,
            recorded=self._recorded(),
            network=network_of(self.plan), mode=mode_of(self.plan.spec.options),
            script=list(self.plan.spec.script), script_digest=self.plan.spec.script_digest,
            outcome=self._outcome(), evaluator=self._evaluator(), warnings=self._warnings(),
            emulated_network=self.plan.network, rounds=self._rounds_of_script(),
            restarts={name: log.state.restarts for name, log in self.logs.items() if log.state.restarts},
            goodput=self._goodput(),
        )  # fmt: skip

    @property
    def problems(self) -> list[str]:
        """A sentence per damaged event of a training worker."""
        return [problem for name in self.places for problem in self.logs[name].problems]

    def _warnings(self) -> list[str]:
        own = (f"job {self.plan.job}: {text}" for text in result_warnings(log.state for log in self.logs.values()))
        return list(filter(None, (self.plan.spec.script_warning, *own)))

    def _evaluator(self) -> str:
        """Return host and device of the worker whose accuracy is the job's accuracy; "" for none."""
        found = evaluator(self.logs[process.name].state for process in self._training())
        return "" if found is None else "/".join(self.places[found.process.name])

    def _outcome(self) -> str:
        """Return how the job ended. If no `geomx launch` or `attach` followed it to its end, derive this from its event
        logs.
        """
        if self.state not in UNDECIDED:
            return self.state
        if any(log.state.failure for log in self.logs.values()):
            return "failed"
        done = all(self.logs[process.name].state.finished is not None for process in self._training())
        return "done" if done else "running" if self.state == "detached" else self.state

    def _recorded(self) -> dict[str, float]:
        largest: dict[str, float] = {}
        for log in self.logs.values():
            for name, value in log.state.recorded.items():
                largest[name] = max(value, largest.get(name, value))
        return largest

    def _rounds_of_script(self) -> int:
        if not self.plan.spec.script:
            return 0
        return max((self.logs[process.name].state.round for process in self._training()), default=0)

    def _starts(self) -> dict[str, float]:
        begun = {"/".join(place): self.logs[name].state.trains_since for name, place in self.places.items()}
        first = min((when for when in begun.values() if when is not None), default=0.0)
        return {worker: round(when - first, 3) for worker, when in begun.items() if when is not None}

    def _goodput(self) -> dict[str, float]:
        shares = {"/".join(place): self.logs[name].goodput.share for name, place in self.places.items()}
        return {worker: round(share, 4) for worker, share in shares.items() if share is not None}

    def _training(self) -> list[Process]:
        found = [process for process in self.plan.processes if process.global_rank is not None]
        return sorted(found, key=lambda process: process.global_rank or 0)


def _device(process: Process) -> str:
    return process.env.get("GEOMX_DEVICE") or "cpu"


MANY = 8
FINISHED = ("", "done", "done in part")
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class RunRecords:
    """One job's records.

    workers: by host and device, sorted.
    metadata: None for ESync's own records.
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
        """Read all records of the run in `folder`, in either layout. Raises InvalidSettings if there are none, or if
        its metadata are damaged.

        on_progress: receives the number of workers that were read, and the total number.
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
        """How the job ended if it did not complete its training, such as "failed", or that it still runs. Otherwise, or
        if that is unknown, "". Reports average only over finished runs.
        """
        outcome = self.metadata.outcome if self.metadata is not None else ""
        return "" if outcome in FINISHED else outcome

    @property
    def warnings(self) -> list[str]:
        """Why its numbers may not represent its mode."""
        return self.metadata.warnings if self.metadata is not None else []

    @property
    def goodputs(self) -> Mapping[str, float]:
        """The goodput of each worker (HOST/DEVICE) for which it is known."""
        return self.metadata.goodput if self.metadata is not None else {}

    @property
    def goodput(self) -> float | None:
        """The mean over the workers; None if unknown."""
        known = self.goodputs.values()
        return sum(known) / len(known) if known else None

    @property
    def evaluator(self) -> WorkerRecords:
        """The worker whose accuracies are the run's: the worker in the metadata, otherwise the worker with most
        accuracies.
        """
        host, _, device = (self.metadata.evaluator if self.metadata is not None else "").partition("/")
        if (named := self.workers.get(host, {}).get(device)) is not None:
            return named
        return max(self.each(), key=lambda worker: len(worker.accuracies))

    def bytes_by(self, seconds: float) -> int | None:
        """Return the bytes that all workers had sent and received in rounds completed at this time; None if not
        recorded.
        """
        if not any(worker.traffic for worker in self.each()):
            return None
        return sum(
            count
            for worker in self.each()
            for count, end in zip(worker.traffic, worker.elapsed, strict=False)
            if end <= seconds
        )

    def wan_bytes_by(self, seconds: float) -> int | None:
        """Return the bytes sent between the parties when the `evaluator` had trained for so long; None if they are not
        recorded.
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
