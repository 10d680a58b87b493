"""The agents of a job, as the control machine manages them: start, exchange messages, verify termination."""

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue

from geomx_cli.agent.host_spec import FileDigest, HostSpec
from geomx_cli.core.conventions import module_command
from geomx_cli.core.errors import CheckFailed, DoneInPart, GeomxError, Interrupted
from geomx_cli.core.root_cause import describe_status
from geomx_cli.core.units import counted
from geomx_cli.core.untrusted import last_line
from geomx_cli.hosts import Connector, File, everywhere
from geomx_cli.jobs.actions.agent_connection import ANSWER_LIMIT, AgentConnection, Gone, Inbox, JsonObject

__all__ = ["AgentPool"]

_HEARTBEAT = 1.0
_ENDING = 2.0
_AGAIN = 0.5
_CLEANUP_LIMIT = 20.0
_PATIENCE = 3.0  # seconds before a wait is reported


class AgentPool:
    """One agent per host. One thread per agent reads, and one sends heartbeats, so that a blocked terminal does not end
    the job. `close` leaves no process, key file or socket on any reachable host; it is safe after any failure.

    connections: by host.
    inbox: has the messages of agents, with the host's name, and this machine's own, see InboxMessage.
    note: called with warnings, and from a thread with the reason when `start` or `close` waits for long.
    """

    def __init__(
        self,
        hosts: Mapping[str, Connector],
        host_specs: Mapping[str, HostSpec],
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.inbox: Inbox = SimpleQueue()
        self._note = note
        self.connections = {name: AgentConnection(hosts[name], spec, self.inbox) for name, spec in host_specs.items()}
        self._touched: set[str] = set()  # hosts that may hold files of the job
        self.interrupted = False
        self._started = False  # agents may start their processes
        self._copied: SimpleQueue[None] = SimpleQueue()  # has an item when copying is done or interrupted
        self._ending: dict[str, threading.Thread] = {}
        self._problems: list[str] = []
        self._closing = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeats", daemon=True)

    def start(self, files: Mapping[str, Mapping[str, File]]) -> None:
        """Copy each host's files (by path), then start all agents and let them begin together. Raises the hosts'
        errors, and Interrupted if `interrupt` is called while files are copied.
        """

        def put(connection: AgentConnection) -> None:
            try:
                self._put(connection, files.get(connection.host.name, {}))
            except OSError as error:
                what = f"cannot start on host {connection.host.name}: {error.strerror or error}"
                raise CheckFailed(what, f"make room in {connection.host_spec.job_dir}, or choose another") from None

        with self._interruptible():
            everywhere(put, self.connections.values())
        self._heart.start()  # agents that are ready early wait for the others
        with self._telling(self._unanswered):
            everywhere(AgentConnection.start, self.connections.values())
        self._started = True
        self.broadcast({"type": "start"})

    def interrupt(self) -> None:
        """End `start` while it copies files; otherwise only note it. Safe to call from a signal handler, even within
        itself: an Event would wait for its own lock then.
        """
        self.interrupted = True
        self._copied.put(None)

    def follow(self, hosts: Iterable[str]) -> bool:
        """Take over the running agents of `hosts`. An agent that was killed, and that no other agent follows, produces
        a Gone. Return False if an agent has ended by itself; then its status has its reports. Raises the hosts' errors.
        """
        connections = [self.connections[name] for name in hosts]

        def attach(connection: AgentConnection) -> None:
            self._touched.add(connection.host.name)
            try:
                connection.attach()
            except CheckFailed:
                killed.add(connection)
                self.inbox.put((connection.host.name, Gone("died")))

        killed: set[AgentConnection] = set()
        everywhere(attach, connections)
        self._started = True
        self._heart.start()
        return all(connection.greeted or connection in killed for connection in connections)

    def send(self, host: str, message: JsonObject) -> None:
        """Send `message` to the agent on a host."""
        self.connections[host].send(message)

    def broadcast(self, message: JsonObject) -> None:
        """Send `message` to every agent; an agent that cannot be reached is detected by its silence."""
        for connection in self.connections.values():
            connection.send(message)

    def give_up(self, host: str) -> None:
        """Begin to end the dead or hung agent of `host` and its leftover processes; `close` waits for that."""
        if host not in self._ending:
            self._ending[host] = threading.Thread(target=self._clean_up, args=(self.connections[host],), daemon=True)
            self._ending[host].start()

    def leave(self) -> None:
        """Disconnect from all agents; they continue for their lease."""
        for connection in self.connections.values():
            connection.over = True

    def close(self) -> list[str]:
        """End everything that still runs; note and return descriptions of the errors."""
        self._closing.set()
        for host in self._touched:
            self.give_up(host)
        with self._telling(self._unended):
            for ending in self._ending.values():
                ending.join()
        everywhere(AgentConnection.close, self.connections.values())
        if self._heart.is_alive():
            self._heart.join(_ENDING)
        for problem in self._problems:
            self._note(f"warning: {problem}")
        for name, connection in self.connections.items():
            if connection.ignored:
                self._note(f"warning: host {name} sent {counted(connection.ignored, 'message')} that were invalid")
        return self._problems

    def _clean_up(self, connection: AgentConnection) -> None:
        try:
            if not connection.over:
                _end_leftovers(connection.host, connection.host_spec.directory)
                connection.over = True
        except (GeomxError, OSError) as error:
            self._problems.append(str(error))

    def _unanswered(self) -> str:
        names = ", ".join(name for name, connection in self.connections.items() if not connection.answered)
        return f"waiting for the agent on {names} to answer, for {ANSWER_LIMIT:g} s at most" if names else ""

    def _unended(self) -> str:
        names = ", ".join(name for name, ending in self._ending.items() if ending.is_alive())
        return f"waiting for {names}, to end what is left there" if names else ""

    @contextmanager
    def _telling(self, what: Callable[[], str]) -> Iterator[None]:
        """Report `what` is being waited for, once the wait is long. "" is not reported: the wait has just ended."""

        def tell() -> None:
            if text := what():
                self._note(text)

        timer = threading.Timer(_PATIENCE, tell)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Within, an interrupt closes the hosts' connections, which ends pending operations."""
        over = threading.Event()

        def let_go() -> None:
            self._copied.get()
            while not over.is_set():  # repeatedly: a host may have been about to reconnect
                everywhere(lambda connection: connection.host.close(), self.connections.values())
                over.wait(_AGAIN)

        thread = threading.Thread(target=let_go, name="interrupts", daemon=True)
        thread.start()
        try:
            yield
        except (GeomxError, OSError):
            if not self.interrupted:
                raise
        finally:
            over.set()
            self._copied.put(None)
            thread.join()
        if self.interrupted:
            raise Interrupted("interrupted while files were copied", "nothing was started")

    def _put(self, connection: AgentConnection, files: Mapping[str, File]) -> None:
        if self.interrupted:
            return
        digests = {path: FileDigest(file.mode, hashlib.sha256(file.data).hexdigest()) for path, file in files.items()}
        host_spec = replace(connection.host_spec, files=digests)
        connection.host.put(f"{host_spec.directory}/agent.json", host_spec.encode())
        self._touched.add(connection.host.name)
        for path, file in files.items():
            if self.interrupted:
                return
            connection.host.put(path, file.data, file.mode)

    def _beat(self) -> None:
        while not self._closing.wait(_HEARTBEAT):
            for connection in self.connections.values():
                connection.send({"type": "heartbeat", "seen": connection.seen})
                if self._started and not connection.seen:  # the connection may have broken under the first "start"
                    connection.send({"type": "start"})


def _end_leftovers(host: Connector, directory: str) -> None:
    """End the leftover processes of a killed or hung agent on `host`, and remove its key files and sockets.
    `directory`: the agent's directory on that host.

    Raises DoneInPart if something cannot be ended, HostUnreachable or TimedOut if the host does not answer.
    """
    done = host.run(module_command(host.python, "geomx_cli.agent", "clean-up", directory), limit=_CLEANUP_LIMIT)
    if done.status == 0:
        return
    pids = done.output.decode(errors="replace").strip()
    if done.status == 1 and pids.replace(" ", "").isdecimal():
        raise DoneInPart(f"processes still running on {host.name}: {pids}", "end them by hand")
    words = last_line(done.errors.decode(errors="replace"), describe_status(done.status))
    hint = f"see that {host.python} -m geomx_cli.agent works there, then run geomx stop"
    raise DoneInPart(f"could not check {host.name} for leftover processes: {words}", hint)
