"""The connection to one agent. It reconnects when it breaks. Messages of an agent are delivered exactly once; the next
agent, after one was killed, tells the newest events again.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from types import FrameType
from typing import Any

from geomx_cli.agent.host_spec import HostSpec
from geomx_cli.core.errors import CheckFailed, GeomxError, HostUnreachable, TimedOut, WrongHostKey
from geomx_cli.core.jsonlines import decode
from geomx_cli.hosts import Connector
from geomx_cli.jobs.actions.streams import HostStream

__all__ = [
    "ANSWER_LIMIT", "AgentConnection", "Broken", "Gone", "Inbox", "InboxMessage", "Interrupt", "JsonObject",
    "Mended", "Notice", "Send", "Suspend", "interrupts_raised", "interrupts_to", "suspends_to",
]  # fmt: skip

# What reaches who follows a job: messages of agents, news of the connections to them, and signals of the user.


class InboxMessage:
    """Base class of the messages in the inbox that no host has sent."""


@dataclass(frozen=True)
class Gone(InboxMessage):
    """The agent no longer exists or is unreachable."""

    how: str
    reachable: bool = True


@dataclass(frozen=True)
class Broken(InboxMessage):
    """The connection broke; reconnection is attempted for `limit` seconds (0: without limit)."""

    why: str
    limit: float = 0.0


@dataclass(frozen=True)
class Mended(InboxMessage):
    """The connection is restored."""


@dataclass(frozen=True)
class Notice(InboxMessage):
    """A warning about the connection."""

    message: str


@dataclass(frozen=True)
class Interrupt(InboxMessage):
    """The user asks for the job's end, `by` Ctrl-C or the signal of this name."""

    by: str


@dataclass(frozen=True)
class Suspend(InboxMessage):
    """The user suspends this process (Ctrl-Z), not the job."""


JsonObject = dict[str, Any]
Send = Callable[[str, JsonObject], object]
"""Sends a message to the agent on a host, by its name."""
Inbox = SimpleQueue[tuple[str, JsonObject | InboxMessage]]
"""Messages from hosts, by host name, and local events."""


_STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # besides Ctrl-C; batch systems send the first two


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], object], *numbers: int) -> Iterator[None]:
    """Handle these signals by `handler`, and as before afterwards."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _not_ignored(*numbers: int) -> Iterator[int]:
    return (number for number in numbers if signal.getsignal(number) != signal.SIG_IGN)


def interrupts_raised() -> AbstractContextManager[None]:
    """SIGTERM, SIGUSR1 and SIGHUP raise KeyboardInterrupt, like Ctrl-C, unless the process ignores them. Main thread
    only.
    """
    return _handled(signal.default_int_handler, *_not_ignored(*_STOPS))


def interrupts_to(inbox: Inbox, hear: Callable[[], object] = lambda: None) -> AbstractContextManager[None]:
    """Ctrl-C, and SIGTERM, SIGUSR1 and SIGHUP unless the process ignores them (nohup), put an Interrupt into `inbox`
    and call `hear`, which must not take a lock that the main thread takes. Main thread only.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        inbox.put(("", Interrupt(by)))  # SimpleQueue.put may be called from a signal handler
        hear()

    return _handled(handle, signal.SIGINT, *_not_ignored(*_STOPS))


def suspends_to(inbox: Inbox) -> AbstractContextManager[None]:
    """Ctrl-Z puts a Suspend into `inbox`, unless the process ignores SIGTSTP. Main thread only."""
    return _handled(lambda number, frame: inbox.put(("", Suspend())), *_not_ignored(signal.SIGTSTP))


ANSWER_LIMIT = 20.0  # seconds for an agent's first message
_AGAIN = 1.0
_ENDING = 1.0  # seconds for a relay to end after EOF on its input; the relay of a stopped agent does not end


class AgentConnection:
    """A thread reads the agent's messages and puts them into `inbox`, with the host's name.

    When the stream ends, the thread tries to reattach at once and then at most every second, for the duration of the
    agent's lease (without limit if the lease is unlimited). The inbox also receives Broken and Mended on disconnect and
    reconnect, a Notice if the machine presents a wrong host key meanwhile, and Gone when the agent no longer exists or
    the lease has expired. An agent that sends "replaced" has switched to another control machine: the connection is
    closed. Malformed messages are counted in `ignored`; a line of more than 16 MiB ends the connection with Gone.
    `send` is thread-safe.
    """

    def __init__(self, host: Connector, host_spec: HostSpec, inbox: Inbox) -> None:
        self.host = host
        self.host_spec = host_spec
        self.over = False  # nothing is left to end: all has ended, or another process is responsible
        self.greeted = False  # a running agent has answered
        self.seen = 0  # sequence number of the last numbered message
        self.ignored = 0
        self._inbox = inbox
        self._stream: HostStream | None = None
        self._reader: threading.Thread | None = None
        self._sending = threading.Lock()
        self._answered = threading.Event()
        self._closing = threading.Event()
        self._heard = 0.0
        self._broken = 0.0  # time of the disconnect; 0 while connected
        self._absent = False
        self._wrong_key = False  # the wrong host key has been reported
        self._done = False

    def start(self) -> None:
        """Start the agent and wait for its answer. Raises HostUnreachable with its last output if it ends
        instead, TimedOut if it does not answer.
        """
        self._open("run")

    def attach(self) -> None:
        """Connect to a running agent; one that has ended sends its final messages, and `greeted` remains False. Raises
        as `start` does, and CheckFailed if it was killed.
        """
        self._open("attach")

    @property
    def answered(self) -> bool:
        """Whether the agent has sent its first message, or has ended without one."""
        return self._answered.is_set()

    def send(self, message: JsonObject) -> None:
        """Send `message` to the agent; drop it if the connection is down."""
        with self._sending:
            if self._stream is not None:
                with suppress(OSError):
                    self._stream.send(message)

    def silence(self) -> float:
        """Seconds since the last message from the agent, excluding time allowed for reconnecting."""
        if not self._broken:
            return time.monotonic() - self._heard
        lease = self.host_spec.lease
        return max(0.0, time.monotonic() - self._broken - lease) if lease else 0.0

    def absence(self) -> float:
        """Seconds since the connection broke; 0 while it is up."""
        return time.monotonic() - self._broken if self._broken else 0.0

    def close(self) -> None:
        """Close the connection; the agent keeps running."""
        self._closing.set()
        if self._stream is not None:  # without the lock: `send` may block on an agent that does not read
            self._stream.close()
        if self._reader is not None:
            self._reader.join(_ENDING)

    def _open(self, verb: str) -> None:
        self._connect(verb)
        self._reader = threading.Thread(target=self._follow, name=f"agent {self.host.name}", daemon=True)
        self._reader.start()
        if not self._answered.wait(ANSWER_LIMIT):
            what = f"the agent on host {self.host.name} did not answer within {ANSWER_LIMIT:g} s"
            log = f"{self.host_spec.directory}/agent.log"
            raise TimedOut(what, f"see {log} there, and whether that machine is overloaded or its disk hangs")
        if self._absent:
            raise CheckFailed(f"no agent of the job runs on host {self.host.name}", "look for what killed it")
        if not self._heard:
            if words := self._errors():
                hint = f"its log is {self.host_spec.directory}/agent.log"
                raise CheckFailed(f"the agent on host {self.host.name} did not start: {words}", hint)
            raise HostUnreachable(f"the connection to host {self.host.name} ended", "launch again")

    def _connect(self, verb: str) -> None:
        stream = HostStream(self.host, verb, self.host_spec.directory)
        with self._sending, suppress(OSError):
            self._stream = stream
            stream.send({"type": "hello", "seen": self.seen})
            if self._closing.is_set():
                stream.close()

    def _follow(self) -> None:
        try:
            self._read()
            self._answered.set()
            if self._heard:
                self._reconnect()
        except CheckFailed as error:
            self._put(Gone(f"cannot be understood: {error.message}"))
        finally:
            self._answered.set()

    def _reconnect(self) -> None:
        while not self._is_over():
            if not self._broken:
                self._broken = time.monotonic()
                self._put(Broken(self._errors(), self.host_spec.lease))
            began = time.monotonic()
            if self._connected_again():
                self._read()
            if self._broken and not self._is_over():
                if self.silence() > 0:  # only after an attempt: this machine may have been suspended
                    how = f"cannot be reached: its connection broke, for more than {self.host_spec.lease:g} s"
                    self._put(Gone(how, reachable=False))
                    return
                self._closing.wait(_AGAIN)
            elif not self._is_over():  # an agent may answer, and end the connection each time
                self._closing.wait(max(0.0, began + _AGAIN - time.monotonic()))
        if self._absent:
            self._put(Gone("died: its connection ended"))

    def _connected_again(self) -> bool:
        try:
            self._connect("attach")
        except WrongHostKey as error:
            if not self._wrong_key:
                self._wrong_key = True
                self._put(Notice(str(error)))
            return False
        except (GeomxError, OSError):
            return False
        self._wrong_key = False
        return True

    def _is_over(self) -> bool:
        return self.over or self._done or self._absent or self._closing.is_set()

    def _read(self) -> None:
        """Read messages until the stream ends. Raises CheckFailed for an unterminated line."""
        assert self._stream is not None
        for line in self._stream.objects(f"the agent on host {self.host.name}"):
            try:
                message = decode(line)
            except ValueError:
                self.ignored += 1
            else:
                self._receive(message)

    def _receive(self, message: JsonObject) -> None:
        kind, number = message.get("type"), message.get("n", 0)
        if not isinstance(kind, str) or type(number) is not int or number < 0:
            self.ignored += 1
            return
        if kind == "absent":
            self._absent = True
            return
        self._heard = time.monotonic()
        self.greeted |= kind == "hello"
        self._answered.set()
        if self._broken:
            self._broken = 0.0
            self._put(Mended())
        if 0 < number <= self.seen:
            return
        self.seen = max(self.seen, number)
        self._done |= kind == "done"
        self.over |= kind == "replaced" or (kind == "done" and not message.get("left"))
        self._put(message)

    def _put(self, message: JsonObject | InboxMessage) -> None:
        self._inbox.put((self.host.name, message))

    def _errors(self) -> str:
        return self._stream.errors() if self._stream is not None else ""
