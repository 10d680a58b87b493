"""The agent's main loop: start this host's processes, monitor and report on them, and terminate all of them."""

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any

from geomx_cli.agent import processes
from geomx_cli.agent.child import Child
from geomx_cli.agent.control import Control, Message
from geomx_cli.agent.host_spec import AgentState, HostSpec
from geomx_cli.agent.oom_watcher import OomWatcher
from geomx_cli.agent.partial_stop import PartialStop
from geomx_cli.agent.processes import Identity
from geomx_cli.agent.status import StatusFile
from geomx_cli.core.root_cause import Failure

__all__ = ["Supervisor"]

_TICK = 0.25  # interval between reads of the event logs
_LOOK = 1.0  # interval between checks of process states
_CONNECT = 15.0  # timeout for "start" since the last message of the control machine
_GRACE = 2.0  # for the others to exit on their own after a failure
_TERMINATE = 1.0  # between SIGTERM and SIGKILL
_KILL = 2.0  # for SIGKILL to take effect


class _Stage(IntEnum):
    WAITING = 0  # for "start"
    RUNNING = 1
    GRACE = 2
    TERMINATING = 3
    KILLING = 4


class Supervisor:
    """Single-threaded. `run` returns when every process has ended and everything is reported.

    The whole part of the job is terminated by: a failed process, "stop", SIGTERM or SIGINT to the agent, or a control
    machine that is disconnected or silent for longer than the lease without having sent "suspend". After a grace
    period SIGTERM, then SIGKILL, go to whole process groups and to all other descendants of the agent. If the agent
    itself is killed, the kernel kills its children and reaper.py the rest.
    """

    def __init__(self, directory: Path, host_spec: HostSpec) -> None:
        self._directory = directory
        self._host_spec = host_spec
        job_dir = Path(host_spec.job_dir)
        self._children = [Child(task, job_dir, host_spec.host, host_spec.silence) for task in host_spec.tasks]
        self._selector = selectors.DefaultSelector()
        self._control = Control(host_spec.socket, self._selector)
        self._stage = _Stage.WAITING
        self._deadline = time.monotonic() + _CONNECT
        self._next_look = 0.0
        self._gave_up = False
        self._why = ""
        self._asked_by = ""  # the requester, if a user stopped the job
        self._told = 0.0  # when SIGTERM was sent
        self._ordered = False  # the control machine stopped the job for its own reasons
        self._suspended = False  # the control machine announced a pause in its heartbeats
        self._patience = _TERMINATE
        self._status = StatusFile(directory, host_spec, self._control.tell)
        self._ending = PartialStop()
        self._memory = OomWatcher()
        self._wakeup, self._signals = socket.socketpair()

    def run(self) -> int:
        """Run to the end and return the exit status: 1 if a process could not be terminated, else 0."""
        processes.adopt_orphans()
        self._catch_signals()
        self._write_state()
        try:
            while not self._over():
                for key, mask in self._selector.select(_TICK):
                    self._handle(key.fileobj, key.data, mask)
                self._tick(time.monotonic())
        except Exception as error:
            self._why = self._why or f"its agent failed: {error}"
            raise
        finally:
            left = self._sweep()
            self._host_spec.remove_secrets()
            self._status.write(self._content("over", left))
            self._control.tell({"type": "done", "left": left, "why": self._why, "asked": self._asked_by})
            with suppress(OSError):  # full disk; a connected control machine still gets "done"
                (self._directory / "agent-end.jsonl").write_bytes(self._control.unseen())
            self._control.close(_TERMINATE)
        return 1 if left else 0

    def _catch_signals(self) -> None:
        for end in (self._wakeup, self._signals):
            end.setblocking(False)
        signal.set_wakeup_fd(self._signals.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    def _handle(self, source: object, child: Child | None, mask: int) -> None:
        if child is not None:
            self._check_end(child)
        elif source is self._wakeup:
            self._wakeup.recv(64)
            self._stop("was told to stop", 0)
        else:
            for message in self._control.handle(source, mask):
                self._obey(message)

    def _obey(self, message: Message) -> None:
        match message.get("type"):
            case "hello":
                status = self._content(self._stage.name.lower())
                self._control.send({"type": "hello", "pid": os.getpid(), "status": status})
                self._acknowledge(message)
                self._control.tell_again()
                self._suspended = False
            case "start" if self._stage is _Stage.WAITING:
                self._start()
            case "suspend" | "resume" as kind:
                self._suspended = kind == "suspend"
            case "heartbeat":
                self._acknowledge(message)
                self._control.send({"type": "alive"})
                if self._stage is _Stage.WAITING:  # the control machine waits for other hosts
                    self._deadline = time.monotonic() + _CONNECT
            case "stop":
                self._obey_stop(message)
            case "kill":
                self._stop("was asked to stop at once", 0)
                self._kill()

    def _obey_stop(self, message: Message) -> None:
        who, patience = str(message.get("who", "")), float(message.get("patience", _TERMINATE))
        names = message.get("processes")
        if names is not None:
            self._ending.begin((child for child in self._children if child.name in names), patience)
            self._status.change()
            return
        self._ordered |= not who
        if who and not self._asked_by and self._stage <= _Stage.RUNNING:
            self._asked_by = who
            self._control.tell({"type": "stopping", "who": who, "patience": patience})
        if self._stage is _Stage.TERMINATING:
            self._deadline = min(self._deadline, time.monotonic() + patience)
        self._patience = patience
        by = f" by {who}" if who else ""
        self._stop(f"was asked to stop{by}", float(message.get("grace", 0)))

    def _start(self) -> None:
        self._enter(_Stage.RUNNING)
        inherited = self._host_spec.inherited()
        for child in self._children:
            if child.asked:  # stopped before its start
                continue
            try:
                child.start(inherited, self._host_spec.working_dir)
            except OSError as error:
                what = f"could not be started: {error.strerror}: {error.filename}"
                self._fail(child, Failure(child.name, self._host_spec.host, what, time.time()))
                break
            self._selector.register(child.pidfd, selectors.EVENT_READ, child)
            self._control.tell(child.started_message())
        self._write_state()

    def _tick(self, now: float) -> None:
        for child in self._children:
            if child.running:
                self._forward(child)
                child.shorten_log()
        if now >= self._next_look:
            self._next_look = now + _LOOK
            for child in self._children:
                if (failure := child.check_stopped()) is not None:
                    self._fail(child, failure)
                if notice := child.stop_notice():
                    self._control.tell({"type": "warning", "message": notice})
        self._memory.ran_out()
        self._check_lease(now)
        self._ending.check(now)
        if self._stage is not _Stage.RUNNING and now >= self._deadline:
            self._escalate()
        if self._status.due():
            self._status.write(self._content(self._stage.name.lower()))

    def _check_lease(self, now: float) -> None:
        lease, control = self._host_spec.lease, self._control
        if self._suspended and control.connected:
            control.heard = now
        if lease and (control.connected or control.lost) and now - control.heard > lease:
            how = "disconnected and did not reconnect" if control.lost else "has been silent"
            self._stop(f"the control machine {how} for {lease:g} s", 0)

    def _acknowledge(self, message: Message) -> None:
        seen = message.get("seen")
        self._control.acknowledge(seen if isinstance(seen, int) else 0)

    def _forward(self, child: Child) -> None:
        for event in child.new_events():
            written = event.get("time")  # untrusted: written by a script
            age = max(0.0, time.time() - written) if isinstance(written, int | float) else 0.0
            self._status.note(child.name, event)
            if not self._control.full:  # else the next hello's status has the newest of each kind
                self._control.tell({"type": "event", "process": child.name, "age": age, "event": event})

    def _check_end(self, child: Child) -> None:
        if not child.check_end():
            return
        self._selector.unregister(child.pidfd)
        self._forward(child)
        failure = child.failure(memory=self._memory.ran_out())
        if failure is not None and not child.asked and (self._stage <= _Stage.GRACE or child.failed_before(self._told)):
            self._fail(child, failure)
        ended = {"process": child.name, "status": child.status, "asked": child.asked}
        self._control.tell({"type": "ended", **ended})
        self._status.change()

    def _fail(self, child: Child, failure: Failure) -> None:
        """Report a failure and terminate the other processes after a grace period."""
        child.failed = True
        self._status.fail(failure)
        age = max(0.0, time.time() - failure.when)
        self._control.tell({"type": "failure", "age": age, "failure": failure.to_message()})
        self._stop(f"{failure.process} {failure.cause}", _GRACE)

    def _stop(self, why: str, grace: float) -> None:
        if self._stage < _Stage.GRACE:
            print(f"stopping: {why}", file=sys.stderr, flush=True)
            self._why = why
            self._enter(_Stage.GRACE, grace)
        if self._stage is _Stage.GRACE:
            self._deadline = min(self._deadline, time.monotonic() + grace)

    def _enter(self, stage: _Stage, limit: float = 0) -> None:
        if stage >= self._stage:
            self._stage = stage
            self._deadline = time.monotonic() + limit
            self._status.change()

    def _escalate(self) -> None:
        """Enter the next stage after the current one's deadline."""
        match self._stage:
            case _Stage.WAITING:
                self._stop(f"the control machine did not send start within {_CONNECT:g} s", 0)
            case _Stage.GRACE:
                self._told = time.time()
                self._signal(signal.SIGTERM)
                self._enter(_Stage.TERMINATING, self._patience)
            case _Stage.TERMINATING:
                self._kill()
            case _Stage.KILLING:
                self._gave_up = True

    def _kill(self) -> None:
        self._enter(_Stage.KILLING, _KILL)
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for child in self._children:
            child.signal_group(number)

    def _over(self) -> bool:
        """Whether none of the job's processes runs. Their leftover descendants do not delay the end."""
        running = self._stage is _Stage.WAITING or any(child.running for child in self._children)
        return self._gave_up or not running

    def _sweep(self) -> list[str]:
        """Terminate all remaining descendants, reap, and return those that could not be terminated."""
        me = os.getpid()

        def find() -> list[Identity]:
            return processes.descendants(me)

        if self._stage <= _Stage.RUNNING and (strays := find()):  # left behind by processes that ended normally
            processes.tell(strays, signal.SIGTERM)
            _wait_until_none(find, _TERMINATE)
        left = processes.end(find, _KILL)
        for child in self._children:
            child.check_end()
            child.close()
        _reap_adopted()
        return [f"pid {who.pid}" for who in left]

    def _content(self, stage: str, left: Sequence[str] = ()) -> dict[str, Any]:
        facts = {"why": self._why, "asked": self._asked_by, "ordered": self._ordered, "left": list(left)}
        return self._status.content(self._children, stage, **facts)

    def _write_state(self) -> None:
        me = processes.identify(os.getpid())
        assert me is not None
        started = {child.name: child.identity for child in self._children if child.identity is not None}
        AgentState(me, started, processes.boot_id()).write(self._directory)


def _wait_until_none(find: Callable[[], list[Identity]], limit: float) -> None:
    deadline = time.monotonic() + limit
    while find() and time.monotonic() < deadline:
        time.sleep(0.02)


def _reap_adopted() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
