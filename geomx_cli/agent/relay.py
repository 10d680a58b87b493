"""Relays between a command's stdin/stdout and the agent's socket, as the control machine's channel to the agent."""

import os
import select
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from geomx_cli.agent import processes, succession
from geomx_cli.agent.agent_state import AgentState
from geomx_cli.agent.host_spec import HostSpec
from geomx_cli.core.jsonlines import decode, encode

__all__ = ["attach", "checkpoint", "run"]

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
    agent = succession.start(directory, host_spec)
    if not agent:
        print(_last_words(directory), file=sys.stderr)
        return 1
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(host_spec.socket)
        _relay(stream, bytearray())
    _wait_for(agent)
    return 0


def attach(directory: Path, arguments: Sequence[str]) -> int:
    """Relay to the running agent of `directory`, or to the next one if it was killed.

    If it has ended normally, also while this connects, print its undelivered messages. If there is none, and none
    follows, return 1, print a message to stderr and {"type": "absent"} to stdout, which distinguishes this case from a
    broken connection.
    """
    given = bytearray()
    limit = time.monotonic() + _LIMIT
    while True:
        lives = succession.ensure(directory)  # before: its report comes after its socket is gone
        waits = lives and time.monotonic() < limit
        with socket.socket(socket.AF_UNIX) as stream:
            try:
                stream.connect(HostSpec.read(directory).socket)
                stream.sendall(given)
            except OSError:
                if _report_end(directory):
                    return 0
                if not lives:
                    _write(encode({"type": "absent"}))
                if not waits:
                    what = "the agent does not answer" if lives else "no agent runs"
                    print(f"{what} for {directory}", file=sys.stderr)
                    return 1
            else:
                if _relay(stream, given) or not waits:
                    return 0
        time.sleep(_PAUSE)


def checkpoint(directory: Path, arguments: Sequence[str]) -> int:
    """Relay to the running agent of `directory`, which takes this program for a visitor. Without one, or with one that
    is suspended, return 1 with a message on stderr.
    """
    state = AgentState.read(directory)
    if state is None or processes.state(state.agent) in ("", "T"):
        print(f"no agent runs for {directory}", file=sys.stderr)
        return 1
    with socket.socket(socket.AF_UNIX) as stream:
        try:
            stream.settimeout(_LIMIT)
            stream.connect(HostSpec.read(directory).socket)
        except OSError:
            print(f"the agent does not answer for {directory}", file=sys.stderr)
            return 1
        stream.settimeout(None)
        _relay(stream, bytearray())
    return 0


def _report_end(directory: Path) -> bool:
    """Print the undelivered messages of an agent that has ended normally; return whether it has. Without the last one,
    who reads them would wait for it.
    """
    try:
        said = (directory / "agent-end.jsonl").read_bytes()
        is_whole = said.endswith(b"\n") and decode(said.splitlines()[-1]).get("type") == "done"
    except (OSError, ValueError):
        return False
    if is_whole:
        _write(said)
    return is_whole


def _last_words(directory: Path) -> str:
    lines = (directory / "agent.log").read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "the agent exited without output"


def _relay(stream: socket.socket, given: bytearray) -> bool:
    """Relay until the agent closes the connection; half-close it on end of our input. Return whether the agent has sent
    anything. Before its first message, `given` collects the bytes that were sent to it.
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
    """Wait briefly for the agent's exit, so that the agent has usually ended when this process ends. Do not wait if the
    command that started this process is gone: perhaps another command follows the job.
    """
    descriptor = os.pidfd_open(agent)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(1, 0)  # only whether it is closed
    poll.poll(1000 * _ENDING)
    os.close(descriptor)
    os.waitpid(agent, os.WNOHANG)
