"""Metadata of a run: its job with options and script, and the traffic between the parties."""

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
STEP = 0.5
MOST = 2000


class Metadata(msgspec.Struct):
    """options: all of the job's, with algorithm, seed and codec. script: its command, empty for the bundled training;
    script_digest: SHA-256 over the script and the files of --sync. traffic: bytes from each party to each other one.
    seconds, wan_bytes: cumulative bytes between parties by seconds after training began, including the first weights.
    starts: each worker's (HOST/DEVICE) start in seconds after the first. evaluation_on_clock: whether the workers'
    times include evaluations. recorded: the algorithm's own metrics of the last round, the maximum over the workers; in
    the file they have their own names, and are not read back. outcome: how the job ended ("done", "done in part",
    "failed", "interrupted"), or its state when the records were made. warnings: why its figures may not be those of its
    mode. evaluator: the worker (HOST/DEVICE) whose accuracies are the job's. None, or an empty text, means unknown.
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
    schema_version: int = 1

    @staticmethod
    def exists(folder: Path) -> bool:
        """Whether the folder is that of a run with metadata."""
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
        """Whether any traffic is recorded; that of scripts that do not report has no times."""
        return bool(self.seconds) or any(self.traffic.values())

    def bytes_by(self, seconds: float) -> int | None:
        """Return the bytes between the parties up to that time; None if not recorded."""
        return round(float(np.interp(seconds, self.seconds, self.wan_bytes))) if self.seconds else None


def wan_bytes(logs: Sequence[ProcessLog]) -> tuple[list[float], list[int]]:
    """Return `seconds` and `wan_bytes` of Metadata, summed over all processes. Assumes synchronized clocks."""
    begun = min((log.state.trains_since for log in logs if log.state.trains_since is not None), default=None)
    curves = [tuple(zip(*sorted(log.sent), strict=True)) for log in logs if log.sent]
    if begun is None or not curves:
        return [], []
    end = max(times[-1] for times, _ in curves)
    seconds = np.linspace(0.0, max(end - begun, STEP), min(MOST, max(2, round((end - begun) / STEP) + 1)))
    total = np.zeros(len(seconds))
    for times, counts in curves:
        total += np.interp(seconds + begun, times, counts)
    return [round(value, 3) for value in seconds.tolist()], [round(count) for count in total.tolist()]


def traffic(parties: Mapping[str, str], logs: Mapping[str, ProcessLog]) -> dict[str, dict[str, int]]:
    """Return `traffic` of Metadata. `parties`: each process's party; both arguments are by process name."""
    total: dict[str, dict[str, int]] = {party: {} for party in dict.fromkeys(parties.values())}
    for process, log in logs.items():
        row = total[parties[process]]
        for peer, (sent, _) in log.state.traffic.peers.items():
            if peer in parties and parties[peer] != parties[process]:
                row[parties[peer]] = row.get(parties[peer], 0) + sent
    return total
