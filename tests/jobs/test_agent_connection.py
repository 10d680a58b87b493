"""Agents behind SSH, and how they and their messages survive a lost connection."""

import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from reentry import reentered
from sshd import Person, Sshd, make_key

from benchmarks.netns import Namespaces, call
from geomx_cli.agent import processes
from geomx_cli.agent.agent_state import AgentState
from geomx_cli.agent.host_spec import HostSpec, Task
from geomx_cli.core.errors import CheckFailed, Interrupted, InvalidSettings, TimedOut
from geomx_cli.hosts import Channel, Connector, File
from geomx_cli.hosts.local import LocalConnector
from geomx_cli.hosts.ssh.connector import SshConnector
from geomx_cli.jobs.actions.agent_connection import AgentConnection, Gone, Inbox, InboxMessage, interrupts_to
from geomx_cli.jobs.actions.agent_pool import AgentPool

SLEEP = "import signal; signal.pause()"
# Writes the number n as an event once the file go-n exists.
TELLS = (
    "import json, os, time; os.makedirs('events', exist_ok=True); file = open('events/one.jsonl', 'a', buffering=1)\n"
    "for n in range(3):\n"
    "    while not os.path.exists(f'go-{n}'): time.sleep(0.01)\n"
    "    print(json.dumps({'time': time.time(), 'event': 'warning', 'message': str(n)}), file=file)"
)


def as_message(item: dict[str, Any] | InboxMessage) -> dict[str, Any]:
    """A local event in the form of a host's message."""
    return item if isinstance(item, dict) else {"type": type(item).__name__.lower(), **asdict(item)}


class Site:
    """A machine with one agent, and the pool that controls it."""

    machine: Sshd

    def __init__(self, folder: Path, host: Connector, program: str, lease: float) -> None:
        self.host = host
        self.mark = {"GEOMX_JOB": f"line-test-{uuid.uuid4().hex}", "GEOMX_HOST": host.name}
        self.folder = folder / "state"
        self.folder.mkdir(exist_ok=True, parents=True)
        sockets = folder / "s"
        key = str(self.folder / "keys" / "one.key")
        task = Task("one", (sys.executable, "-c", program), {**self.mark, "GEOMX_KEY_FILE": key})
        self.host_spec = HostSpec(
            job=self.mark["GEOMX_JOB"], host=host.name, job_dir=str(self.folder), sockets=str(sockets),
            socket=str(sockets / "agent.sock"), working_dir=str(self.folder), clear=(), tasks=(task,), lease=lease,
        )  # fmt: skip
        self.files = {key: File(b"secret")}
        self.said: list[dict[str, Any]] = []
        self.pool = self.new_pool()

    def new_pool(self) -> AgentPool:
        """Another control machine."""
        return AgentPool({self.host.name: self.host}, {self.host.name: self.host_spec})

    def start(self) -> None:
        """Start the agent and its tasks."""
        self.pool.start({self.host.name: self.files})

    def until(self, kind: str, pool: AgentPool | None = None) -> dict[str, Any]:
        """The next message of this kind; earlier ones, except answers to heartbeats, are kept in `said`."""
        while True:
            _, item = (pool or self.pool).inbox.get(timeout=240)
            message = as_message(item)
            if message["type"] == kind:
                return message
            if message["type"] != "alive":
                self.said.append(message)

    def go(self, number: int) -> None:
        """Let the program write the next number."""
        (self.folder / f"go-{number}").touch()

    @property
    def agent(self) -> int:
        """The agent's pid."""
        state = AgentState.read(Path(self.host_spec.directory))
        assert state is not None
        return state.agent.pid

    def wait_until_clean(self) -> None:
        """Wait until it has no process, key or socket left."""
        end = time.monotonic() + 20
        while processes.marked(self.mark) or processes.with_arguments("run", self.host_spec.directory):
            assert time.monotonic() < end, processes.marked(self.mark)
            time.sleep(0.05)
        assert not (self.folder / "keys").exists()
        assert not Path(self.host_spec.sockets).exists()

    def close(self) -> None:
        """Kill everything."""
        self.pool.close()
        self.host.close()
        processes.kill_all(lambda: processes.with_arguments("run", self.host_spec.directory), 5)
        processes.kill_all(lambda: processes.marked(self.mark), 5)


Start = Callable[..., Site]


@pytest.fixture
def start(tmp_path: Path, machines: Callable[..., Sshd], person: Person) -> Iterator[Start]:
    """Starts a job on a machine, behind SSH unless it is `local`."""
    made: list[Site] = []

    def begin(program: str = SLEEP, *, lease: float = 6, local: bool = False, jump: str = "", **changes: Any) -> Site:
        if local:
            site = Site(tmp_path, LocalConnector("alpha"), program, lease)
        else:
            machine = machines(**changes)
            person.knows(machine)
            (machine.home / ".bashrc").write_text("echo Welcome\n")
            host = SshConnector("alpha", machine.ssh(jump=jump), sys.executable, options=person.options())
            site = Site(tmp_path, host, program, lease)
            site.machine = machine
        made.append(site)
        site.start()
        return site

    yield begin
    for site in made:
        site.close()


def test_job_over_ssh_from_start_to_end(start: Start) -> None:
    site = start(TELLS)
    for number in range(3):
        site.go(number)
    assert site.until("done")["left"] == []
    kinds = [message["type"] for message in site.said]
    assert kinds == ["hello", "started", "event", "event", "event", "ended"]
    assert site.pool.close() == []
    site.wait_until_clean()
    log = Path(site.host_spec.directory, "agent.log").read_text()
    assert log == ""


def test_a_start_that_is_lost_with_the_connection_is_sent_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = AgentConnection.send

    def lose(connection: AgentConnection, message: dict[str, Any]) -> None:
        if message["type"] == "start" and not lost:
            lost.append(site_of[0].machine.cut())
        else:
            send(connection, message)

    lost: list[object] = []
    site_of: list[Site] = []
    monkeypatch.setattr(AgentConnection, "send", lose)
    monkeypatch.setattr(Site, "start", lambda site: (site_of.append(site), site.pool.start({"alpha": site.files})))
    site = start(TELLS)
    site.until("mended")
    for number in range(3):
        site.go(number)
    site.until("started")
    assert site.until("done")["left"] == []
    assert lost


def test_job_goes_on_when_the_connection_breaks(start: Start) -> None:
    site = start(TELLS)
    site.go(0)
    assert site.until("event")["event"]["message"] == "0"
    agent = site.agent
    site.machine.cut()
    site.go(1)
    site.until("broken")
    site.until("mended")
    assert site.until("event")["event"]["message"] == "1"
    site.machine.cut()
    site.go(2)
    assert site.until("done")["left"] == []
    assert site.agent == agent
    told = [message["event"]["message"] for message in site.said if message["type"] == "event"]
    assert told == ["2"]
    numbers = [message["n"] for message in site.said if "n" in message]
    assert numbers == sorted(set(numbers))
    site.wait_until_clean()


def test_a_host_key_that_changes_during_a_job_is_told_at_once(start: Start, tmp_path: Path) -> None:
    site = start(TELLS, lease=60)
    key, own, other = site.machine.key_file, tmp_path / "own", make_key(tmp_path / "other")
    key.rename(own)
    other.rename(key)
    site.machine.vanish()
    site.machine.start()
    warning = site.until("notice")["message"]
    assert all(words in warning for words in ("THE HOST KEY OF", "HAS CHANGED", "a man-in-the-middle attack"))
    own.rename(key)
    site.machine.vanish()
    site.machine.start()
    site.until("mended")
    assert "notice" not in [message["type"] for message in site.said]  # not sent twice
    for number in range(3):
        site.go(number)
    assert site.until("done")["left"] == []


@pytest.fixture
def far(tmp_path: Path) -> Iterator[tuple[Namespaces, str]]:
    """A namespace called "far", connected to ours by a veth pair, and its address. Needs root."""
    spaces, net = Namespaces(), f"10.97.{os.getpid() % 250}"
    try:
        spaces.add("far")
        ours = f"gx{os.getpid()}"
        call(["ip", "link", "add", ours, "type", "veth", "peer", "name", "net0", "netns", spaces.name("far")])
        call(["ip", "address", "add", f"{net}.1/24", "dev", ours])
        call(["ip", "link", "set", ours, "up"])
        spaces.configure("far", [f"address add {net}.2/24 dev net0", "link set net0 up", "link set lo up"])
        yield spaces, f"{net}.2"
    finally:
        spaces.close()


def test_job_outlives_a_network_that_loses_everything_for_a_while(
    start: Start, far: tuple[Namespaces, str], machines: Callable[..., Sshd], person: Person
) -> None:
    spaces, address = far
    person.knows(gate := machines("gate"))  # the connection to the gate stays up
    site = start(TELLS, lease=40, jump=gate.name, address=address, namespace=spaces.name("far"))
    site.go(0)
    site.until("event")
    nft = spaces.command("far", ["nft", "-f", "-"])
    chain = "add chain inet lost input { type filter hook input priority 0; policy drop; }"
    call(nft, lines=["add table inet lost", chain, ""])
    site.go(1)
    site.until("broken")
    call(nft, lines=["flush ruleset", ""])
    site.until("mended")
    site.go(2)
    assert site.until("done")["left"] == []
    told = [message["event"]["message"] for message in site.said if message["type"] == "event"]
    assert told == ["1", "2"]


def test_end_while_nobody_listens_is_told_later(start: Start) -> None:
    site = start(TELLS)
    site.go(0)
    site.until("event")
    site.machine.vanish()
    site.go(1)
    site.go(2)
    site.wait_until_clean()
    site.machine.start()
    assert site.until("done")["left"] == []
    told = [message["event"]["message"] for message in site.said if message["type"] == "event"]
    assert told == ["1", "2"]
    assert [message["status"] for message in site.said if message["type"] == "ended"] == [0]


def test_lease_that_is_over_ends_everything(start: Start) -> None:
    site = start(lease=1.5)
    site.until("started")
    site.machine.vanish()
    gone = site.until("gone")
    assert gone["how"] == "cannot be reached: its connection broke, for more than 1.5 s"
    site.wait_until_clean()
    problems = site.pool.close()
    assert len(problems) == 1 and "refuses the connection" in problems[0]


def test_agent_without_lease_waits_for_ever_and_is_taken_over(start: Start) -> None:
    site = start(TELLS, lease=0)
    site.until("started")
    older, site.pool = site.pool, site.new_pool()
    site.pool.follow(["alpha"])
    site.until("replaced", older)
    assert older.close() == []
    site.go(0)
    assert site.until("event")["event"]["message"] == "0"
    site.pool.leave()
    assert site.pool.close() == []
    assert processes.marked(site.mark) != []
    site.pool = site.new_pool()
    site.pool.follow(["alpha"])
    hello = site.until("hello")
    assert hello["status"]["processes"]["one"]["state"] == "running"
    site.pool.broadcast({"type": "stop"})
    assert site.until("done")["why"] == "was asked to stop"
    site.wait_until_clean()


@pytest.mark.parametrize("local", [False, True])
def test_killed_agent_is_not_waited_for(start: Start, local: bool) -> None:
    site = start(lease=60, local=local)
    site.until("started")
    os.kill(site.agent, signal.SIGKILL)
    assert site.until("gone")["how"] == "died: its connection ended"
    assert site.pool.close() == []
    site.wait_until_clean()


def test_killed_relay_is_replaced_on_this_machine(start: Start) -> None:
    site = start(lease=6, local=True)
    site.until("started")
    relays = [who for who in processes.with_arguments("run", site.host_spec.directory) if who.pid != site.agent]
    processes.send_signal(relays, signal.SIGKILL)
    site.until("broken")
    site.until("mended")
    site.pool.broadcast({"type": "stop"})
    assert site.until("done")["left"] == []
    assert site.pool.close() == []
    site.wait_until_clean()


@pytest.mark.processes
def test_agent_that_does_not_start_says_why(tmp_path: Path) -> None:
    site = Site(tmp_path, LocalConnector("alpha"), SLEEP, 6)
    Path(site.host_spec.sockets).mkdir(mode=0o755)
    with pytest.raises(CheckFailed, match=r"agent on host alpha did not start: .* is not a folder that only you"):
        site.start()
    assert site.pool.close() == []
    assert json.loads(Path(site.host_spec.directory, "agent.json").read_text())["job"] == site.mark["GEOMX_JOB"]
    site.close()


@pytest.mark.processes
def test_agent_that_says_nothing_is_waited_for_aloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geomx_cli.jobs.actions.agent_connection.ANSWER_LIMIT", 1.0)
    monkeypatch.setattr("geomx_cli.jobs.actions.agent_pool._PATIENCE", 0.2)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *clean-up*) exit 0;; esac; exec sleep 100\n')
    python.chmod(0o700)
    site = Site(tmp_path, LocalConnector("alpha", str(python)), SLEEP, 6)
    notes: list[str] = []
    pool = AgentPool({"alpha": site.host}, {"alpha": site.host_spec}, notes.append)
    with pytest.raises(TimedOut, match="agent on host alpha did not answer within 1 s") as caught:
        pool.start({})
    assert "agent.log" in caught.value.hint
    assert notes == ["waiting for the agent on alpha to answer, for 20 s at most"]
    pool.close()
    site.close()


@pytest.mark.processes
def test_file_that_was_changed_on_the_way_is_refused(tmp_path: Path) -> None:
    site = Site(tmp_path, LocalConnector("alpha"), SLEEP, 6)

    class Careless(LocalConnector):
        def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
            super().put(path, data[:3] if path.endswith(".key") else data, mode)

    site.host = Careless("alpha")
    site.pool = site.new_pool()
    with pytest.raises(CheckFailed, match=r"one\.key differs from what was copied"):
        site.start()
    site.close()


@pytest.mark.processes
def test_agents_start_when_all_hosts_have_their_files(tmp_path: Path) -> None:
    quick = Site(tmp_path / "quick", LocalConnector("alpha"), SLEEP, 6)
    early: list[object] = []

    class Slow(LocalConnector):
        def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
            end = time.monotonic() + 1
            while not early and time.monotonic() < end:
                early.extend(processes.with_arguments("run", quick.host_spec.directory))
                time.sleep(0.05)
            super().put(path, data, mode)

    slow = Site(tmp_path / "slow", Slow("beta"), SLEEP, 6)
    sites = {"alpha": quick, "beta": slow}
    given = {name: site.host_spec for name, site in sites.items()}
    pool = AgentPool({name: site.host for name, site in sites.items()}, given)
    try:
        pool.start({name: site.files for name, site in sites.items()})
        assert early == []
        quick.until("started", pool)
        quick.until("started", pool)
    finally:
        assert pool.close() == []
        quick.close()
        slow.close()


def test_interrupt_ends_the_copying_of_files(tmp_path: Path, machines: Callable[..., Sshd], person: Person) -> None:
    person.knows(machine := machines())
    host = SshConnector("alpha", machine.ssh(), sys.executable, options=person.options())
    site = Site(tmp_path, host, SLEEP, 6)
    large = site.folder / "large"
    site.files[str(large)] = File(bytes(64 << 20))

    def interrupt() -> None:
        while not any(part.stat().st_size for part in site.folder.glob("large*")):
            time.sleep(0.01)
        for pid in machine.sessions():
            os.kill(pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with interrupts_to(site.pool.inbox, site.pool.interrupt), pytest.raises(Interrupted):
        site.start()
    thread.join()
    assert site.pool.close() == []
    assert not large.exists() and not (site.folder / "keys").exists()
    site.close()


def test_an_interrupt_within_another(start: Start) -> None:
    site = start(local=True)
    assert reentered(site.pool.interrupt)
    assert site.pool.interrupted


def test_letting_go_of_an_agent_that_is_stopped(start: Start) -> None:
    site = start(local=True)
    site.until("started")
    os.kill(site.agent, signal.SIGSTOP)
    site.pool.leave()
    closing = threading.Thread(target=site.pool.close, daemon=True)
    closing.start()
    closing.join(10)
    os.kill(site.agent, signal.SIGCONT)
    assert not closing.is_alive()


def _line(folder: Path, program: str) -> tuple[AgentConnection, Inbox]:
    """A connection to a program in place of an agent."""
    python = folder / "python"
    python.write_text(f"#!{sys.executable}\nimport sys\n{program}\n")
    python.chmod(0o700)
    host_spec = HostSpec(
        job="", host="alpha", job_dir=str(folder), sockets="", socket="", working_dir="", clear=(), tasks=()
    )
    inbox = Inbox()
    return AgentConnection(LocalConnector("alpha", str(python)), host_spec, inbox), inbox


@pytest.mark.processes
def test_messages_that_make_no_sense_are_ignored(tmp_path: Path) -> None:
    words = [
        '{"type": "hello"}', '{"type": "event", "n": "1"}', '{"type": "event", "n": true}', '{"n": 5}', '{"type": []}',
        "{broken", '{"a":' * 100_000, '{"type": "event", "n": 1}', '{"type": "done", "n": 2}',
    ]  # fmt: skip
    line, inbox = _line(tmp_path, f"print(*{words!r}, sep='\\n')")
    line.start()
    assert [inbox.get(timeout=240)[1]["type"] for _ in range(3)] == ["hello", "event", "done"]
    assert line.ignored == 6 and line.seen == 2
    line.close()
    line.host.close()


@pytest.mark.processes
def test_an_agent_that_ends_each_connection_at_once_is_asked_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[float] = []
    open_ = LocalConnector.open

    def open_once_more(host: LocalConnector, argv: Sequence[str]) -> Channel:
        opened.append(time.monotonic())
        return open_(host, argv)

    monkeypatch.setattr(LocalConnector, "open", open_once_more)
    line, inbox = _line(tmp_path, "print('{\"type\": \"hello\"}')")
    line.start()
    while len(opened) < 4:
        inbox.get(timeout=240)
    line.close()
    line.host.close()
    assert opened[3] - opened[1] > 1.5


@pytest.mark.processes
def test_line_without_end_ends_it_all(tmp_path: Path) -> None:
    line, inbox = _line(tmp_path, "print('{\"type\": \"hello\"}'); print('x' * (17 << 20), end=''); sys.stdin.read()")
    line.start()
    assert inbox.get(timeout=240)[1]["type"] == "hello"
    gone = "cannot be understood: the agent on host alpha sent a line of more than 16 MiB"
    assert inbox.get(timeout=240) == ("alpha", Gone(gone))
    line.close()
    line.host.close()


@pytest.mark.processes
def test_trouble_of_our_own_while_a_line_is_mended_is_not_its_end(tmp_path: Path) -> None:
    class Forgetful(LocalConnector):
        troubles = iter([InvalidSettings("known_hosts is no file"), CheckFailed("no")])

        def open(self, argv: Sequence[str]) -> Channel:
            if argv[3] == "attach" and (trouble := next(self.troubles, None)):
                raise trouble
            return super().open(argv)

    site = Site(tmp_path, Forgetful("alpha"), SLEEP, 20)
    site.start()
    site.until("started")
    processes.send_signal(
        [who for who in processes.with_arguments("run", site.host_spec.directory) if who.pid != site.agent],
        signal.SIGKILL,
    )
    site.until("broken")
    site.until("mended")
    site.pool.broadcast({"type": "stop"})
    assert site.until("done")["left"] == []
    site.close()
