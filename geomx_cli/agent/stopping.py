"""Requests to stop: by whom, how, and what each does to the stages of the processes' end (lifecycle.py)."""

from collections.abc import Callable, Sequence

from geomx_cli.agent.child import Child
from geomx_cli.agent.control import Control, Message
from geomx_cli.agent.host_spec import HostSpec
from geomx_cli.agent.lifecycle import Lifecycle, PartialStop, Stage
from geomx_cli.agent.recall import Recall
from geomx_cli.core.conventions import JobClock

__all__ = ["Stopping"]


class Stopping:
    """Stops this host's part of the job, or some of its processes. Not thread-safe.

    on_stage: called after each change of the stage. on_part: called when some processes are asked to end.

    lifecycle: the stages of the present lives; another one after `begin_again`.
    asked_by: who has asked for the stop, if it was a user.
    ordered: the control machine has stopped the job for its own reasons.
    suspended: the control machine has announced a pause in its heartbeats.
    """

    def __init__(
        self, children: Sequence[Child], host_spec: HostSpec, clock: JobClock, control: Control, recall: Recall,
        on_stage: Callable[[], None], on_part: Callable[[], None],
    ) -> None:  # fmt: skip
        self.asked_by = ""
        self.ordered = self.suspended = False
        self._children = children
        self._host_spec = host_spec
        self._clock = clock
        self._control = control
        self._recall = recall
        self._on_stage, self._on_part = on_stage, on_part
        self.lifecycle = self._new_lifecycle()
        self._partial = PartialStop()

    def _new_lifecycle(self) -> Lifecycle:
        return Lifecycle(self._children, self._clock, self._on_stage, self._host_spec.grace)

    def begin_again(self) -> None:
        """All processes of the job begin again, though it was stopped."""
        self.ordered = False
        self.lifecycle, self._partial = self._new_lifecycle(), PartialStop()

    def ask(self, message: Message) -> None:
        """Stop as a message "stop" asks: see the package."""
        lifecycle = self.lifecycle
        who, grace = str(message.get("who", "")), float(message.get("grace", self._host_spec.grace))
        names = message.get("processes")
        if names is not None:
            self._partial.terminate((child for child in self._children if child.name in names), grace)
            self._on_part()
            return
        if not message.get("again"):
            self._recall.forbid()
        self._recall.expect()
        self.ordered |= not who
        is_new = who and not self.asked_by and lifecycle.stage <= Stage.RUNNING
        if is_new:
            self.asked_by = who
            self._ask_processes()
        lifecycle.grace = min(lifecycle.grace, grace) if lifecycle.why else grace
        lifecycle.holding = bool(message.get("hold"))
        by = f" by {who}" if who else ""
        lifecycle.stop(f"was asked to stop{by}", float(message.get("delay", 0)))
        if is_new:
            self._control.send_durable({"type": "stopping", "who": who, "grace": grace})

    def ask_by_signal(self, who: str) -> None:
        """Stop as `who` asks. No control machine reports when the workers of other hosts have ended."""
        if self.lifecycle.stage <= Stage.RUNNING:
            self.ask({"who": who, "hold": self._is_needed_elsewhere})

    def kill(self) -> None:
        """Stop at once."""
        self._recall.forbid()
        self.lifecycle.stop("was asked to stop at once", 0)
        self.lifecycle.kill()

    def check(self, now: float) -> None:
        """Call regularly: look for signals that ask processes to end, and for a lost control machine; do what is due.
        now: time.monotonic seconds.
        """
        for child in self._children:
            if (name := child.life.events.signalled) and not child.asked:
                self.ask_by_signal(f"{name} to {child.name}")
        self._check_lease(now)
        self._partial.check(now)
        self.lifecycle.check(now)
        self._report_cut_off()

    def _ask_processes(self) -> None:
        """Ask the processes that wait for a stop to end by themselves."""
        self.lifecycle.is_asked = True
        self._host_spec.stop_files.ask()

    @property
    def _is_needed_elsewhere(self) -> bool:
        """Whether workers of other hosts may need the servers of this one: without any of its own, or with some that
        end by themselves, together with them.
        """
        awaited = any(child.life.events.awaits_stop for child in self._children)
        return awaited or all(child.task.serves for child in self._children)

    def _check_lease(self, now: float) -> None:
        lease, control = self._host_spec.lease, self._control
        if self.suspended and control.connected:
            control.heard = now
        if lease and (control.connected or control.lost) and now - control.heard > lease:
            how = "disconnected and did not reconnect" if control.lost else "has been silent"
            self._stop_alone(f"the control machine {how} for {lease:g} s")

    def _stop_alone(self, why: str) -> None:
        """Stop without a control machine, which would report when the workers of other hosts have ended. Servers that
        these workers may need wait until all workers have left, or the grace is over.
        """
        self._recall.forbid()
        if self.lifecycle.stage <= Stage.RUNNING:
            self.lifecycle.holding = self._is_needed_elsewhere
            self._ask_processes()
        self.lifecycle.stop(why, 0)

    def _report_cut_off(self) -> None:
        if names := self.lifecycle.cut_off:
            how = f"did not end within {self.lifecycle.grace:g} s (--grace) and had to be killed"
            if self.lifecycle.stage is Stage.KILLING:
                how = "ran when all was to be killed at once"
            message = f"{', '.join(names)} {how}; its last file may be incomplete"
            self._control.send_durable({"type": "warning", "message": message})
            self.lifecycle.cut_off = ()
