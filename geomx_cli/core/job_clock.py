"""The clock by which all processes and agents of a job time their events. Standard library only."""

import time

__all__ = ["JobClock"]


class JobClock:
    """Unix seconds by the clock of the machine that launched the job, so that times of different hosts can be compared.

    ahead: seconds that this host's clock was ahead of that one when the job was launched. Once this is created,
    stepping the host's clock has no effect on it. Thread-safe.
    """

    def __init__(self, ahead: float = 0.0) -> None:
        self._offset = time.time() - ahead - _since_boot()

    def time(self) -> float:
        """The time now."""
        return self._offset + _since_boot()


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # goes on while a laptop sleeps, unlike time.monotonic
