"""The agents of a job, seen from the control machine: start them, speak with them, and be sure they are gone.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from geomx_cli.agent.assignment import Assignment
from geomx_cli.errors import CheckFailed, GeomxError, HostUnreachable
from geomx_cli.hosts import Channel, Host
from geomx_cli.job import Job

__all__ = ["Fleet", "Inbox", "Message"]

Message = dict[str, Any]
Inbox = SimpleQueue[tuple[str, Message]]

_AT_ONCE = 16
_LISTEN_LIMIT = 10.0
_HEARTBEAT = 1.0


@dataclass
class _Agent:
    host: Host
    assignment: Assignment
    channel: Channel | None = None
    reader: threading.Thread | None = None
    heard: float = 0.0
    over: bool = False  # it has said that nothing of its is left
    began: bool = False  # files may lie on its host
    sending: threading.Lock = field(default_factory=threading.Lock)


class Fleet:
    """One agent for each host. What they say comes into `inbox`, with the host's name; "gone" when a stream
    ends.

    A thread for each agent reads, and one sends heartbeats, so that a blocked terminal does not end the job.
    `close` leaves no process, key file or socket on any host that can be reached; it is safe after any
    failure.
    """

    def __init__(self, job: Job, hosts: Mapping[str, Host], assignments: Mapping[str, Assignment]) -> None:
        self.inbox: Inbox = SimpleQueue()
        self._job = job
        self._agents = {name: _Agent(hosts[name], assignment) for name, assignment in assignments.items()}
        self._closing = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeats", daemon=True)

    def start(self, files: Mapping[str, Mapping[str, bytes]]) -> None:
        """Put each host's files, start all agents, connect, and let them begin. Raises what the first host
        raised.
        """

        def start(agent: _Agent) -> None:
            try:
                self._start(agent, files.get(agent.host.name, {}))
            except OSError as error:
                what = f"cannot start on host {agent.host.name}: {error.strerror or error}"
                raise CheckFailed(what, f"make room in {self._job.directory}, or choose another") from None

        self._everywhere(start, self._agents.values())
        self._heart.start()
        self.broadcast({"type": "start"})

    def broadcast(self, message: Message, *, but: Iterable[str] = ()) -> None:
        """Tell every agent; one that cannot be told is seen by its silence."""
        for name, agent in self._agents.items():
            if agent.channel is not None and name not in but:
                with suppress(OSError), agent.sending:
                    agent.channel.send(json.dumps(message).encode() + b"\n")

    def silence(self, host: str) -> float:
        """Seconds since the agent of `host` was last heard."""
        return time.monotonic() - self._agents[host].heard

    def give_up(self, host: str) -> None:
        """End the agent of `host`, which died or hangs, and what it has left. Raises as Job.reap does."""
        agent = self._agents[host]
        if not agent.over:
            self._job.reap(agent.host)
            agent.over = True

    def close(self) -> list[str]:
        """End everything that still runs; what went wrong with it, in words."""
        self._closing.set()
        problems: list[str] = []

        def finish(agent: _Agent) -> None:
            try:
                if agent.began:
                    self.give_up(agent.host.name)
            except (GeomxError, OSError) as error:
                problems.append(str(error))
            if agent.channel is not None:
                agent.channel.close()
            if agent.reader is not None:
                agent.reader.join()

        self._everywhere(finish, self._agents.values())
        if self._heart.is_alive():
            self._heart.join()
        return problems

    def _everywhere(self, do: Callable[[_Agent], None], agents: Iterable[_Agent]) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            futures = [pool.submit(do, agent) for agent in agents]
        for future in futures:
            future.result()

    def _start(self, agent: _Agent, files: Mapping[str, bytes]) -> None:
        host, directory = agent.host, str(self._job.host_directory(agent.host.name))
        host.put(f"{directory}/agent.json", agent.assignment.encode())
        agent.began = True
        for path, content in files.items():
            host.put(path, content)
        log = f"{directory}/agent.log"
        pid = host.start([host.python, "-m", "geomx_cli.agent", directory], log=log)
        try:
            agent.channel = host.connect(agent.assignment.socket, pid, _LISTEN_LIMIT)
        except ConnectionError as error:
            said = host.get(log).decode(errors="replace").strip().splitlines()
            words = said[-1] if said else "it said nothing"
            raise HostUnreachable(f"{error}: {words}", f"see {log}") from None
        agent.heard = time.monotonic()
        agent.reader = threading.Thread(target=self._read, args=(agent, agent.channel), daemon=True)
        agent.reader.start()

    def _read(self, agent: _Agent, channel: Channel) -> None:
        name, rest = agent.host.name, b""
        while data := channel.receive():
            agent.heard = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                agent.over |= message["type"] == "done" and not message["left"]
                self.inbox.put((name, message))
        self.inbox.put((name, {"type": "gone"}))

    def _beat(self) -> None:
        while not self._closing.wait(_HEARTBEAT):
            self.broadcast({"type": "heartbeat"})
