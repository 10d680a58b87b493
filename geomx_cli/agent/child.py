"""One process of the job as its agent keeps it: a task, and the lives in which it is carried out."""

import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from geomx_cli.agent.diagnosis import full_disk
from geomx_cli.agent.event_tail import EventTail
from geomx_cli.agent.host_spec import HostSpec, Task
from geomx_cli.agent.incarnation import Incarnation
from geomx_cli.agent.output_log import OutputLog
from geomx_cli.agent.outputs import folder_of, told_of
from geomx_cli.core.conventions import JobClock, module_command, number_before
from geomx_cli.core.errors import Missed
from geomx_cli.core.files import make_folders
from geomx_cli.core.jsonlines import append_object
from geomx_cli.core.root_cause import Failure, describe_status, ending_of, exception_line
from geomx_cli.core.state_notes import StateNotes
from geomx_cli.core.units import counted

__all__ = ["Child"]

_REMOVED = (
    "its state in {} was removed by another program. Where systemd-logind does this at the end of an account's last"
    " session, `loginctl enable-linger` prevents it"
)

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
        self.failed = self.asked = self.departs = self.lacked_room = self._told_removal = False
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
            StateNotes(self.state_dir).prepare()
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
        return self.state_dir is None or StateNotes(self.state_dir).has_ended

    @property
    def lost_state(self) -> bool:
        """Whether another program has removed the state that the process saves."""
        return self.state_dir is not None and StateNotes(self.state_dir).is_lost

    @property
    def ended_by_request(self) -> str:
        """The signal that has ended the process before it could handle it: while it imported modules, or waited for
        others to join. It asks the job to stop, as it does later. "" for none.
        """
        number = -(self.life.status or 0)
        handled = self.asked or self.life.events.joined
        return signal.Signals(number).name if number in (signal.SIGTERM, signal.SIGUSR1) and not handled else ""

    def begin_after(self, incarnation: int) -> None:
        """Begin after this life, of another job. If all processes of this job begin again, the numbers that were used
        before are not used again.
        """
        self.incarnation = max(self.incarnation, incarnation + 1)
        if not self.together:
            self._first = self.incarnation

    @property
    def contributed(self) -> int | None:
        """The last round to which it has contributed, in a job that it may leave; None before the first."""
        return None if self.state_dir is None else StateNotes(self.state_dir).contributed

    def _restarts(self) -> dict[str, str]:
        """Variables that tell a script whether it begins again, with those of torchrun."""
        env = {"GEOMX_RESTART_COUNT": str(self.together)}
        if self.together and "TORCHELASTIC_RESTART_COUNT" in self.task.env:
            env["TORCHELASTIC_RESTART_COUNT"] = str(self.together)
        since = self.life.events.trains_since
        return env | ({"GEOMX_TRAINING_SINCE": f"{since:.3f}"} if self.together and since else {})

    def _departure(self) -> list[str]:
        return module_command(sys.executable, "geomx_cli.runtime.departure")

    @property
    def hint(self) -> str:
        """What it lacks so that it can continue after a kill; "" for nothing that is known."""
        if self.lost_state:
            return _REMOVED.format(self.state_dir)
        return "" if self.state_dir is None else StateNotes(self.state_dir).hint

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
        StateNotes(self.state_dir).end()  # tells an agent that follows this one that the script does not continue
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
            hint = self.hint
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

    def removal_notice(self) -> str:
        """Return a warning, once, if another program has removed its state; else ""."""
        if self._told_removal or not self.life.running or not self.lost_state:
            return ""
        self._told_removal = True
        return f"{self.name}: {_REMOVED.format(self.state_dir)}. If the process is killed from now on, the job ends"

    def stall_notice(self) -> str:
        """Return a warning, once, if the process has been stopped or hung for a while; call after `check_stall`."""
        what = self.life.stall_notice()
        return f"{self.name} {what}; the job waits for it, for {self._silence:g} s at most (--silence)" if what else ""

    def close(self) -> None:
        """Reap it and close its log, after its end and the last signal to its group."""
        self.life.reap()
        self.log.close()
