"""How long servers and schedulers may take to end once the training is done."""

from geomx_cli.jobs.view.progress import Progress

__all__ = ["LINGER", "SAVING", "Linger"]

LINGER = 10.0  # seconds beyond --silence, to end after the last worker, or after a root has saved its optimizer
SAVING = 1800.0  # seconds for that; a state of many GB on a slow disk


class Linger:
    """Tells when the processes that are left have had their time. Times are monotonic seconds.

    silence: how long they wait for one another by the job's own rules, as a link may be cut or a process stopped.
    """

    def __init__(self, silence: float) -> None:
        self._limit = silence + LINGER
        self._trained: float | None = None
        self._since = 0.0

    def is_over(self, progress: Progress, now: float, awake: float) -> bool:
        """Whether all workers have ended for too long. `awake`: seconds for which this machine has not slept."""
        if not all(row.status == 0 or row.asked for row in progress.training_rows):
            return False
        if self._trained is None:
            self._trained = self._since = now
        saves = any(row.status is None and row.state == "saving" for row in progress.rows.values())
        if saves and now - self._trained < SAVING:
            self._since = now
        return min(now - self._since, awake) > self._limit
