"""A batch system's job step on one node: it starts the commands of geomx there, and stays as long as they need it.

A batch system ends all processes of a step when the step's own process ends. An agent outlives the connection over
which it was started. So each job of geomx has one long step (`serve`) on each of its nodes. It starts every command
for short steps (`run_in`): these only pass their streams on, and wait. Processes that detach become children of the
long step, which ends once it has had no child for a while. So an allocation that nobody uses is released.
"""

import hashlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from geomx_cli.agent.agent_state import AgentState
from geomx_cli.agent.processes import adopt_orphans, exists

__all__ = ["run_in", "serve"]

_STREAMS = 3
_LARGEST = 1 << 20  # bytes of a request
_STARTING = 20.0  # seconds for the long step to listen
_PAUSE = 0.05
_PEER = struct.Struct("3i")
_UNSTARTED = 127
_NO_STEP = 125
_OF_STEP = ("SLURM_STEP", "PMI")
_OF_TASK = {
    "SLURM_GTIDS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NPROCS", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE",
    "SLURM_PROCID", "SLURM_TASKS_PER_NODE", "SLURM_TASK_PID",
}  # fmt: skip
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def serve(name: Path, arguments: Sequence[str]) -> int:
    """Be the long step of this name on this node, until no child has run for the given number of seconds. Only one
    of a name listens on a node; another one returns 1 at once.

    Slurm sends SIGTERM to all processes of an allocation. This one then ends after the others.
    """
    idle = float(arguments[0])
    adopt_orphans()
    waker, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(_address(str(name)))
        except OSError as error:
            print(f"the step {name} cannot listen on this node: {error.strerror}", file=sys.stderr)
            return 1
        listener.listen(128)
        step = _Step(listener, waker)
        for number in _ENDS:
            signal.signal(number, step.end)
        step.run(idle)
    return 0


def run_in(name: Path, command: Sequence[str]) -> int:
    """Have the long step of this name run a command with this process's streams, and return its exit status. Without
    a command, ask the agents that it has started to stop their job. Returns 125 if there is no long step.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stream:
        limit = time.monotonic() + _STARTING
        while True:
            try:
                stream.connect(_address(str(name)))
                break
            except OSError:
                if time.monotonic() > limit:
                    print(f"no step {name} runs on this node", file=sys.stderr)
                    return _NO_STEP
                time.sleep(_PAUSE)
        if not _is_ours(stream):
            print(f"another user answers for the step {name} on this node", file=sys.stderr)
            return _NO_STEP
        request = json.dumps({"command": [*command], "directory": str(Path.cwd())}).encode()
        socket.send_fds(stream, [request], range(_STREAMS))
        answer = stream.recv(_LARGEST)
    return int(answer) if answer else _NO_STEP


class _Step:
    """Starts commands, and waits for them and for what they leave behind, in one thread."""

    def __init__(self, listener: socket.socket, waker: socket.socket) -> None:
        self._listener, self._waker = listener, waker
        self._commands: dict[int, tuple[subprocess.Popen[bytes], socket.socket]] = {}
        self._agents: list[Path] = []  # directories
        self._ending = False

    def run(self, idle: float) -> None:
        """Serve until no child has run for `idle` seconds, or runs after a call of `end`."""
        deadline = time.monotonic() + idle
        while True:
            ready, _, _ = select.select([self._listener, self._waker], [], [], max(0.0, deadline - time.monotonic()))
            if self._waker in ready:
                self._waker.recv(_LARGEST)
            if self._listener in ready:
                self._accept()
            running, ended = self._reap()
            if running or ended:
                deadline = time.monotonic() + idle
            if not running and (self._ending or time.monotonic() >= deadline):
                return

    def end(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal that ends the allocation."""
        self._ending = True

    def _accept(self) -> None:
        stream, _ = self._listener.accept()
        descriptors: list[int] = []
        try:
            if not _is_ours(stream):
                return
            stream.settimeout(_STARTING)  # a client sends at once
            data, descriptors, _, _ = socket.recv_fds(stream, _LARGEST, _STREAMS)
            request = json.loads(data)
            if len(descriptors) != _STREAMS:
                return
            if not request["command"]:
                self._stop_agents()
                stream.send(b"0")
                return
            self._start(request["command"], request["directory"], descriptors, stream)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # the client is gone, or is none of geomx
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            if not any(stream is kept for _, kept in self._commands.values()):
                stream.close()

    def _start(self, command: list[str], directory: str, streams: Sequence[int], client: socket.socket) -> None:
        program = os.path.expanduser(command[0])  # noqa: PTH111 - keeps bare command names
        if command[-3:-1] == ["geomx_cli.agent", "run"]:
            self._agents.append(Path(command[-1]))
        try:
            process = subprocess.Popen(
                [program, *command[1:]], stdin=streams[0], stdout=streams[1], stderr=streams[2], cwd=directory,
                start_new_session=True, env=_environment(),
            )  # fmt: skip
        except OSError as error:
            os.write(streams[2], f"{command[0]}: {error.strerror}\n".encode())
            client.send(str(_UNSTARTED).encode())
            return
        self._commands[process.pid] = process, client

    def _reap(self) -> tuple[bool, bool]:
        """Report the ends of commands; return whether children run, and whether some have ended."""
        ended = False
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return True, ended
                ended = True
                if pid in self._commands:
                    process, client = self._commands.pop(pid)
                    code = os.waitstatus_to_exitcode(status)
                    process.returncode = code
                    with suppress(OSError), client:
                        client.send(str(code if code >= 0 else 128 - code).encode())
        return False, ended

    def _stop_agents(self) -> None:
        for directory in self._agents:
            state = AgentState.read(directory)
            if state is not None and exists(state.agent):
                os.kill(state.agent.pid, signal.SIGUSR1)


def _environment() -> dict[str, str]:
    """Return the environment without what describes the one task of the long step: frameworks would take it for the
    ranks of workers.
    """
    return {name: text for name, text in os.environ.items() if name not in _OF_TASK and not name.startswith(_OF_STEP)}


def _address(name: str) -> str:
    """Return an abstract address, which needs no file: tasks of one node may have different folders for temporary
    files. Several nodes may be one machine in tests. An address has room for 107 bytes, hence the hash.
    """
    text = f"{name} {os.environ.get('SLURMD_NODENAME', '')}"
    return f"\0geomx-{os.getuid()}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _is_ours(stream: socket.socket) -> bool:
    """Whether the process at the other end is this user's: anybody may use an abstract address."""
    peer = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(peer)[1] == os.getuid())
