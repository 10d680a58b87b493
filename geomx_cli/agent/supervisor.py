"""The agent's main loop: start this host's processes, monitor and report on them, and terminate all of them."""

import os
import selectors
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from geomx_cli.agent import outputs, processes, state_folder
from geomx_cli.agent.agent_state import AgentState
from geomx_cli.agent.beginning import Beginning
from geomx_cli.agent.checkpoints import Checkpoints
from geomx_cli.agent.child import Child
from geomx_cli.agent.control import Control, Message
from geomx_cli.agent.diagnosis import OomWatcher
from geomx_cli.agent.group_restarts import GroupRestarts
from geomx_cli.agent.groups import WorkerGroups
from geomx_cli.agent.host_spec import HostSpec
from geomx_cli.agent.lifecycle import KILL, TERMINATE, Lifecycle, Stage
from geomx_cli.agent.output_log import OutputLog
from geomx_cli.agent.presence import NOTICE, PresenceProcesses
from geomx_cli.agent.processes import ProcessId
from geomx_cli.agent.recall import Recall
from geomx_cli.agent.restart_policy import RestartPolicy
from geomx_cli.agent.status import StatusFile
from geomx_cli.agent.stopping import Stopping
from geomx_cli.agent.uploads import Uploads
from geomx_cli.core.agent_status import AgentStatus
from geomx_cli.core.conventions import JobClock
from geomx_cli.core.files import write_atomic
from geomx_cli.core.root_cause import Failure, describe_status
from geomx_cli.core.units import counted

__all__ = ["Supervisor"]

_TICK = 0.25  # interval between reads of the event logs
_LOOK = 1.0  # interval between checks of process states
_FAILING = 2.0  # for the others to exit on their own after a failure, before SIGTERM


class Supervisor:
    """Single-threaded. `run` returns when every process has ended and everything is reported.

    A process that died without a word may be restarted (restart_policy.py), with all of its group (groups.py).

    The whole part of the job is terminated by: a failed process, "stop", SIGTERM, SIGUSR1 or SIGINT to the agent or, as
    they tell by an event, to its processes, or a control machine that is disconnected or silent for longer than the
    lease without having sent "suspend". SIGTERM and, at the end of the grace, SIGKILL go to whole process groups and to
    all other descendants of the agent (lifecycle.py). If the agent itself is killed, the kernel kills its children, and
    the next agent goes on (succession.py).

    last: of a killed agent, with the numbers of the lives that begin now; None for the first agent.
    """

    def __init__(self, directory: Path, host_spec: HostSpec, last: AgentState | None = None) -> None:
        self._directory = directory
        self._host_spec = host_spec
        self._clock = JobClock(host_spec.clock_ahead)
        self._children = [Child(task, host_spec, self._clock) for task in host_spec.tasks]
        self._selector = selectors.DefaultSelector()
        self._last = last
        self._control = Control(host_spec.socket, self._selector, last.life if last is not None else 0)
        self._next_look = 0.0
        self._status = StatusFile(directory, host_spec, self._clock, self._control.send_durable)
        self._recall = Recall(host_spec.on_worker_loss == "restart-all", host_spec.silence)
        self._stopping = Stopping(
            self._children, host_spec, self._clock, self._control, self._recall, self._on_stage, self._on_part
        )
        self._policy = RestartPolicy(host_spec.restarts, on_worker_loss=host_spec.on_worker_loss)
        self._groups = WorkerGroups(self._children)
        self._restarts = GroupRestarts(
            self._groups, self._policy, self._control, host_spec.lease, self._restart_member, self._fail_member
        )
        self._beginning = Beginning(directory, host_spec, self._children, self._groups, self._policy, self._warn, last)
        answer_durably = partial(self._control.answer, durable=True)
        self._uploads = Uploads(directory, lambda: self._beginning.inherited, answer_durably)
        self._checkpoints = Checkpoints(
            directory, self._children, self._control.answer, host_spec.silence, lambda: self._uploads.number
        )
        self._memory = OomWatcher()
        self._presence = PresenceProcesses(host_spec)
        self._wakeup, self._signals = socket.socketpair()

    def run(self) -> int:
        """Run to the end and return the exit status: 1 if a process could not be terminated, else 0."""
        processes.adopt_orphans()
        self._catch_signals()
        try:
            if self._last is None:
                self._beginning.write()
            else:
                self._continue(self._last)
            while not self._is_over():
                for key, mask in self._selector.select(_TICK):
                    self._handle(key.fileobj, key.data, mask)
                self._tick(time.monotonic())
        except Exception as error:
            self._lifecycle.why = self._lifecycle.why or f"its agent failed: {error}"
            raise
        finally:
            self._status.usage.close()
            self._presence.close()
            self._uploads.abandon()
            left = self._sweep()
            if self._is_done:
                self._checkpoints.remove()
            self._host_spec.remove_secrets()
            self._status.write(self._content("over", left))
            ended = {"left": left, "why": self._lifecycle.why, "asked": self._stopping.asked_by}
            done = self._control.outbox.add({"type": "done", **ended})
            # Until its end is on record, an agent that is killed is followed by another, which ends.
            with suppress(OSError):  # full disk; a connected control machine still gets "done"
                write_atomic(self._directory / "agent-end.jsonl", self._control.outbox.unseen())
            state_folder.remove(self._directory)
            self._control.queue(done)
            self._control.close(TERMINATE)
        return 1 if left else 0

    def _is_over(self) -> bool:
        """Whether this host's part has ended, and does not begin again."""
        if self._groups.are_pending and self._lifecycle.stage is Stage.RUNNING:
            return False
        running = any(child.life.running for child in self._children)  # those that could not be killed
        if not self._lifecycle.over or running or not self._recall.awaited(self._control):
            return self._lifecycle.over and (self._is_done or not self._awaits_upload)
        if self._recall.tell():
            self._control.send_durable({"type": "emptied"})
            self._status.write_soon()
        return False

    @property
    def _awaits_upload(self) -> bool:
        return self._uploads.delays_end(connected=self._control.connected)

    def _catch_signals(self) -> None:
        for end in (self._wakeup, self._signals):
            end.setblocking(False)
        signal.set_wakeup_fd(self._signals.fileno())
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    def _handle(self, source: object, of: Child | OutputLog | None, mask: int) -> None:
        if isinstance(of, OutputLog):
            self._drain(of)
        elif of is not None:
            self._check_end(of)
        elif source is self._wakeup:
            number = self._wakeup.recv(64)[0]
            self._stopping.ask_by_signal(f"{signal.Signals(number).name} to the agent on host {self._host_spec.host}")
        else:
            for message in self._control.handle(source, mask):
                self._obey(message)

    def _obey(self, message: Message) -> None:
        match message.get("type"):
            case "hello":
                status = self._content(self._stage)
                self._control.send({"type": "hello", "status": status})
                self._acknowledge(message)
                self._control.resend()
                self._stopping.suspended = False
                self._restarts.tell_all()
            case "start" if self._lifecycle.stage is Stage.WAITING:
                self._start()
            case "suspend" | "resume" as kind:
                self._stopping.suspended = kind == "suspend"
            case "heartbeat":
                self._acknowledge(message)
                self._control.send({"type": "alive"})
                self._lifecycle.keep_waiting()
            case "stop":
                self._stopping.ask(message)
            case "again" if self._recall.told:
                self._begin_again(str(message.get("how", "")), int(message.get("count", 1)))
            case "halt" if self._lifecycle.stage is Stage.RUNNING:
                self._restarts.halt_with(str(message.get("process", "")), str(message.get("how", "")))
            case "regroup":
                self._restarts.begin(str(message.get("party", "")))
            case "release":
                self._lifecycle.holding = False
            case "failing":
                self._lifecycle.postpone()
            case "freeze" | "keep" | "thaw":
                self._checkpoints.obey(message, running=self._lifecycle.stage is Stage.RUNNING)
            case "upload" | "publish" | "drop":
                self._uploads.obey(message)
            case "kill":
                self._uploads.abandon()
                self._stopping.kill()

    @property
    def _lifecycle(self) -> Lifecycle:
        return self._stopping.lifecycle

    @property
    def _is_done(self) -> bool:
        """Whether all processes have completed their work."""
        return self._lifecycle.stage is Stage.RUNNING and all(child.life.status == 0 for child in self._children)

    def _start(self) -> None:
        self._lifecycle.enter_running()
        self._beginning.prepare()
        for child in self._children:
            if child.asked:  # stopped before its start
                continue
            if not self._begin(child):
                break
            self._control.send_durable({"type": "started", "process": child.name})
        self._beginning.update()

    def _begin_again(self, how: str, count: int) -> None:
        """Start all processes anew, as a script's worker has died: without any state of theirs, or from the checkpoint
        of the launch. how: a sentence. count: of all times so far.
        """
        self._status.usage.close()
        processes.kill_all(lambda: processes.descendants(os.getpid()), KILL)
        self._beginning.together = count
        self._recall.begin()
        self._stopping.begin_again()
        self._status.begin_again()
        for child in self._children:
            if child.log.descriptor >= 0:
                self._selector.unregister(child.log.descriptor)
            unwritten = child.begin_again(how, count)
            self._status.begin_life(child.name)
            self._report(child, [*child.life.events.read(), *unwritten])
        self._start()

    def _continue(self, last: AgentState) -> None:
        """Go on for an agent that was killed: the processes that had not ended begin their next lives. Raises as
        `Beginning.recall`.
        """
        dead = self._beginning.recall()
        self._control.lost = True  # the control machine has its lease to connect
        self._status.recall()
        self._lifecycle.enter_running()
        self._warn(f"its agent was killed and started again, with {counted(len(dead), 'process')}")
        for child in self._children:
            child.life.events.skip()
            self._report(child, child.life.events.read())
            self._control.send_durable({"type": "started", "process": child.name})
        for child in dead:  # one by one, so that the records of the others do not change
            if child.life.running:  # with its group
                continue
            group = self._groups.of(child)
            for each in group.members if group is not None else (child,):
                if each in dead and each.life.status is None:
                    each.incarnation -= 1  # the number that its next life gets again
                    each.life.status = -signal.SIGKILL
            self._conclude(child, "ended with its agent")
        self._beginning.update()

    def _begin(self, child: Child) -> bool:
        """Start a child, and return whether that was possible; if not, it has failed."""
        try:
            child.start(self._beginning.inherited, self._host_spec.working_dir)
        except OSError as error:
            what = f"could not be started: {error.strerror}" + (f": {error.filename}" if error.filename else "")
            failure = Failure(child.name, self._host_spec.host, what, self._clock.time(), ending="unstarted")
            self._fail(child, failure)
            return False
        finally:
            if child.log.descriptor >= 0:
                self._selector.register(child.log.descriptor, selectors.EVENT_READ, child.log)
        self._selector.register(child.life.pidfd, selectors.EVENT_READ, child)
        return True

    def _tick(self, now: float) -> None:
        for child in self._children:
            if child.life.running:
                self._report(child, child.life.events.read())
            if child.log.problem:
                self._drain(child.log)
        self._checkpoints.check()
        self._uploads.check()
        if now >= self._next_look and not self._checkpoints.frozen:
            self._next_look = now + _LOOK
            for child in self._children:
                if (failure := child.check_stall()) is not None:
                    self._fail(child, failure)
                for notice in filter(None, (child.stall_notice(), child.removal_notice())):
                    self._warn(notice)
            if self._lifecycle.stage is Stage.RUNNING and not self._host_spec.lease:
                self._presence.check(self._children, now)
        self._memory.ran_out()
        self._stopping.check(now)
        self._status.usage.measure(now)
        if self._status.due():
            self._status.write(self._content(self._stage))

    def _drain(self, log: OutputLog) -> None:
        descriptor, problem = log.descriptor, log.problem
        log.drain()
        if log.descriptor < 0 <= descriptor:
            self._selector.unregister(descriptor)
        if log.problem and not problem:
            self._warn(f"{log.path} cannot be written ({log.problem}): its newest output is held until it can")

    def _warn(self, message: str) -> None:
        self._control.send_durable({"type": "warning", "message": message})

    def _on_part(self) -> None:
        self._checkpoints.void("a part of the job is stopped")
        self._record()

    def _record(self) -> None:
        """Record for others what has changed."""
        self._beginning.update()
        self._status.write_soon()

    def _acknowledge(self, message: Message) -> None:
        seen = message.get("seen")
        self._control.outbox.acknowledge(seen if isinstance(seen, int) else 0)

    def _report(self, child: Child, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            written = event.get("time")  # untrusted: written by a script
            age = max(0.0, self._clock.time() - written) if isinstance(written, int | float) else 0.0
            self._status.record_event(child.name, event)
            if not self._control.outbox.full:  # else the next hello's status has the newest of each kind
                self._control.send_durable({"type": "event", "process": child.name, "age": age, "event": event})

    def _check_end(self, child: Child) -> None:
        if not child.life.check_end():
            return
        self._selector.unregister(child.life.pidfd)
        if child.life.status:  # its next life may begin in the folder that is copied
            self._checkpoints.void(f"{child.name} has died")
        child.log.drain_rest()
        unwritten = child.life.events.unwritten(child.log.recent)
        self._report(child, [*child.life.events.read(), *unwritten])
        self._conclude(child)

    def _conclude(self, child: Child, how: str = "") -> None:
        """Start a child that has ended again, or report its end. how: it ended, if not as its status says."""
        memory = self._memory.ran_out()
        if self._policy.excuses(child):
            child.life.status = 0
        if (name := child.ended_by_request) and self._lifecycle.stage is Stage.RUNNING:
            child.asked = True
            self._stopping.ask_by_signal(f"{name} to {child.name}")
        group = self._groups.of(child)
        if group is not None and group.is_pending:
            self._restarts.go_on(group)
            return
        if (group is None or self._restarts.can_coordinate(group)) and (
            count := self._policy.decide(child, self._lifecycle.stage, memory=memory, group=group)
        ):
            how = how or describe_status(child.life.status or 0, memory=memory)
            if group is None:
                self._restart(child, how, count)
            else:
                self._restarts.halt(group, child.name, how, count)
            return
        saved = outputs.record(child.task, child.life.events.path, self._clock.time())
        self._report(child, [*child.life.events.read(), *([saved] if saved is not None else [])])
        failure = child.failure(memory=memory)
        if failure is not None and not failure.hint and group is not None:
            failure = replace(failure, hint=group.advice)
        if failure is not None and self._policy.lets_go(child, self._lifecycle.stage):
            self._let_go(child, how or failure.cause)
            return
        if failure is not None and not child.asked and self._is_own(child):
            self._fail(child, failure)
        elif self._is_absent(child) and self._lifecycle.stage is Stage.RUNNING and not self._control.connected:
            hint = "see its log; others wait for it, as launch says where it follows the job"
            self._presence.tell(child, "ended with status 0 and had not joined the job", hint, verb="absent")
        ended = {"process": child.name, "status": child.life.status, "asked": child.asked}
        self._control.send_durable({"type": "ended", **ended})
        self._record()

    def _restart(self, child: Child, how: str, count: int) -> None:
        """Start a child again that has ended: for the `count`th time in 10 minutes."""
        if child.log.descriptor >= 0:
            self._selector.unregister(child.log.descriptor)
        status = child.life.status
        unwritten = child.bury(how)
        self._status.begin_life(child.name)
        self._report(child, [*child.life.events.read(), *unwritten])
        self._beginning.update()  # a number of a life that others may know is never used again
        if self._begin(child):
            restarted = {"process": child.name, "incarnation": child.incarnation, "how": how}
            limits = {"count": count, "limit": self._policy.limit}
            self._control.send_durable({"type": "restarted", **restarted, **limits})
        else:
            child.life.status = status  # of the life before, as there is no other
            self._control.send_durable({"type": "ended", "process": child.name, "status": status, "asked": False})
        self._record()

    def _restart_member(self, child: Child, how: str, count: int) -> None:
        if self._lifecycle.stage is Stage.RUNNING:  # else another one of its group could not be started
            self._restart(child, how, count)

    def _fail_member(self, child: Child, what: str, hint: str) -> None:
        self._fail(child, Failure(child.name, self._host_spec.host, what, self._clock.time(), hint))

    def _let_go(self, child: Child, how: str) -> None:
        """A script's worker has died, and the others go on: a process in its name leaves the job."""
        if child.log.descriptor >= 0:
            self._selector.unregister(child.log.descriptor)
        unwritten = child.depart(how)
        self._status.begin_life(child.name)
        self._report(child, [*child.life.events.read(), *unwritten])
        self._beginning.update()
        self._begin(child)
        self._record()

    def _is_absent(self, child: Child) -> bool:
        """Whether its script ended as if it had done all, and had not joined the job."""
        return child.life.status == 0 and child.life.events.waits and not (child.life.events.left or child.asked)

    def _is_own(self, child: Child) -> bool:
        """Whether the failure of `child` is no effect of SIGTERM. On a full disk it could not record that it failed."""
        if self._lifecycle.stage <= Stage.FAILING or child.failed_before(self._lifecycle.terminated_at):
            return True
        return child.lacked_room and not self._stopping.asked_by

    def _fail(self, child: Child, failure: Failure) -> None:
        """Report a failure and terminate the other processes after a grace period."""
        child.failed = True
        if self._control.connected:
            self._recall.expect()
        self._status.record_failure(failure)
        age = max(0.0, self._clock.time() - failure.when)
        self._control.send_durable({"type": "failure", "age": age, "failure": failure.to_message()})
        if not self._control.connected and not failure.peer:
            self._presence.tell(child, failure.cause, failure.hint)
        delay = max(_FAILING, NOTICE) if self._presence.tells else _FAILING
        self._lifecycle.stop(f"{failure.process} {failure.cause}", delay)

    def _sweep(self) -> list[str]:
        """Terminate all remaining descendants, reap, and return those that could not be terminated."""
        me = os.getpid()

        def find() -> list[ProcessId]:
            return processes.descendants(me)

        if self._lifecycle.stage <= Stage.RUNNING and (strays := find()):  # left by processes that ended normally
            processes.send_signal(strays, signal.SIGTERM)
            deadline = time.monotonic() + TERMINATE
            while find() and time.monotonic() < deadline:
                time.sleep(0.02)
        left = processes.kill_all(find, KILL)
        for child in self._children:
            child.life.check_end()
            child.close()
            if child.log.problem:
                self._warn(f"{child.log.path} lacks the end of the output ({child.log.problem})")
        _reap_adopted()
        return [f"pid {who.pid}" for who in left]

    def _content(self, stage: str, left: Sequence[str] = ()) -> AgentStatus:
        return self._status.content(
            self._children, stage=stage, why=self._lifecycle.why, asked=self._stopping.asked_by,
            ordered=self._stopping.ordered, left=list(left),
        )  # fmt: skip

    @property
    def _stage(self) -> str:
        return "emptied" if self._recall.told else self._lifecycle.stage.name.lower()

    def _on_stage(self) -> None:
        self._status.write_soon()
        if self._lifecycle.stage is Stage.FAILING:
            self._checkpoints.void("the job ends")
            state_folder.forbid(self._directory)
            for member in self._restarts.give_up():
                if not member.life.running:
                    self._conclude(member)


def _reap_adopted() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
