"""The line to one agent: it is mended when it breaks, and nothing that the agent says is lost or comes twice."""

import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from geomx_cli.agent.host_spec import HostSpec
from geomx_cli.core.errors import CheckFailed, GeomxError, HostUnreachable, TimedOut, WrongHostKey
from geomx_cli.core.jsonlines import decode, encode, lines
from geomx_cli.core.module_command import module_command
from geomx_cli.core.untrusted import last_line
from geomx_cli.hosts import Channel, Connector
from geomx_cli.jobs.actions.local_events import Broken, Gone, LocalEvent, Mended, Notice

__all__ = ["ANSWER_LIMIT", "AgentConnection", "Inbox", "JsonObject"]

JsonObject = dict[str, Any]
Inbox = SimpleQueue[tuple[str, JsonObject | LocalEvent]]
"""What hosts have said, by name, and what has happened here."""

ANSWER_LIMIT = 20.0  # seconds for an agent to say its first word
_AGAIN = 1.0
_ENDING = 1.0  # for a relay to end with its input: that of an agent which is stopped does not


class AgentConnection:
    """What the agent says is put into `inbox`, with the host's name; a thread reads.

    When the stream ends, the thread tries at once and then each second to attach again, for as long as the agent's
    lease (a lease without end: as long as it takes). Besides the agent's messages the inbox gets Broken and Mended for
    that, a Notice where the machine shows a wrong host key meanwhile, and Gone when there is no agent any more or the
    lease is over. An agent that says "replaced" follows another control machine: this connection is over. Messages that
    make no sense are counted in `ignored`; a line of more than 16 MiB ends it all with Gone.
    `send` may be called by any thread.
    """

    def __init__(self, host: Connector, host_spec: HostSpec, inbox: Inbox) -> None:
        self.host = host
        self.host_spec = host_spec
        self.over = False  # there is nothing to be ended: all is, or somebody else sees to it
        self.seen = 0  # the number of the last message that had one
        self.ignored = 0
        self._inbox = inbox
        self._channel: Channel | None = None
        self._reader: threading.Thread | None = None
        self._sending = threading.Lock()
        self._answered = threading.Event()
        self._closing = threading.Event()
        self._heard = 0.0
        self._broken = 0.0  # since when; 0 while the line is whole
        self._absent = False
        self._wrong_key = False  # and that was said
        self._done = False

    def start(self) -> None:
        """Start the agent and wait for its answer; raises HostUnreachable with its last words when it ends
        instead, TimedOut when it does not answer.
        """
        self._begin("run")

    def attach(self) -> None:
        """Connect to an agent that runs; one that is over says its last words. Raises as `start` does."""
        self._begin("attach")

    @property
    def answered(self) -> bool:
        """Whether the agent has said its first word, or has ended without one."""
        return self._answered.is_set()

    def send(self, message: JsonObject) -> None:
        """Tell the agent; what cannot be sent is dropped."""
        data = encode(message)
        with self._sending:
            if self._channel is not None:
                with suppress(OSError):
                    self._channel.send(data)

    def silence(self) -> float:
        """Seconds since the agent was last heard; those in which the line may be mended do not count."""
        if not self._broken:
            return time.monotonic() - self._heard
        lease = self.host_spec.lease
        return max(0.0, time.monotonic() - self._broken - lease) if lease else 0.0

    def absence(self) -> float:
        """Seconds since the line broke; 0 while it is whole."""
        return time.monotonic() - self._broken if self._broken else 0.0

    def close(self) -> None:
        """End the line, not the agent."""
        self._closing.set()
        if self._channel is not None:  # without the lock: `send` may wait for an agent that does not read
            self._channel.close()
        if self._reader is not None:
            self._reader.join(_ENDING)

    def _begin(self, verb: str) -> None:
        self._connect(verb)
        self._reader = threading.Thread(target=self._follow, name=f"agent {self.host.name}", daemon=True)
        self._reader.start()
        if not self._answered.wait(ANSWER_LIMIT):
            what = f"the agent on host {self.host.name} did not answer within {ANSWER_LIMIT:g} s"
            log = f"{self.host_spec.directory}/agent.log"
            raise TimedOut(what, f"see {log} there, and whether that machine is overloaded or its disk hangs")
        if not self._heard:
            if words := self._errors():
                hint = f"its log is {self.host_spec.directory}/agent.log"
                raise CheckFailed(f"the agent on host {self.host.name} did not start: {words}", hint)
            raise HostUnreachable(f"the connection to host {self.host.name} ended", "launch again")

    def _connect(self, verb: str) -> None:
        argv = module_command(self.host.python, "geomx_cli.agent", verb, self.host_spec.directory)
        channel = self.host.open(argv)
        hello = encode({"type": "hello", "seen": self.seen})
        with self._sending, suppress(OSError):
            self._channel = channel
            channel.send(hello)
            if self._closing.is_set():
                channel.close()

    def _follow(self) -> None:
        try:
            self._read()
            self._answered.set()
            if self._heard:
                self._mend()
        except CheckFailed as error:
            self._put(Gone(f"cannot be understood: {error.message}"))
        finally:
            self._answered.set()

    def _mend(self) -> None:
        while not self._is_over():
            if not self._broken:
                self._broken = time.monotonic()
                self._put(Broken(self._errors(), self.host_spec.lease))
            if self._connected_again():
                self._read()
            if self._broken and not self._is_over():
                if self.silence() > 0:  # not before trying: we may have slept
                    how = f"cannot be reached: its connection broke, for more than {self.host_spec.lease:g} s"
                    self._put(Gone(how, reachable=False))
                    return
                self._closing.wait(_AGAIN)
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
        """Until the stream ends. Raises CheckFailed for a line without end."""
        assert self._channel is not None
        for line in lines(self._channel.receive, f"the agent on host {self.host.name}"):
            if line.startswith(b"{"):  # a login shell may have greeted
                try:
                    message = decode(line)
                except ValueError:
                    self.ignored += 1
                else:
                    self._take(message)

    def _take(self, message: JsonObject) -> None:
        kind, number = message.get("type"), message.get("n", 0)
        if not isinstance(kind, str) or type(number) is not int or number < 0:
            self.ignored += 1
            return
        if kind == "absent":
            self._absent = True
            return
        self._heard = time.monotonic()
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

    def _put(self, message: JsonObject | LocalEvent) -> None:
        self._inbox.put((self.host.name, message))

    def _errors(self) -> str:
        return last_line(self._channel.errors(), "") if self._channel is not None else ""
