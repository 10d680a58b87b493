"""Python processes for tests, forked from one whose imports are done: a fifth of a new process's CPU time.

Those of geomx are forked from one that has imported numpy and geomx, or also PyTorch, frameworks around it or MXNet.
Those of stock MXNet are forked from one that has imported MXNet alone. None starts a thread before its first operation.
Each has its own session, environment and output, like any other process. They run a module or a script as
`python -m MODULE` and `python SCRIPT` would.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import hashlib
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import site
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

ROOT = Path(__file__).parent.parent
MESSAGE = 1 << 17
PAUSE = 0.1
"""Seconds after which one looks whether another thread has received an exit status."""
PACKAGES = (
    "geomx_cli.agent", "geomx_cli.commands", "geomx_cli.hosts", "geomx_cli.hosts.allocators", "geomx_cli.hosts.ssh",
    "geomx_cli.jobs.actions", "geomx_cli.preflight", "geomx_cli.probe", "geomx_cli.ps.codecs", "geomx_cli.ps.delivery",
    "geomx_cli.runtime.algorithms",
)  # fmt: skip
"""Packages of which every module is imported."""
ROOM = "-" * (1 << 15)
"""For the command and the environment of a forked process."""
COMMAND = 1 << 13
"""Bytes of the room for the command, which is the shorter one."""
CLONE_NEWNET = 0x40000000
IMPORTED = (
    "forking", "geomx_cli.ps.client", "geomx_cli.ps.cluster.scheduler", "geomx_cli.ps.server",
    "geomx_cli.ps.optim.optimizers", "geomx_cli.runtime.script.store", "geomx_cli.runtime.plugin_factory",
    "geomx_cli.runtime.script", "geomx_cli.runtime.frontends", "geomx_cli.runtime.signals",
    "geomx_cli.runtime.training", "geomx_cli.runtime.training.worker_algorithm",
    # What MXNet imports of others, a fifth of its import.
    "distutils.version", "multiprocessing.pool", "multiprocessing.queues", "numpy.testing", "pkg_resources", "requests",
)  # fmt: skip
FRONTEND = "geomx_cli.runtime.frontends.torch"
TORCH = (
    "torch._dynamo",  # the first optimizer would: half of all imports
    "torch._dynamo.backends.debugging", "geomx_cli.torch",
)  # fmt: skip
"""What scripts for PyTorch import."""
FRAMEWORKS = ("accelerate", "peft", "transformers", f"{FRONTEND}.trainers.hf", f"{FRONTEND}.trainers.lightning")
"""What those with frameworks around it import."""
NAMES = (bool, int, float, complex, object)
"""What MXNet 1.9.1 needs in numpy, which has removed them."""


@dataclass(eq=False)
class Forked:
    """A process with the part of subprocess.Popen's interface that tests use."""

    server: "ForkServer"
    pid: int
    args: list[str]
    returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        if self.returncode is None:
            self.server.take(0.0)
            self.returncode = self.server.statuses.get(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status. Raises subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = PAUSE if end is None else end - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.server.take(min(PAUSE, left))
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to a running process."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """What others are forked from.

    All workers of a run of pytest-xdist share one process, which ends with the last of them: with PyTorch its imports
    take four seconds of CPU time, and with frameworks around it eight.

    pid: of that process. statuses: exit statuses by pid.

    imported: "geomx", or "mxnet" or "torch" for both, "frameworks" for PyTorch and those around it, or "stock" for
    MXNet alone. python: of its environment.
    """

    def __init__(self, imported: str, python: str = sys.executable) -> None:
        self.statuses: dict[int, int] = {}
        self._lock = threading.Lock()
        run = f"{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())} {imported} {python}"
        place = f"\0geomx-forks-{hashlib.sha256(run.encode()).hexdigest()}"
        self._socket, self.pid = self._joined(imported, python, place)
        atexit.register(self._socket.close)

    def _joined(self, imported: str, python: str, place: str) -> tuple[socket.socket, int]:
        for _ in range(3):  # one that is found may end just now
            with _alone():
                channel = _connected(place)
                if channel is None:
                    self._begin(imported, python, place)
                    channel = _connected(place)
            assert channel is not None, place
            with contextlib.suppress(ConnectionError):
                if data := channel.recv(MESSAGE):  # once it has done its imports
                    return channel, int(json.loads(data)["server"])
            channel.close()
        raise AssertionError(f"the process that others are forked from fails: {python} {__file__} {imported}")

    @staticmethod
    def _begin(imported: str, python: str, place: str) -> None:
        """Start it. Not by subprocess, which would warn that it outlives this process."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(place)
            listener.listen()
            listener.set_inheritable(True)
            os.posix_spawn(
                python, [python, __file__, imported, str(listener.fileno()), ROOM[:COMMAND]],
                {**os.environ, "PYTHONPATH": str(ROOT), "ROOM": ROOM}, setsid=True,
                file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
            )  # fmt: skip

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], directory: Path, out: Path, namespace: str = ""
    ) -> Forked:
        """Run `python ARGV` with standard output and error in the file `out`; in a network namespace, by name."""
        request = {"argv": list(argv), "env": dict(env), "directory": str(directory), "namespace": namespace}
        with out.open("wb") as file, Path(os.devnull).open("rb") as nothing:
            pid = self.fork({**request, "start_new_session": True}, (nothing.fileno(), file.fileno(), file.fileno()))
        return Forked(self, pid, list(argv))

    def fork(self, request: Mapping[str, Any], streams: Sequence[int]) -> int:
        """Have a process forked that runs `request`, see `_become`, with these standard streams. Returns its pid."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
            while (pid := self._receive().get("forked")) is None:
                pass
            self.statuses.pop(pid, None)
        return int(pid)

    def take(self, seconds: float) -> None:
        """Collect exit statuses, waiting at most this long for the first."""
        if select.select([self._socket], [], [], seconds)[0]:
            with self._lock:  # another thread may have received it meanwhile
                while select.select([self._socket], [], [], 0.0)[0]:
                    self._receive()

    def _receive(self) -> dict[str, Any]:
        data = self._socket.recv(MESSAGE)
        assert data, "the process that others are forked from has ended"
        message: dict[str, Any] = json.loads(data)
        if "status" in message:
            self.statuses[message["pid"]] = message["status"]
        return message


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """No other process on this machine is in such a block."""
    folder = os.open(Path(__file__).parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _connected(place: str) -> socket.socket | None:
    """A connection to the fork server with this name; None if there is none."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        channel.connect(place)
    except ConnectionError:
        channel.close()
        return None
    return channel


_PATH = list(sys.path)
"""Of this file as a script: its folder comes first, in place of which a script has its own."""
_servers: dict[tuple[str, str], ForkServer] = {}
_starting = threading.Lock()


def can_be_forked(argv: Sequence[str], env: Mapping[str, str], python: str = sys.executable) -> bool:
    """Whether a forked process would behave the same: a module or script of `python`, with this geomx on its path, and
    no variable in its environment that Python reads at its start or a library during import.
    """
    is_plain = argv[0] == python and (argv[1] in ("-m", "-P") or argv[1].endswith(".py"))
    has_geomx = str(ROOT) in env.get("PYTHONPATH", "").split(os.pathsep)
    return is_plain and has_geomx and _read_early(env) == _read_early(os.environ)


def imports_mxnet(argv: Sequence[str]) -> bool:
    """Whether this is the command of a script that mentions MXNet."""
    scripts = [Path(word) for word in argv[1:] if word.endswith(".py")]
    return any(path.is_file() and "mxnet" in path.read_text(encoding="utf-8") for path in scripts)


def _read_early(env: Mapping[str, str]) -> dict[str, str]:
    early = ("PYTHON", "OMP_", "OPENBLAS_", "MXNET_CPU_", "MXNET_ENGINE_")
    found = {name: text for name, text in env.items() if name.startswith(early)}
    found.pop("PYTHONPATH", None)
    return found


def server(imported: str = "geomx", python: str = sys.executable) -> ForkServer:
    """The fork server of this process, which ends with it."""
    with _starting:
        if (imported, python) not in _servers:
            _servers[imported, python] = ForkServer(imported, python)
        return _servers[imported, python]


def import_mxnet() -> Any:
    """Stock MXNet 1.9.1, without geomx."""
    for kind in NAMES:
        if kind.__name__ not in vars(numpy):
            setattr(numpy, kind.__name__, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("mxnet")


def _serve(listener: socket.socket) -> dict[str, Any]:
    """Fork on request, and report exits to those that have asked. Returns the request in the new process; ends when all
    that were connected have closed.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    channels: list[socket.socket] = []
    parents: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([*channels, reading, listener], [], [])
        if reading in ready:
            os.read(reading, MESSAGE)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    report = {"pid": ended[0], "status": os.waitstatus_to_exitcode(ended[1])}
                    with contextlib.suppress(OSError):  # who has asked may have ended
                        parents.pop(ended[0]).send(json.dumps(report).encode())
        if listener in ready:
            channels.append(listener.accept()[0])
            with contextlib.suppress(OSError):
                channels[-1].send(json.dumps({"server": os.getpid()}).encode())
        for channel in [channel for channel in channels if channel in ready]:
            data, streams, _, _ = socket.recv_fds(channel, MESSAGE, 3)
            if not data:
                channel.close()
                channels.remove(channel)
                if not channels:
                    os._exit(0)
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(reading)
                os.close(writing)
                for other in (*channels, listener):
                    other.close()
                for target, stream in enumerate(streams):
                    os.dup2(stream, target)
                    os.close(stream)
                request: dict[str, Any] = json.loads(data)
                return request
            for stream in streams:
                os.close(stream)
            parents[pid] = channel
            with contextlib.suppress(OSError):
                channel.send(json.dumps({"forked": pid}).encode())


def _become(request: dict[str, Any]) -> None:
    """See `run`. Also of the request: start_new_session and process_group, as for subprocess.Popen; namespace: of the
    network; ignored: signals; forking: see forking.ForkingPopen.
    """
    if request.get("start_new_session"):
        os.setsid()
    if request.get("process_group", -1) >= 0:
        os.setpgid(0, request["process_group"])
    for number in request.get("ignored", ()):
        signal.signal(number, signal.SIG_IGN)
    open_streams()
    if request.get("namespace"):
        _enter(request["namespace"])
    if request.get("forking"):
        importlib.import_module("forking").begin_forking()
    run(request)


def run(request: dict[str, Any]) -> None:
    """Run `python ARGV` in this process, with the environment and in the directory of the request."""
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["env"])
    _show(request["argv"], request["env"])
    sys.path[:] = _PATH
    sys.path[1:1] = filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    plugins = sys.modules.get("geomx_cli.core.plugins")
    if plugins is not None and request["env"].get("PYTHONPATH") != str(ROOT):  # which may lead to others
        for found in (plugins._all, plugins.table, plugins._may_register):
            found.cache_clear()
    first, *words = request["argv"]
    if first == "-P":
        del sys.path[0]
        first, *words = words
    elif first == "-m":
        sys.path[0] = request["directory"]
    if first == "-m":
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(first).parent)
        sys.argv = request["argv"]
        runpy.run_path(first, run_name="__main__")


def open_streams() -> None:
    """Have Python's standard streams as a new process has them."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", 1, closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # type: ignore[misc] # noqa: SIM115
        2, "w", 1, errors="backslashreplace", closefd=False
    )


def _show(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Have /proc show the command and its environment in place of those of the fork server, by which processes of a job
    are found. They are written over them, which has room; a long path of Python fills what is left.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    command_start, command_end, start, end = (int(text) for text in fields[45:49])
    command = b"".join(os.fsencode(word) + b"\0" for word in (sys.executable, *argv))
    variables = b"".join(os.fsencode(f"{name}={text}") + b"\0" for name, text in env.items())
    ctypes.memmove(command_start, command.rjust(command_end - command_start, b"/"), command_end - command_start)
    ctypes.memmove(start, variables.ljust(end - start, b"\0"), end - start)


def end_with(function: Callable[[dict[str, Any]], None], request: dict[str, Any]) -> None:
    """Run the function as if the interpreter ended after it: wait for threads, call what atexit has registered, flush.

    The interpreter itself would then free every object, and so copy all memory that is shared with the fork server: two
    thirds of the process's CPU time.
    """
    status = 0
    try:
        function(request)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def _import_ours() -> None:
    for name in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):  # Python 3.12 has no distutils
            importlib.import_module(name)
    for name in PACKAGES:
        for item in pkgutil.iter_modules(importlib.import_module(name).__path__, f"{name}."):
            if not item.name.endswith("__main__"):
                importlib.import_module(item.name)


def _load_kernels() -> None:
    """Load numba and the compiled kernels: 0.4 s of each process that encodes, and 100 MB, which no script is to have.
    """
    parse_codec = importlib.import_module("geomx_cli.ps.aggregation.codec").parse_codec
    for name in ("fp16", "topk:0.1"):
        parse_codec(name).prepare()


def _import_torch() -> None:
    for name in TORCH:
        importlib.import_module(name)
    for item in pkgutil.walk_packages(importlib.import_module(FRONTEND).__path__, f"{FRONTEND}."):
        if not item.name.startswith(f"{FRONTEND}.trainers."):  # they import frameworks that are not here
            importlib.import_module(item.name)


def _import_frameworks() -> None:
    warnings.simplefilter("ignore")
    for name in FRAMEWORKS:
        importlib.import_module(name)
    transformers = importlib.import_module("transformers")
    for name in ("GPT2Config", "GPT2LMHeadModel", "Trainer", "TrainingArguments"):
        getattr(transformers, name)  # each imports its module


def _enter(namespace: str) -> None:
    with Path("/run/netns", namespace).open("rb") as opened:
        if ctypes.CDLL(None, use_errno=True).setns(opened.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def _main() -> None:
    _, imported, listener_number, _ = sys.argv
    if imported == "stock":
        import_mxnet()
        warnings.simplefilter("ignore")
    else:
        _import_ours()
        if imported == "geomx":
            _load_kernels()
        if imported in ("torch", "frameworks"):
            _import_torch()
        if imported == "frameworks":
            _import_frameworks()
        if imported == "mxnet":
            importlib.import_module("hidden_mxnet").load()
    gc.freeze()
    with socket.socket(fileno=int(listener_number)) as listener:
        request = _serve(listener)
    if imported == "stock":  # its processes take leave of each other where their key-value stores are freed
        _become(request)
    else:
        end_with(_become, request)


if __name__ == "__main__":
    _main()
