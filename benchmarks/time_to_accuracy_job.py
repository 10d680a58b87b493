"""One training job of time_to_accuracy.py: its processes at their sites, its files, and their evaluation."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pushpull_job import Command, letters, mxnet_cluster, planned
from wan import Wan

from geomx_cli.core import plugins
from geomx_cli.core.conventions import file_name
from geomx_cli.core.errors import TrainingFailed
from geomx_cli.core.events import Event, RoundCompleted, parse
from geomx_cli.core.jsonlines import read_objects
from geomx_cli.core.options import Value, defaults
from geomx_cli.runtime.bundled.checkpoint import Checkpoint

__all__ = ["Job", "Judge", "Mark"]

WORKER = Path(__file__).with_name("time_to_accuracy_mxnet.py")
MXNET = "mxnet"
SAMPLING = 0.5
PIECE = 500


@dataclass(frozen=True)
class Mark:
    """The progress of a job at a checkpoint: seconds of training; `wan_bytes`, both directions on all parties' links.
    """

    seconds: float
    steps: int
    rounds: int
    wan_bytes: float
    accuracy: float


class Job:
    """Runs with `options` of geomx launch; `algo` may also be "mxnet", its own dist_sync, with a server at each of
    `servers` and tensors of at least `bound` elements cut in as many parts. Without `wan` over loopback.
    With a script, that is what workers run.

    `run` blocks; afterwards `ended` says whether the job finished, and `workers` has the plan's names of the training
    workers, by global rank. Files are written to `directory`.
    """

    def __init__(
        self, options: Mapping[str, Value], directory: Path, wan: Wan | None, servers: Sequence[str] = "C",
        bound: int = 1_000_000, script: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        forced_options = {} if options["algo"] == MXNET else plugins.algorithms()[str(options["algo"])].forced_options
        self.options = {**options, **forced_options}
        self._servers = servers
        self._bound = bound
        self._script = script
        self._directory = directory
        self._wan = wan
        self._traffic: list[tuple[float, float]] = []
        self.ended = False
        self.workers: list[str] = []

    def run(self, limit: float) -> None:
        """Train to the end, or for `limit` seconds. Raises TrainingFailed if a process fails."""
        with contextlib.ExitStack() as stack:
            processes = [self._start(command, stack) for command in self._commands()]
            workers = [popen for role, popen in processes if role == "worker"]
            end = time.monotonic() + limit
            while time.monotonic() < end and not self.ended:
                self._sample()
                self._fail_if_any(popen for _, popen in processes)
                time.sleep(SAMPLING)
                self.ended = all(popen.poll() is not None for popen in workers)
            self._fail_if_any(workers)

    def checkpoints(self) -> list[Path]:
        """The files of weights, oldest first."""
        found = self._directory.rglob("step-*.npz")
        return sorted(found, key=lambda path: int(path.stem.removeprefix("step-")))

    def events(self, process: str) -> list[Event]:
        """The events of one of `workers`."""
        path = self._directory / "events" / f"{file_name(process)}.jsonl"
        events = (parse(fields) for fields, _ in read_objects(path))
        return [event for event in events if event is not None]

    def rounds(self, process: str) -> list[RoundCompleted]:
        """The rounds of one of `workers`."""
        return [event for event in self.events(process) if isinstance(event, RoundCompleted)]

    def bytes_between(self, begin: float, end: float) -> float | None:
        """Bytes over the parties' links in this time, in Unix seconds; None over loopback."""
        if not self._traffic:
            return None
        times, counts = zip(*self._traffic, strict=True)
        return float(np.interp(end, times, counts) - np.interp(begin, times, counts))

    def mark(self, path: Path, checkpoint: Checkpoint, accuracy: float) -> Mark:
        """The job's progress at a checkpoint. HFA's rounds are counted where they cross the WAN."""
        rounds = checkpoint.rounds // (int(self.options["k2"]) if self.options["algo"] == "hfa" else 1)
        now = path.stat().st_mtime
        sent = self.bytes_between(now - checkpoint.seconds, now) or 0.0
        return Mark(checkpoint.seconds, checkpoint.steps, rounds, sent, accuracy)

    def _commands(self) -> list[Command]:
        if self.options["algo"] != MXNET:
            laid = planned(self.options, self._directory, self._wan, self._script)
            ranks = {item.name: item.global_rank for item, *_ in laid if item.global_rank is not None}
            self.workers = sorted(ranks, key=ranks.__getitem__)
            return [(item.role if item.global_rank is not None else "", site, argv, env)
                    for item, site, argv, env in laid]  # fmt: skip
        values = defaults(plugins.table()) | self.options
        work = [sys.executable, str(WORKER), str(self._directory), json.dumps(values)]
        return mxnet_cluster(
            work, int(values["parties"]), int(values["workers"]), self._wan, servers=self._servers, bound=self._bound
        )

    def _start(self, command: Command, stack: contextlib.ExitStack) -> tuple[str, subprocess.Popen[bytes]]:
        role, site, argv, env = command
        clean = {name: text for name, text in os.environ.items() if not name.startswith(("DMLC_", "GEOMX_"))}
        with (self._directory / "output").open("ab") as out:
            popen = subprocess.Popen(
                self._wan.command(site, argv) if self._wan is not None else argv, env={**clean, **env},
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=self._directory,
            )  # fmt: skip
        stack.callback(_end, popen)
        return role, popen

    def _sample(self) -> None:
        if self._wan is not None:
            links = self._wan.bytes()
            parties = letters(len(links) - 1)
            total = sum(links[site][way] for site in parties for way in ("sent", "received"))
            self._traffic.append((time.time(), float(total)))

    def _fail_if_any(self, processes: Any) -> None:
        if any(popen.poll() for popen in processes):
            tail = (self._directory / "output").read_text(errors="replace")[-3000:]
            raise TrainingFailed(f"a job with {self.options} failed:\n{tail}")


def _end(popen: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(popen.pid, 9)
    popen.wait()


class Judge:
    """Evaluates checkpoints on the test set, after the job."""

    def __init__(self, network: str = "cnn") -> None:
        from geomx_cli.runtime.bundled import networks
        from geomx_cli.runtime.data import reader

        self._test = reader.load("fashion-mnist", "test")
        self._model = networks.find(network).build()

    def marks(self, job: Job, targets: Sequence[float]) -> list[Mark | None]:
        """The first checkpoint that reaches each of the target accuracies, None if none does, and the last one, None if
        there is none.
        """
        found: list[Mark | None] = [None] * len(targets)
        last: Mark | None = None
        paths = job.checkpoints()
        for path in paths:
            if None in found or path is paths[-1]:
                last = mark = self._mark(job, path)
                found = [old or (mark if mark.accuracy >= target else None)
                         for old, target in zip(found, targets, strict=True)]  # fmt: skip
        return [*found, last]

    def every_mark(self, job: Job) -> list[Mark]:
        """All checkpoints."""
        return [self._mark(job, path) for path in job.checkpoints()]

    def _mark(self, job: Job, path: Path) -> Mark:
        checkpoint = Checkpoint.read(path)
        for index, name in enumerate(self._model.names):
            self._model.write_weight(index, checkpoint.weights[name].reshape(-1))
        pieces = range(0, len(self._test), PIECE)
        correct = sum(self._model.count_correct(self._test.take(slice(at, at + PIECE))) for at in pieces)
        return job.mark(path, checkpoint, correct / len(self._test))
