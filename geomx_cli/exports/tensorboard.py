"""TensorBoard's event files, by tensorboardX."""

import math
from typing import Any

from geomx_cli.errors import CheckFailed, InvalidSettings
from geomx_cli.events import Event

__all__ = ["Board"]

SCALARS = ("loss", "samples_per_s", "waiting")


class Board:
    """Scalars by round, in one folder: accuracy, and loss, samples_per_s, waiting and wan_MB of each process.

    For one thread. Close it: what was written last is on the disk then.
    """

    def __init__(self, folder: str) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            hint = "pip install 'geomx-cli[tensorboard]'"
            raise InvalidSettings("--tensorboard needs tensorboardX", hint) from None
        try:
            self._writer: Any = SummaryWriter(logdir=folder)
        except OSError as error:
            raise CheckFailed(f"cannot write to {folder}: {error.strerror}", "choose another folder") from None
        self._rounds: dict[str, int] = {}

    def take(self, process: str, event: Event) -> None:
        """Write down what an event says; one that says nothing of this kind is passed over."""
        kind, when = event.get("event"), event.get("time")
        if not isinstance(when, int | float):
            return
        if kind == "evaluation" or (kind == "finished" and event.get("accuracy") is not None):
            self._add("accuracy", event.get("accuracy"), event.get("round", event.get("rounds")), when)
        if kind == "telemetry" and event.get("round") != self._rounds.get(process):
            number = event.get("round")
            for name in SCALARS:
                if name in event:
                    self._add(f"{name}/{process}", event[name], number, when)
            counted = event.get("bytes")
            if isinstance(counted, dict) and sum(counted.get("wan", ())):
                self._add(f"wan_MB/{process}", sum(counted["wan"]) / 1e6, number, when)
            if isinstance(number, int):
                self._rounds[process] = number

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()

    def _add(self, tag: str, value: Any, step: Any, when: float) -> None:
        if isinstance(value, int | float) and isinstance(step, int) and math.isfinite(value):
            self._writer.add_scalar(tag.replace(":", "-"), value, step, walltime=when)
