"""Relays between a command's stdin/stdout and the agent's socket, as the control machine's channel to the agent."""

import os
import select
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from geomx_cli.agent import succession
from geomx_cli.agent.host_spec import AgentState, HostSpec
from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.jsonlines import encode

__all__ = ["attach", "run"]

_CHUNK = 1 << 16
_ENDING = 1.0
_LIMIT = 5.0  # seconds for an agent that is about to end
_PAUSE = 0.1


def run(directory: Path, arguments: Sequence[str]) -> int:
    """Start the agent of `directory`, detached, and relay; the agent outlives this process.

    The agent is a fork of this process, which saves a second interpreter start. Returns 1, with the last line of its
    log on stderr, if it ends before it listens. Raises CheckFailed if one runs there already.
    """
    host_spec = HostSpec.read(directory)
    host_spec.check_files()
    lock = succession.lock(directory, _LIMIT)
    if lock is None:
        raise CheckFailed(f"an agent runs already for {directory}", "geomx stop ends it")
    agent = _start(directory, host_spec, lock, None)
    if not agent:
        print(_last_words(directory), file=sys.stderr)
        return 1
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(host_spec.socket)
        _relay(stream, bytearray())
    _wait_for(agent)
    return 0


def _start(directory: Path, host_spec: HostSpec, lock: int, before: AgentState | None) -> int:
    """Start an agent, with a keeper if it is to be followed when it is killed. Return the pid of who ends last, once
    the agent listens; 0 if it has ended before.
    """
    reading, writing = os.pipe()
    last = os.fork()
    if last == 0:
        os.close(reading)
        _detach(directory, host_spec, writing, before)
    os.close(writing)
    os.close(lock)
    listens = os.read(reading, 1)
    os.close(reading)
    if not listens:
        os.waitpid(last, 0)
    return last if listens else 0


def attach(directory: Path, arguments: Sequence[str]) -> int:
    """Relay to the running agent of `directory`; if it and its keeper were killed, start the next one.

    If it has ended normally, also while this connects, print its undelivered messages. Without an agent, return 1,
    print a message to stderr and {"type": "absent"} to stdout, which distinguishes this case from a broken connection.
    """
    given = bytearray()
    limit = time.monotonic() + _LIMIT
    while True:
        waits = _lives(directory) and time.monotonic() < limit  # before: its report follows the end of its socket
        with socket.socket(socket.AF_UNIX) as stream:
            try:
                stream.connect(HostSpec.read(directory).socket)
                stream.sendall(given)
            except OSError:
                if _report_end(directory):
                    return 0
                if not waits:
                    _write(encode({"type": "absent"}))
                    print(f"no agent runs for {directory}", file=sys.stderr)
                    return 1
            else:
                if _relay(stream, given) or not waits:
                    return 0
        time.sleep(_PAUSE)


def _lives(directory: Path) -> bool:
    """Whether there is an agent or a keeper, if need be a new one."""
    lock = succession.lock(directory)
    if lock is None:
        return True
    host_spec = HostSpec.read(directory)
    before = succession.successor_of(directory, host_spec)
    if before is None:
        os.close(lock)
        return False
    return _start(directory, host_spec, lock, before) > 0


def _report_end(directory: Path) -> bool:
    """Print the undelivered messages of an agent that has ended normally; return whether it has."""
    try:
        _write((directory / "agent-end.jsonl").read_bytes())
    except FileNotFoundError:
        return False
    return True


def _detach(directory: Path, host_spec: HostSpec, ready: int, before: AgentState | None) -> None:
    """Become the agent, or its keeper. Never returns. `ready`: gets one byte once the first agent listens."""
    status = 1
    try:
        os.setsid()
        _redirect(directory / "agent.log")
        if not host_spec.restarts:
            _become_agent(directory, host_spec, ready, before)
        status = succession.keep(directory, host_spec, partial(_become_agent, directory, host_spec), ready, before)
    finally:
        os._exit(status)


def _become_agent(directory: Path, host_spec: HostSpec, ready: int, before: AgentState | None) -> None:
    """Never returns. `ready`: as above, or -1."""
    status = 1
    try:
        from geomx_cli.agent.supervisor import Supervisor

        supervisor = Supervisor(directory, host_spec, before)
        if ready >= 0:
            os.write(ready, b"1")
            os.close(ready)
        status = supervisor.run()
    except BaseException as error:
        from geomx_cli.core.errors import GeomxError

        if not isinstance(error, OSError | GeomxError):
            sys.excepthook(type(error), error, error.__traceback__)
        print(f"error: {error}", file=sys.stderr)
    finally:
        with suppress(OSError):  # a full disk
            sys.stderr.flush()
        os._exit(status)


def _redirect(log: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    os.close(nothing)
    os.close(output)


def _last_words(directory: Path) -> str:
    lines = (directory / "agent.log").read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "the agent exited without output"


def _relay(stream: socket.socket, given: bytearray) -> bool:
    """Relay until the agent closes the connection; half-close it on end of our input. Return whether the agent has sent
    anything; until then `given` is extended by what it was sent.
    """
    sources: list[int] = [0, stream.fileno()]
    answered = False
    with suppress(OSError):  # either side disconnected
        while True:
            for source in select.select(sources, [], [])[0]:
                if source == 0:
                    if data := os.read(0, _CHUNK):
                        if not answered:
                            given += data
                        if not _sent(stream, data):
                            sources.remove(0)
                    else:
                        sources.remove(0)
                        stream.shutdown(socket.SHUT_WR)
                elif data := stream.recv(_CHUNK):
                    answered = True
                    _write(data)
                else:
                    return answered
    return answered


def _sent(stream: socket.socket, data: bytes) -> bool:
    """Send; return False if the agent has closed the connection: its last messages may still be unread."""
    try:
        stream.sendall(data)
    except OSError:
        return False
    return True


def _write(data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(1, rest) :]


def _wait_for(agent: int) -> None:
    """Wait briefly for the agent's exit, so that it has usually ended when this process has; but not if the command
    that started it is gone: perhaps another has taken over.
    """
    descriptor = os.pidfd_open(agent)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(1, 0)  # only whether it is closed
    poll.poll(1000 * _ENDING)
    os.close(descriptor)
    os.waitpid(agent, os.WNOHANG)
