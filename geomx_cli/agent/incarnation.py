"""One life of a process of the job: its start, its signs of life, its events and its end."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

from geomx_cli.agent import processes
from geomx_cli.agent.diagnosis import StopDetector, full_disk
from geomx_cli.agent.host_spec import HostSpec, Task
from geomx_cli.agent.output_log import OutputLog
from geomx_cli.agent.outputs import folder_of, told_of
from geomx_cli.agent.processes import ProcessId
from geomx_cli.core.conventions import CONTRIBUTED, STATE_ENDED, JobClock, module_command, number_before
from geomx_cli.core.errors import CheckFailed, Missed
from geomx_cli.core.files import make_folders, open_record
from geomx_cli.core.jsonlines import UNWRITTEN, append_object, decode, read_objects
from geomx_cli.core.root_cause import Failure, describe_status, ending_of, exception_line
from geomx_cli.core.units import counted

__all__ = ["Child", "EventTail", "Incarnation", "Stall"]

# One process of the job as its agent keeps it: a task, and the lives in which it is carried out.

_TELLING = 500  # maximum length of a forwarded message or exception line


class Child:
    """A task, its log, and what is decided about it. Not thread-safe.

    life: its present or last incarnation; not None before the start either.
    incarnation: the number of it, from 0.
    state_dir: the folder with the process's saved state; None if it is never restarted.
    asked: its end was requested.
    departs: the process has died, and its present life only leaves the job in its name.
    together: how often all of the job's processes have begun again.
    failed: a failure of it was reported.
    lacked_room: it failed, by itself, while a disk was full.
    clock: the job's, used for all times here.
    """

    def __init__(self, task: Task, host_spec: HostSpec, clock: JobClock) -> None:
        job_dir = Path(host_spec.job_dir)
        self.task = task
        self.name = task.name
        self.failed = self.asked = self.departs = self.lacked_room = False
        self.incarnation = self._first = self.together = 0
        self.state_dir: Path | None = None
        self.log = OutputLog(job_dir / "logs" / f"{task.file_name}.log")
        events = EventTail(job_dir / "events" / f"{task.file_name}.jsonl")
        self.life = Incarnation(events, host_spec.silence, clock)
        self._stop_files = host_spec.stop_files
        self._host = host_spec.host
        self._silence = host_spec.silence
        self._clock = clock
        self._job_dir = self._working_dir = job_dir

    def start(self, inherited: Mapping[str, str], working_dir: str) -> None:
        """Start the process, for the first time or again. Raises OSError if the program or working directory is missing
        or the log cannot be written.
        """
        self._working_dir = Path(working_dir or ".").absolute()
        make_folders(self.log.path.parent)
        if working_dir and Path(working_dir).is_relative_to(self._job_dir):
            make_folders(Path(working_dir))
        if (folder := folder_of(self.task)) is not None:
            make_folders(folder)
        env = {**inherited, **self.task.env, "GEOMX_SUPERVISED": "1", "GEOMX_STOP_FILE": self._stop_files.path}
        if self.state_dir is not None:
            make_folders(self.state_dir)
            env |= {"GEOMX_INCARNATION": str(self.incarnation), "GEOMX_STATE_DIR": str(self.state_dir)}
        if self.task.runs_script:
            env |= self._restarts()
        output = self.log.open()
        try:
            self.life.start(self._departure() if self.departs else self.task.argv, env, working_dir, output)
        finally:
            os.close(output)

    def terminate(self) -> None:
        """Send SIGTERM to its process group. The process recognises it as the agent's, not as a request to stop the
        job.
        """
        self._stop_files.end()
        self.life.signal_group(signal.SIGTERM)

    @property
    def lacks_state(self) -> bool:
        """Whether the process saves no state: it has no folder for it, has announced that it saves nothing, or had no
        room.
        """
        return self.state_dir is None or (self.state_dir / STATE_ENDED).exists()

    def begin_after(self, incarnation: int) -> None:
        """Begin with the life after this one, of another job."""
        self.incarnation = self._first = incarnation + 1

    @property
    def contributed(self) -> int | None:
        """The last round to which it has contributed, in a job that it may leave; None before the first."""
        try:
            return int((self.state_dir / CONTRIBUTED).read_bytes()) if self.state_dir is not None else None
        except (OSError, ValueError):
            return None

    def _restarts(self) -> dict[str, str]:
        """Variables that tell a script whether it begins again, with those of torchrun."""
        env = {"GEOMX_RESTART_COUNT": str(self.together)}
        if self.together and "TORCHELASTIC_RESTART_COUNT" in self.task.env:
            env["TORCHELASTIC_RESTART_COUNT"] = str(self.together)
        since = self.life.events.trains_since
        return env | ({"GEOMX_TRAINING_SINCE": f"{since:.3f}"} if self.together and since else {})

    def _departure(self) -> list[str]:
        return module_command(sys.executable, "geomx_cli.runtime.departure")

    def _advice(self) -> str:
        """What its script lacks so that it can continue after a kill, from the file that the process wrote; "" without
        one.
        """
        if self.state_dir is None:
            return ""
        with suppress(OSError), (self.state_dir / STATE_ENDED).open(errors="replace") as file:
            return file.read(_TELLING)
        return ""

    def bury(self, how: str) -> list[dict[str, Any]]:
        """Kill what an ended life has left, and prepare the next life, which `start` begins. It continues the log and
        the event log. Return the event about the restart, if the event log has no room for it.

        how: it ended, a phrase to follow its name.
        """
        said = f"restarted by geomx: incarnation {self.incarnation + 1}, as it {how}"
        return self._succeed(said, "restarted", message=f"{how}; started again", together=self.together)

    def begin_again(self, how: str, together: int) -> list[dict[str, Any]]:
        """As `bury`, of all processes of the job. how: it comes to that, a sentence."""
        self.together, self.failed, self.asked, self.departs, self.lacked_room = together, False, False, False, False
        said = f"all workers begin again: {how}"
        return self._succeed(said, "restarted", message=said, together=together)

    def depart(self, how: str) -> list[dict[str, Any]]:
        """As `bury`, and the next life leaves the job."""
        self.departs = True
        assert self.state_dir is not None
        with suppress(OSError):  # tells an agent that follows this one that the script does not continue
            (self.state_dir / STATE_ENDED).touch()
        round_ = self.contributed or 0
        return self._succeed(f"{how}; leaving the job after round {round_}", "left", message=how, round=round_)

    def _succeed(self, said: str, kind: str, **fields: Any) -> list[dict[str, Any]]:
        self.life.sweep()
        self.life.reap()
        self.incarnation += 1
        self.log.begin_anew(f"-- {said} --")
        event = told_of(self.task, kind, self._clock.time())
        event |= {"number": number_before(self.incarnation), "incarnation": self.incarnation, **fields}
        events = self.life.events
        unwritten = [] if append_object(events.path, event) else [event]
        self.life = Incarnation(events.successor(), self._silence, self._clock)
        return unwritten

    def failure(self, *, memory: bool) -> Failure | None:
        """Return its failure, or None. Read `events` first, so that its own failure event is included."""
        status, events = self.life.status, self.life.events
        if status == 0 and events.joined and not events.left and not full_disk("", self._job_dir, ()):
            cause, hint = "ended with status 0 but did not leave the job", "let Python exit normally: os._exit and exec"
            return Failure(self.name, self._host, cause, self._clock.time(), f"{hint} skip leaving the job")
        if not status:
            return None
        tail = self.log.tail()
        told = events.failure or {}  # written by a script, perhaps
        message = str(told.get("message") or "") or exception_line(tail)
        ending, how = ending_of(status, memory=memory), describe_status(status, memory=memory)
        if told and status < 0:  # it had reported its failure before
            ending, how = "reported", "failed"
        restarts = self.incarnation - self._first
        how += f" after {counted(restarts, 'restart')}" if restarts else ""
        hint, peer = str(told.get("hint") or ""), str(told.get("peer") or "")
        if not hint and ending in ("killed", "crashed"):
            hint = self._advice()
        output = "" if peer else "\n".join((message, *tail))
        temp = self.task.env.get("TMPDIR") or tempfile.gettempdir()
        places = (folder_of(self.task), self._working_dir, Path(temp))
        if disk := full_disk(output, self._job_dir, filter(None, places)):  # its last output may be lost
            self.lacked_room = not peer and status != -signal.SIGTERM
            elsewhere = "--job-dir; of a host in hosts.toml state_dir, workdir or TMPDIR"
            hint = f"make room on that disk, or write elsewhere ({elsewhere}), and launch again"
        when, seconds = told.get("time"), told.get("seconds")
        when = float(when) if isinstance(when, int | float) else self._clock.time()
        return Failure(
            self.name, self._host, how, when, hint, "" if peer == self.name else peer, tail,
            message=message[:_TELLING], disk=disk, ending=ending, observer=str(told.get("observer") or ""),
            missed=next((word for word in get_args(Missed) if word == told.get("missed")), ""),
            seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
        )  # fmt: skip

    def failed_before(self, when: float) -> bool:
        """Whether it reported its failure before `when`, even if it ended much later."""
        written = (self.life.events.failure or {}).get("time")
        return isinstance(written, int | float) and written < when

    def check_stall(self) -> Failure | None:
        """Return a failure, once, if the process has been stopped or has hung for longer than --silence."""
        stall = self.life.stall()
        if stall is None or self.failed:
            return None
        when = self._clock.time() - self._silence
        return Failure(self.name, self._host, stall.how, when, stall.hint, tail=self.log.tail())

    def stall_notice(self) -> str:
        """Return a warning, once, if the process has been stopped or hung for a while; call after `check_stall`."""
        what = self.life.stall_notice()
        return f"{self.name} {what}; the job waits for it, for {self._silence:g} s at most (--silence)" if what else ""

    def close(self) -> None:
        """Reap it and close its log, after its end and the last signal to its group."""
        self.life.reap()
        self.log.close()


_SWEEP = 2.0  # seconds for SIGKILL to take effect
_LATE = 5.0  # seconds; telemetry comes every second
_IDLE = 1e-4  # seconds of processor time in a second, which threads of libzmq may use


class Stall(NamedTuple):
    """A process that is stopped or hangs: what it does, and a hint."""

    how: str
    hint: str


class Incarnation:
    """A process in its own session, from before its start until it is reaped. Not thread-safe.

    After its end it stays a zombie until `reap`. So its pid, which is also its process group id, cannot be reused, and
    group signals reach only what it has left.

    status: its exit status, or the negated number of the signal that ended it; None before. 0 if it was killed when it
        had done all, and would be restarted before that.
    ended: when its end was seen, by `clock`.
    began: when it was started (time.monotonic seconds).
    silence: seconds that it may be stopped, or hang.
    """

    def __init__(self, events: "EventTail", silence: float, clock: JobClock) -> None:
        self.events = events
        self.identity: ProcessId | None = None
        self.pidfd = -1
        self.began = 0.0
        self.status: int | None = None
        self.ended: float | None = None
        self._clock = clock
        self._stops, self._hangs = StopDetector(silence), StopDetector(silence)
        self._used = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, argv: Sequence[str], env: Mapping[str, str], working_dir: str, output: int) -> None:
        """Start it. Raises OSError if the program or working directory is missing."""
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            cwd=working_dir or None,
            start_new_session=True,
            preexec_fn=processes.die_with_parent(os.getpid()),  # noqa: PLW1509 - the agent has one thread
        )
        self.began = time.monotonic()
        self.identity = processes.identify(self._process.pid)
        self.pidfd = os.pidfd_open(self._process.pid)

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self.pidfd >= 0 and self.status is None

    @property
    def handles_failure(self) -> bool:
        """Whether its script has, or gets, the job's failure as an exception, and has not ended by it."""
        return self.events.saw_failure and self.events.failure is None

    def check_end(self) -> bool:
        """Look for its end and set `status`; return whether it has ended. Neither blocks nor reaps."""
        if self.running:
            result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is not None:
                exited = result.si_code == os.CLD_EXITED
                self.status = result.si_status if exited else -result.si_status
                self.ended = self._clock.time()
        return self.status is not None

    def stall(self) -> Stall | None:
        """Return how it has been stopped (e.g. by SIGSTOP), or has hung, for longer than `silence`; call regularly."""
        stopped = self.running and self.identity is not None and processes.state(self.identity) == "T"
        is_stopped = self._stops.check(stopped=stopped)
        if self._hangs.check(stopped=not stopped and self._is_stuck()):
            how = f"has neither answered nor used processor time for {self._hangs.limit:g} s"
            return Stall(how, "a native function hangs while it holds Python's lock: py-spy dump --native shows which")
        if is_stopped:
            return Stall("was stopped (SIGSTOP)", "find out who sent it SIGSTOP; a debugger does, for example")
        return None

    def stall_notice(self) -> str:
        """Return, once, what the process does if it has been stopped or hung for a while. Call it after `stall`."""
        if self._stops.notices():
            return "is stopped (SIGSTOP)"
        return "neither answers nor uses processor time" if self._hangs.notices() else ""

    def _is_stuck(self) -> bool:
        """Whether a member of the job writes no telemetry, which takes Python's lock, and has used no processor time
        since the last call. Others wait for one that computes while it holds the lock.
        """
        late = self.events.joined and not self.events.left and time.monotonic() - self.events.heard > _LATE
        if not (late and self.running and self.identity is not None):
            return False
        before, self._used = self._used, processes.run_time(self.identity)
        return self._used - before < _IDLE

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal, then SIGCONT, to its process group."""
        if self._process is not None and self.pidfd >= 0:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
                os.killpg(self._process.pid, signal.SIGCONT)

    def sweep(self) -> None:
        """Kill the remaining processes of its session, and wait for their end. Call it after the end of the process."""
        if self._process is not None and self.pidfd >= 0:
            pid = self._process.pid
            processes.kill_all(lambda: processes.session_members([pid]), _SWEEP)

    def reap(self) -> None:
        """Reap it, if it has ended. Call only after the last signal to its group was sent."""
        if self._process is not None and self.status is not None and self.pidfd >= 0:
            self._process.wait()
            os.close(self.pidfd)
            self.pidfd = -1


_BEFORE = ("starting", "waiting")  # states of a process before all have joined
_SIGNALS = ("SIGTERM", "SIGUSR1")  # by which somebody asks the job to stop
_NEWEST = 1 << 18  # bytes of an event log
_SHOWN = 4096  # maximum characters of a string in a forwarded event


class EventTail:
    """Reads what a process adds to its event log, from `offset` on.

    failure: its own "failed" event, once read.
    saw_failure: it has noticed that the job has failed.
    joined, left: it has joined the job, and left it in the orderly way.
    finished: its last event was read; a scheduler or server has nothing more to do then.
    awaits_stop: it ends by itself once the job is asked to stop.
    signalled: the signal by which somebody else asks the job to stop, "" for none.
    waits: it waits for others to join, or has not come as far.
    heard: when its newest telemetry was read (time.monotonic seconds); it writes some every second.
    trains_since: when it first began to train, in any life, by the job's clock; 0 before.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.failure: dict[str, Any] | None = None
        self.saw_failure = self.joined = self.left = self.finished = self.awaits_stop = False
        self.signalled = ""
        self.waits = True
        self.heard = self.trains_since = 0.0
        self.path = path
        self._offset = offset
        self._saw_round = False

    def skip(self) -> None:
        """Begin with the newest events of a log that another agent has read, those of the last 256 KiB."""
        with suppress(OSError, CheckFailed), open_record(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            self._offset = max(0, size - _NEWEST)
            if self._offset:
                file.seek(self._offset - 1)
                self._offset += len(file.readline()) - 1
        self._saw_round = self._offset > 0

    def successor(self) -> "EventTail":
        """Return one for the next life of the process, which goes on in the same file."""
        tail = EventTail(self.path, self._offset)
        tail._saw_round, tail.trains_since = self._saw_round, self.trains_since
        return tail

    def unwritten(self, output: Iterable[str]) -> list[dict[str, Any]]:
        """Return the events in a process's output for which its event log had no room."""
        events = []
        for line in output:
            if line.startswith(UNWRITTEN):
                with suppress(ValueError):
                    events.append({name: _shortened(value) for name, value in decode(line[len(UNWRITTEN) :]).items()})
                    self._note(events[-1])
        return events

    def read(self) -> list[dict[str, Any]]:
        """Return the events written since the last call; of its round events only the very first and the newest,
        of reports those that are live, and no counts of sent bytes.

        Long strings are truncated, long lists and objects dropped.
        """
        if not self.path.is_file():  # not created yet, or replaced by a pipe
            return []
        events: list[dict[str, Any]] = []
        newest: dict[str, Any] | None = None
        for written, offset in read_objects(self.path, self._offset):
            self._offset = offset
            event = {name: _shortened(value) for name, value in written.items() if not _is_long(value)}
            kind = event.get("event")
            if kind == "round":
                if self._saw_round:
                    newest = event
                    continue
                self._saw_round = True
            if kind == "sent" or (kind == "reported" and not event.get("live")):
                continue
            self._note(event)
            events.append(event)
        return events if newest is None else [*events, newest]

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("event"), event.get("state"):
            case "telemetry", state:
                self.joined, self.heard = True, time.monotonic()
                self.waits = state in _BEFORE
                self.left |= state == "finished"
            case "finished", _:
                self.left = self.finished = True
            case "state", "failing":
                self.saw_failure = True
            case "stop_awaited", _:
                self.awaits_stop = True
            case "signalled", _:
                self.signalled = next((name for name in _SIGNALS if name == event.get("signal")), "a signal")
            case "state", "training" if not self.trains_since:
                self.trains_since = float(when) if isinstance(when := event.get("time"), int | float) else 0.0
            case "failed", _:
                self.failure = self.failure or event  # of a process's children the first


def _is_long(value: Any) -> bool:
    """Whether a field is too long to forward; it remains in the event log."""
    return isinstance(value, dict | list) and len(str(value)) > 16 * _SHOWN


def _shortened(value: Any) -> Any:
    """Truncate a long string for forwarding: event fields written by a script are untrusted."""
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]}... ({len(value)} characters; the event log has them)"
    return value
