"""What a worker's store reports about the worker and the job, for every framework."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.nearest import did_you_mean
from geomx_cli.core.options import Value

if TYPE_CHECKING:
    from geomx_cli.core.errors import GeomxError
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.cluster.config import NodeSettings
    from geomx_cli.runtime.algorithms._esync_client import EsyncClient

__all__ = ["BaseStore", "FailureNotice", "option_of"]

# Brings the job's failure to a script that does not exchange anything at the time, as while it evaluates.

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


class BaseStore:
    """Base class of `Store` and of the stores that front ends give to scripts."""

    def __init__(self, client: "Client", kind: str) -> None:
        self._client = client
        self._kind = kind

    @property
    def type(self) -> str:
        """The name that the store was created with, as in "dist_sync"."""
        return self._kind

    @property
    def rank(self) -> int:
        """This worker's rank: in its party, or with rank scope global among the job's training workers."""
        return self._client.global_rank if self._client.ranks_are_global else self._client.rank

    @property
    def num_workers(self) -> int:
        """Number of workers of this worker's party, or with rank scope global of training workers of the job."""
        return self._client.num_all_workers if self._client.ranks_are_global else self._client.num_workers

    @property
    def num_all_workers(self) -> int:
        """Number of training workers of the job."""
        return self._client.num_all_workers

    @property
    def is_master_worker(self) -> bool:
        """Whether this worker configures the global servers and provides the initial values."""
        return self._client.is_master

    @property
    def trains(self) -> bool:
        """Whether this worker contributes; False for a master that only sets the job up."""
        return self._client.trains

    @property
    def party(self) -> str:
        """The name of this worker's party; "" if started by hand without one."""
        return self._client.party

    @property
    def party_ranks(self) -> range | None:
        """The global ranks of this worker's party; None in a flat cluster."""
        first = self._client.global_rank - self._client.rank
        return None if self._client.flat else range(first, first + self._client.num_workers)

    @property
    def global_rank(self) -> int:
        """This worker's rank among the training workers of the job; -1 for a master worker that does not train."""
        return self._client.global_rank

    def option(self, name: str) -> Value:
        """Return the job's value of an option of `geomx launch`, as in option("k1"). Raises InvalidSettings for an
        unknown option.
        """
        return option_of(self._client.settings, name)

    def esync_client(self) -> "EsyncClient":
        """Client of ESync's state server for this worker. Raises InvalidSettings in a job with another algorithm."""
        from geomx_cli.runtime.algorithms._esync_client import EsyncClient

        algorithm = plugins.algorithms()[self._client.settings.text("algo")]
        if not algorithm.own_pace:
            possible = " or ".join(name for name, each in plugins.algorithms().items() if each.own_pace)
            what = f"there is no state server in a job of {algorithm.name}"
            raise InvalidSettings(what, f"launch it with --algo {possible}")
        return EsyncClient(self._client)


def option_of(settings: "NodeSettings", name: str) -> Value:
    """See `BaseStore.option`."""
    if (value := settings.options.get(name)) is None:
        close = did_you_mean(name, settings.options) or "geomx launch --help names them, with - for _"
        raise InvalidSettings(f"there is no option {name!r}", close)
    return value
