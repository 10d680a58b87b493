"""A user's script as a worker: connecting to the cluster, leaving it, and reporting failures.

`geomx launch` runs the script directly, with the import hook; `python -m geomx_cli.runtime SCRIPT` runs it through
`run`. In both cases a successful script waits for its last rounds and leaves the cluster; one that raises, or exits
with a nonzero status, is reported to all processes at once.
"""

import atexit
import functools
import os
import runpy
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from geomx_cli.core.errors import GeomxError, Interrupted, InvalidSettings, PeerLost, TimedOut, TrainingFailed
from geomx_cli.core.state_notes import StateNotes

if TYPE_CHECKING:
    from collections.abc import Callable

    from geomx_cli.contract.settings import Settings
    from geomx_cli.core.event_log import EventLog
    from geomx_cli.core.events import Contribution
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.presence import RoundTelemetry
    from geomx_cli.runtime.script.base_store import ScriptStore
    from geomx_cli.runtime.script.stopping import Stopping
    from geomx_cli.runtime.signals import Signals
    from geomx_cli.runtime.training.worker_state import WorkerState

__all__ = ["Session", "run", "session"]

_LAST_WAIT = 10.0
"""Seconds that a failed worker waits for the framework's pending operations."""


class Session:
    """The script's membership of the job. For the main thread of the process that created it; inactive in forked
    children.

    attached: whether the script is joining the job, or may, having imported a framework with our store.
    store: the store that the front end has created for the script, None before.
    contribution: see ProcessFinished; set by `finish`.
    recovery: what an earlier life of this worker has saved; None before it joins.
    await_group: waits until the scripts of all workers of its process group are over, if it belongs to one.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._client: Client | None = None
        self._events: EventLog | None = None
        self.store: ScriptStore | None = None
        self.attached = False
        self._aborted = self._joined = False
        self._telemetry: RoundTelemetry | None = None
        self._stopping: Stopping | None = None
        self._exit: tuple[object, int] = (None, 0)
        self.contribution: Contribution = ""
        self.recovery: WorkerState | None = None
        self.await_group: Callable[[], None] = lambda: None

    def attach(self) -> None:
        """Register the exit handlers. Idempotent."""
        if self.attached:
            return
        # atexit runs in reverse order of registration: the sockets must stay open until our last rounds are over.
        import zmq.utils.garbage  # noqa: F401

        self.attached = True
        atexit.register(self._at_exit)
        sys.exit = self._note_exit

    def finish(self) -> bool:
        """After a successful script: wait for its last rounds and leave. Raises GeomxError if the job has failed.

        Return False if there was nothing to leave.
        """
        client = self._client
        if not self._joined or self._aborted or os.getpid() != self._process:
            return False
        if self.store is not None:
            try:
                self.store.wait_for_operations()
            except Exception as error:
                raise self._cause(error) from error
            if self.store.failure is not None:
                raise self._cause(self.store.failure)
        from geomx_cli.runtime.script import reports
        from geomx_cli.runtime.script.ending import contribution_of
        from geomx_cli.runtime.training import parting

        reports.close()  # before the last telemetry, which has their last loss
        self.await_group()
        if client is not None:
            self.contribution = contribution_of(client, trained=reports.trained())
            if self._stopping is not None:
                self._stopping.leave()
            client.leave()
            parting.begin(_settings())
            client.close()
        elif self._telemetry is not None:
            self._telemetry.stop()
            self.contribution = "rounds" if self._calls() else "none"
        self._client, self._joined = None, False
        return True

    def abort(self, error: BaseException) -> None:
        """After a failed script: log the error, notify all processes, and drain the framework. Idempotent.

        With `--on-worker-loss leave`, nobody is notified: the agent lets this worker leave, and the job goes on.
        """
        if self._aborted or os.getpid() != self._process:
            return
        self._aborted = True
        from geomx_cli.core.events import ProcessFailed
        from geomx_cli.runtime.script import reports

        cause = self._cause(error)
        if self._is_let_go(cause):
            assert self._client is not None
            self._client.drop()
            reports.close()
            return
        try:
            blame = (cause if isinstance(cause, PeerLost) else PeerLost("")).blame
            self._log().write(ProcessFailed(message=cause.message, hint=cause.hint, **blame))
        except (OSError, GeomxError) as second:
            print(f"cannot write the event log: {second}", file=sys.stderr)
        if self._client is not None:
            self._client.close(cause)
            if self.store is not None:
                _rest(self.store)
        reports.close()

    def _is_let_go(self, cause: GeomxError) -> bool:
        """Whether the job goes on without this worker: it fails by itself, and has contributed."""
        client = self._client
        if client is None or client.failure is not None or isinstance(cause, Interrupted):
            return False
        folder, leaves = client.settings.state_dir, client.settings.text("on_worker_loss") == "leave"
        return leaves and bool(folder) and StateNotes(Path(folder)).contributed is not None

    def note_failure(self, failure: GeomxError) -> None:
        """Tell the agent that the script gets the job's failure, and may save before it ends. Thread-safe."""
        from geomx_cli.core.events import StateChanged

        if not self._aborted:
            self._log().write(StateChanged(state="failing", message=failure.message))

    def should_stop(self) -> bool:
        """See geomx_cli.torch.should_stop; call it once there is a `store`."""
        if self._stopping is None:
            from geomx_cli.runtime.script.stopping import Stopping

            assert self.store is not None
            self._stopping = Stopping(self.settings, self._log(), self._client, self.store)
        return self._stopping.should_stop()

    def end(self, why: str) -> NoReturn:
        """End the process at once, as its training thread waits for what will not come. Thread-safe."""
        error = TimedOut(why, "see their logs; py-spy dump --pid PID shows where each one waits")
        print(f"error: {why}", file=sys.stderr)
        self.abort(error)
        _die(error.exit_code)

    def notify(self, error: Interrupted) -> None:
        """Notify all processes of an interrupt, so that pending waits fail. Thread-safe."""
        if self._client is not None:
            self._client.close(error)

    def _cause(self, error: BaseException) -> GeomxError:
        """Return the root cause: the job's error if the job failed, however it surfaced in the script."""
        seen: BaseException | None = error
        while seen is not None:
            if isinstance(seen, GeomxError):
                return seen
            seen = seen.__cause__ or seen.__context__
        failure = self.store.cause(error) if self.store is not None else None
        if isinstance(failure, GeomxError):
            return failure
        if isinstance(error, SystemExit):
            told = isinstance(error.code, str)  # Python prints it, and exits with 1
            return TrainingFailed(f"the script ended {'by sys.exit:' if told else 'with exit status'} {error.code}")
        text = (str(error).strip().splitlines() or [""])[0]
        return TrainingFailed(f"the script raised {type(error).__name__}: {text}", "correct it where the log says")

    def connect(self) -> "Client":
        """See ScriptSession."""
        settings = _settings()
        if settings.group_size:
            what = "the workers of a party add their gradients themselves (--reduce torch), and this script cannot"
            raise InvalidSettings(what, "call geomx_cli.torch.wrap, or leave --reduce out")
        client = self._join(settings)
        assert client is not None
        return client

    def connect_in_group(self, settings: "Settings", active: "Callable[[], float]") -> "Client | None":
        """Join the job as one of a party's process group; None if this worker is no member of a plane. active: when
        code of the group last ran. Raises GeomxError on failure.
        """
        client = self._join(settings)
        if client is not None:
            client.follow(active)
        return client

    def _join(self, settings: "Settings") -> "Client | None":
        from geomx_cli.core.events import ProcessFinished, StateChanged
        from geomx_cli.ps.client import Client
        from geomx_cli.runtime.plugin_factory import part, warn_of_variables
        from geomx_cli.runtime.script import reports
        from geomx_cli.runtime.script.ending import FailureNotice
        from geomx_cli.runtime.training import parting
        from geomx_cli.runtime.training.worker_state import WorkerState

        warn_of_variables(self._log(), settings)
        if parting.has_begun(settings):  # and the script had come to its end
            parting.end(settings, self._log())
            self._log().write(ProcessFinished())
            raise SystemExit(0)
        if parting.is_over(settings):
            self._leave_alone(settings)
            self._log().write(ProcessFinished())
            raise SystemExit(0)
        self.recovery = WorkerState(Path(settings.state_dir) if settings.state_dir else None, self.warn)
        if settings.local is not None:
            self._client = Client(settings, self._log(), part(settings, "delivery", "worker")())
        else:
            from geomx_cli.runtime.presence import RoundTelemetry

            self._telemetry = RoundTelemetry(self._log(), self._calls)
        self._joined = True
        if self._client is not None:
            self._client.recovery.before_contribution = self.recovery.before_contribution
            if settings.state_dir and settings.text("on_worker_loss") == "leave":
                self._client.recovery.keep_contributions(Path(settings.state_dir))
            FailureNotice(self._client, self.note_failure, lambda: self._aborted)
        if self._client is None or self._client.trains:
            self._log().write(StateChanged(state="training"))
        client = self._client
        on_loss = (lambda loss: client.report(loss=loss)) if client is not None else (lambda _: None)
        since = settings.training_since
        before = max(0.0, self._log().clock.time() - since) if since else 0.0
        reports.begin(self._log(), lambda: self.store is not None and self.store.failure is not None, on_loss, before)
        return client

    def _leave_alone(self, settings: "Settings") -> None:
        """Leave the job in the name of an earlier life. Its script and the scripts of its group were over."""
        from geomx_cli.ps.client import Client
        from geomx_cli.runtime.plugin_factory import part
        from geomx_cli.runtime.training import parting

        if settings.local is None:  # no member
            return
        client = Client(settings, self._log(), part(settings, "delivery", "worker")())
        client.leave()
        parting.begin(settings)
        client.close()

    @property
    def settings(self) -> "Settings":
        """This process's settings. Raises InvalidSettings for missing or invalid variables."""
        return _settings()

    @property
    def num_all_workers(self) -> int:
        """See ScriptSession."""
        settings = _settings()
        if self._client is not None and not settings.group_size:
            return self._client.num_all_workers
        flat = settings.local is not None and settings.upper is None and not settings.job
        return settings.local.workers if flat and settings.local is not None else settings.num_all_workers

    def warn(self, message: str, *, affects_result: bool = False) -> None:
        """See ScriptSession; nothing after the script has failed, whose error says what matters."""
        if self._aborted:
            return
        from geomx_cli.core.events import WarningRaised

        print(f"warning: {message}", file=sys.stderr, flush=True)
        try:
            self._log().write(WarningRaised(message=message, affects_result=affects_result))
        except (OSError, GeomxError) as error:
            print(f"cannot write the event log: {error}", file=sys.stderr)

    def _log(self) -> "EventLog":
        from geomx_cli.runtime.plugin_factory import event_log

        if self._events is None:
            self._events = event_log(_settings())
        return self._events

    def _note_exit(self, status: object = None, /) -> NoReturn:
        """Replacement for sys.exit: atexit handlers cannot see the exit status."""
        self._exit = (status, self._calls())
        raise SystemExit(status)

    def _calls(self) -> int:
        return self.store.calls if self.store is not None else 0

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            return
        status, calls = self._exit
        # A script that continued to use the store has caught our SystemExit.
        if status not in (None, 0) and calls == self._calls():
            if self._events is not None:  # else it has not begun to join, as with a wrong argument: its log says all
                self.abort(SystemExit(status))
            return
        from geomx_cli.core.events import ProcessFinished

        try:
            if self.finish():
                self._log().write(ProcessFinished(contribution=self.contribution))
        except GeomxError as error:
            print(f"error: {error}", file=sys.stderr)
            self.abort(error)
            _die(error.exit_code)


def _settings() -> "Settings":
    from geomx_cli.contract.settings import Settings
    from geomx_cli.core import plugins

    return Settings.from_environment(plugins.table())


@functools.cache
def session() -> Session:
    """Return this process's session."""
    return Session()


def run(argv: list[str], signals: "Signals | None") -> None:
    """Run the script argv[0] with its arguments, as `python` would, then leave the cluster.

    Raises SystemExit if the script failed, after all processes were notified: with the script's own status, or 1 after
    an exception, which has been printed. Raises Interrupted if the script was interrupted and `signals` recorded it.
    """
    sys.argv = list(argv)
    sys.path.insert(0, str(Path(argv[0]).absolute().parent))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            session().abort(end)
            raise
    except BaseException as error:
        if signals is not None and signals.interruption is not None:
            session().abort(signals.interruption)
            raise signals.interruption from None
        traceback.print_exception(type(error), error, _of_script(error.__traceback__, argv[0]))
        session().abort(error)
        raise SystemExit(1) from None
    try:
        session().finish()
    except GeomxError as error:
        print(f"error: {error}", file=sys.stderr)
        session().abort(error)
        raise SystemExit(error.exit_code) from None


def _of_script(trace: TracebackType | None, path: str) -> TracebackType | None:
    """Strip the frames above the script from the traceback."""
    full, start = os.path.realpath(path), trace
    while trace is not None and os.path.realpath(trace.tb_frame.f_code.co_filename) != full:
        trace = trace.tb_next
    return trace or start


def _rest(store: "ScriptStore") -> None:
    """Wait until the framework's threads no longer need Python, before the interpreter shuts down."""

    def wait_for_operations() -> None:
        try:
            store.wait_for_operations()
        except Exception:
            pass  # already reported

    thread = threading.Thread(target=wait_for_operations, daemon=True)
    thread.start()
    thread.join(_LAST_WAIT)
    if thread.is_alive():
        _die(1)


def _die(status: int) -> NoReturn:
    """Exit at once: normal interpreter shutdown would block on stuck threads, or crash."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
