"""Whether all processes of a job begin again, once those of this host have ended."""

import time

from geomx_cli.agent.control import Control

__all__ = ["Recall"]


class Recall:
    """Whether an agent whose processes have all ended waits for the control machine's decision to start all of them
    again, on all hosts (`--on-worker-loss restart-all`). Not thread-safe.

    wanted: the job's option. silence: seconds without a control machine after which the job ends.
    told: the control machine has been told that nothing runs here.
    """

    def __init__(self, wanted: bool, silence: float) -> None:
        self._may = wanted
        self._silence = silence
        self._expected = False
        self.told = False

    def expect(self) -> None:
        """The job fails here or elsewhere, and the control machine decides."""
        self._expected = self._may

    def forbid(self) -> None:
        """The job ends for good."""
        self._may = self._expected = self.told = False

    def begin(self) -> None:
        """All processes of the job begin again."""
        self._expected = self.told = False

    def tell(self) -> bool:
        """Return True the first time: the control machine has to learn that nothing runs here."""
        told, self.told = self.told, True
        return not told

    def awaited(self, control: Control) -> bool:
        """Whether a decision is still to come."""
        lost = not control.connected and time.monotonic() - control.heard > self._silence
        return self._expected and not lost
