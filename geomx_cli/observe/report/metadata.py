"""Metadata of a run: its job with options and script, and the traffic between the parties."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.observe.report.process_log import ProcessLog

__all__ = ["FILE_NAME", "Metadata"]

FILE_NAME = "job.json"
"""The metadata file, next to the folders of the run's hosts."""
MOST = 8192


class Metadata(msgspec.Struct):
    """The metadata of a run. None, or an empty text, means unknown.

    options: all options of the job, with algorithm, seed and codec.
    script: its command, empty for the bundled training.
    script_digest: SHA-256 over the script and the files of --sync.
    traffic: bytes from each party to each other party.
    seconds, wan_bytes: bytes sent between parties so far, including the first weights. There is a value at 0, and at
        each second after training began at which the bytes had grown.
    starts: the start of each worker (HOST/DEVICE), in seconds after the first worker's.
    evaluation_on_clock: whether the workers' times include evaluations.
    recorded: the algorithm's own metrics of the last round, the maximum over the workers. In the file they have their
        own names. They are not read back.
    outcome: how the job ended ("done", "done in part", "failed", "interrupted"), or its state when the records were
        made.
    warnings: why its figures may not represent its mode.
    evaluator: the worker (HOST/DEVICE) whose accuracies are the job's.
    emulated_network: Plan.network.
    rounds: the number of a script's reports, which are its records; otherwise 0.
    restarts: for each process that was started again, how often.
    goodput: of each worker (HOST/DEVICE), see Goodput.
    """

    job: str
    topology: str
    options: dict[str, Any]
    traffic: dict[str, dict[str, int]] = {}
    seconds: list[float] = []
    wan_bytes: list[int] = []
    starts: dict[str, float] = {}
    evaluation_on_clock: bool | None = None
    recorded: dict[str, float] = {}
    network: str = ""
    mode: str = ""
    script: list[str] = []
    script_digest: str = ""
    outcome: str = ""
    warnings: list[str] = []
    evaluator: str = ""
    emulated_network: str = ""
    rounds: int = 0
    restarts: dict[str, int] = {}
    goodput: dict[str, float] = {}
    schema_version: int = 1

    @staticmethod
    def exists(folder: Path) -> bool:
        """Whether the folder is the folder of a run with metadata."""
        return (folder / FILE_NAME).is_file()

    @classmethod
    def read(cls, folder: Path) -> "Metadata | None":
        """Read a run's metadata; None if missing. Raises InvalidSettings if damaged."""
        path = folder / FILE_NAME
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            hint = "remove it, or collect the job again"
            raise InvalidSettings(f"{path} is damaged: {error}", hint) from None

    def write(self, folder: Path) -> None:
        """Write the file. Raises OSError."""
        fields = msgspec.to_builtins(self)
        (folder / FILE_NAME).write_bytes(msgspec.json.encode({**fields.pop("recorded"), **fields}))

    @property
    def total(self) -> int | None:
        """Return the total bytes between the parties; None if not recorded."""
        return sum(sum(row.values()) for row in self.traffic.values()) if self.has_traffic else None

    @property
    def has_traffic(self) -> bool:
        """Whether any traffic is recorded. The traffic of scripts that do not report has no times."""
        return bool(self.seconds) or any(self.traffic.values())

    def bytes_by(self, seconds: float) -> int | None:
        """Return the bytes between the parties up to that time; None if not recorded."""
        if not self.seconds:
            return None
        before = bisect_right(self.seconds, seconds)
        return self.wan_bytes[before - 1] if before else 0


def wan_bytes(logs: Sequence[ProcessLog]) -> tuple[list[float], list[int]]:
    """Return `seconds` and `wan_bytes` for Metadata, summed over all processes."""
    begun = min((log.state.trains_since for log in logs if log.state.trains_since is not None), default=None)
    if begun is None or not any(log.counts_sent for log in logs):
        return [], []
    growth = [(0.0, 0)]
    for log in logs:
        before = 0
        for when, count in log.sent:
            growth.append((max(0.0, when - begun), count - before))
            before = count
    times, amounts = zip(*sorted(growth), strict=True)
    counts = np.cumsum(amounts, dtype=np.int64)
    ends = np.flatnonzero(np.append(np.diff(times) > 0, True))  # the counts at the end of each moment
    if len(ends) > MOST:
        ends = ends[np.unique(np.linspace(0, len(ends) - 1, MOST).round().astype(np.int64))]
    return [round(times[end], 3) for end in ends], counts[ends].tolist()


def traffic(parties: Mapping[str, str], logs: Mapping[str, ProcessLog]) -> dict[str, dict[str, int]]:
    """Return `traffic` for Metadata. `parties`: each process's party. Both arguments are by process name."""
    total: dict[str, dict[str, int]] = {party: {} for party in dict.fromkeys(parties.values())}
    for process, log in logs.items():
        row = total[parties[process]]
        for peer, (sent, _) in log.state.traffic.peers.items():
            if peer in parties and parties[peer] != parties[process]:
                row[parties[peer]] = row.get(parties[peer], 0) + sent
    return total
