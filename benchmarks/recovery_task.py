"""What every system of recovery_peers.py trains, and the log that each of its workers writes.

Needs numpy and, for a model, PyTorch. The last arguments of a worker's script are FOLDER STEPS PAUSE: where its log is,
the steps of each worker, and the seconds that each step sleeps. The log outlives the worker: each life adds its lines.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["BATCH", "DECAY", "MOMENTUM", "RATE", "ROUND", "WORKERS", "Worker", "decay", "network"]

SAMPLES, BATCH, WORKERS = 6400, 16, 2
ROUND = 50
"""Steps between two exchanges of a system with local steps."""
RATE, DECAY, MOMENTUM = 0.05, 0.999, 0.9
PIXELS, CLASSES, HIDDEN = 28 * 28, 10, 64


class Worker:
    """The data and the log of one worker."""

    def __init__(self, rank: int) -> None:
        folder, steps, pause = sys.argv[-3:]
        self.rank, self.folder, self.steps, self.pause = rank, Path(folder), int(steps), float(pause)
        random = np.random.default_rng(3)
        self.images = random.normal(size=(SAMPLES, PIXELS)).astype(np.float32)
        self.labels = random.integers(0, CLASSES, SAMPLES)
        self.epoch = SAMPLES // WORKERS // BATCH
        """Steps of an epoch."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._log = os.open(self.folder / f"worker{rank}.jsonl", flags, 0o644)
        self._write(pid=os.getpid())

    def meet(self) -> None:
        """In the first life, wait for the first life of the other workers."""
        (self.folder / f"here{self.rank}").touch()
        while len(list(self.folder.glob("here*"))) < WORKERS:
            time.sleep(0.02)

    def batch(self, step: int) -> tuple[Any, Any, Any]:
        """Indices, images and labels of a step, after the pause. Each epoch shuffles this worker's part anew."""
        time.sleep(self.pause)
        epoch, at = divmod(step, self.epoch)
        order = np.random.default_rng((5, self.rank, epoch)).permutation(SAMPLES // WORKERS) * WORKERS + self.rank
        chosen = order[at * BATCH : (at + 1) * BATCH]
        return chosen, self.images[chosen], self.labels[chosen]

    def done(self, step: int, rate: float, samples: Any) -> None:
        """Log a step, and the learning rate with which it ran."""
        self._write(time=time.time(), step=step, rate=rate, samples=[int(index) for index in samples])

    def keep(self) -> None:
        """Log that the model of all workers has the steps of this life so far."""
        self._write(kept=True)

    def end(self, weights: Sequence[Any]) -> None:
        """Write the final weights."""
        np.save(self.folder / f"weights{self.rank}.npy", np.concatenate([np.ravel(item) for item in weights]))

    def _write(self, **fields: Any) -> None:
        os.write(self._log, (json.dumps(fields) + "\n").encode())


def decay(step: int) -> float:
    """The learning rate of a step, as a part of RATE."""
    return float(DECAY**step)


def network() -> Any:
    """A PyTorch model, the same in each process."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(PIXELS, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES)
    )  # fmt: skip
