"""How the end of the job reaches a script, and what the worker reports at the script's end."""

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from geomx_cli.core.errors import GeomxError
    from geomx_cli.core.events import Contribution
    from geomx_cli.ps.client import Client

__all__ = ["FailureNotice", "contribution_of"]

# Brings the job's failure to a script that exchanges nothing at this time, for example because it evaluates.

_SOON = 1.0  # seconds for the script to meet the failure by itself; its agent's SIGTERM comes after two
_SIGNAL = signal.SIGRTMAX - 5  # none that scripts, launchers or batch systems use


class FailureNotice:
    """Tells the agent of a failure with `tell`, so that the script has the job's grace to handle it.

    If the script has not met the failure a second later, it is raised in its main thread, by a signal, once that thread
    executes Python; it may then be anywhere in the script. A script that has met it, and may be saving, is left alone.
    For the main thread; elsewhere, and where a script uses the signal, the failure is only told. `ended`: whether the
    script has reported an error already.
    """

    def __init__(
        self, client: "Client", tell: "Callable[[GeomxError], object]", ended: Callable[[], bool]
    ) -> None:
        self._client = client
        self._tell = tell
        self._ended = ended
        self._main = threading.main_thread()
        self._handles = threading.current_thread() is self._main and signal.getsignal(_SIGNAL) == signal.SIG_DFL
        if self._handles:
            signal.signal(_SIGNAL, self._raise)
        client.when_failed(self._on_failure)

    def _on_failure(self, failure: "GeomxError") -> None:
        if self._ended():
            return
        self._tell(failure)
        if self._handles:
            timer = threading.Timer(_SOON, self._notify)
            timer.daemon = True
            timer.start()

    def _notify(self) -> None:
        if not self._met() and self._main.is_alive() and self._main.ident is not None:
            signal.pthread_kill(self._main.ident, _SIGNAL)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._client.failure is not None and not self._met():
            raise self._client.failure

    def _met(self) -> bool:
        return self._ended() or self._client.is_failure_raised


# Whether the worker has contributed.

_ALONE = (
    "this worker has contributed to no round: what it has trained, it has trained alone; push gradients (or, in hfa,"
    " weights)"
)
_IN_PARTY = (
    "this worker has exchanged with its own party only: its script ended before the first exchange between parties,"
    " which in hfa is after K1 x K2 steps"
)


def contribution_of(client: "Client", *, trained: bool) -> "Contribution":
    """Return what a script's worker has contributed at its end, and warn on stderr if it has trained alone, or with its
    party only.

    trained: whether the script has reported training. See ProcessFinished for the values; "" for a master that does
    not train. Call before the client leaves.
    """
    tensors = list(client.tensors.values())
    if not client.trains:
        return ""
    if not tensors and not trained:  # it may have trained, as with a Trainer without the store, or only asked for ranks
        return "keyless"
    begun = [tensor.placement.tensor.name for tensor in tensors if tensor.round]
    if begun and all(client.versions(name)[1] == 0 for name in begun):  # no update at the roots
        print(f"warning: {_IN_PARTY}", file=sys.stderr, flush=True)
        return "party"
    if begun:
        return "rounds"
    pulls = max((tensor.pulls for tensor in tensors), default=0)
    if trained or not pulls:
        print(f"warning: {_ALONE}", file=sys.stderr, flush=True)  # launch warns once, for all workers
        return "alone"
    return "reads" if pulls > 1 else "none"
