"""subprocess.Popen for processes of this Python that are forked from one that has done their imports.

`Served` asks a fork server, for tests; `ForkingPopen` forks its own process, for a command of geomx and all that it
starts: agents, probes, servers and workers. Each is a process of its own, with its session, streams and signals, and
with its command and environment in /proc, so that agents watch, kill, restart and find it as always, at a tenth of the
processor time. What is no Python, or would behave otherwise if forked, is started as always.
"""

import atexit
import contextlib
import faulthandler
import gc
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import thread
from pathlib import Path
from typing import Any

import forks

FAULTHANDLER = "PYTHONFAULTHANDLER"
HIGHEST = 1 << 16
"""Of a process's descriptors."""
PYTHON_ITSELF = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores."""


class Served(subprocess.Popen):  # type: ignore[type-arg]
    """Has `python ARGV` forked from the server. namespace: of the network, by name. forking: whether it uses
    ForkingPopen.
    """

    def __init__(
        self, server: "forks.ForkServer", argv: Sequence[str], *, namespace: str = "", forking: bool = True,
        **others: Any,
    ) -> None:  # fmt: skip
        self._server, self._request = server, {"argv": [*argv], "namespace": namespace, "forking": forking}
        super().__init__([sys.executable, *argv], **others)

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        _, _, cwd, env, *_, start_new_session, process_group = rest
        pipes = rest[7:13]
        ignored = [
            int(number)
            for number in signal.valid_signals() - {*PYTHON_ITSELF}
            if signal.getsignal(number) == signal.SIG_IGN
        ]
        request = {
            "env": dict(os.environ if env is None else env), "directory": os.fspath(cwd or Path.cwd()),
            "start_new_session": start_new_session, "process_group": process_group, "ignored": ignored,
        }  # fmt: skip
        theirs = (pipes[0], pipes[3], pipes[5])
        streams = [own if stream < 0 else stream for own, stream in enumerate(theirs)]
        self.pid = self._server.fork({**self._request, **request}, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self._server.take(0.0)
            self.returncode = self._server.statuses.get(self.pid)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = forks.PAUSE if end is None else end - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._server.take(min(forks.PAUSE, left))
        return int(self.returncode)


class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Forks this process where a command of this Python would be run."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        _, _, cwd, env, _, _, shell, *_, start_new_session, process_group = rest
        pipes, variables = rest[7:13], dict(os.environ if env is None else env)
        argv = None if shell or executable is not None else _forkable(args, variables)
        if argv is None:
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        self.pid = os.fork()
        if self.pid == 0:
            _begin(argv, variables, cwd, (pipes[0], pipes[3], pipes[5]), preexec_fn, start_new_session, process_group)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def begin_forking() -> None:
    """Have this process use ForkingPopen."""
    subprocess.Popen = ForkingPopen  # type: ignore[misc]


def _forkable(args: Any, env: dict[str, str]) -> list[str] | None:
    """The arguments of Python, if a fork behaves as the command would. Adds the variables that a wrapper sets."""
    if not isinstance(args, list | tuple) or len(args) < 2:
        return None
    argv = [os.fspath(word) for word in args]
    program = shutil.which(argv[0], path=env.get("PATH"))
    wrapped = _wrapped(program)
    if wrapped is not None:
        variables, (program, *words) = wrapped
        argv = [program, *words, *argv[1:]]
        env |= variables
    early = {name: text for name, text in env.items() if name != FAULTHANDLER}  # which `_begin` sees to
    if program != sys.executable or not forks.can_be_forked([program, *argv[1:]], early):
        return None
    return argv[1:]


def _wrapped(program: str | None) -> tuple[dict[str, str], list[str]] | None:
    """The variables and the command of a shell script of desk.Desk.inventory, which says: A=b exec command "$@"."""
    if program is None or not program.endswith(".sh"):
        return None
    first, *lines = Path(program).read_text().splitlines()
    if first != "#!/bin/sh" or len(lines) != 1 or " exec " not in lines[0] or not lines[0].endswith(' "$@"'):
        return None
    words = shlex.split(lines[0])
    start = words.index("exec")
    return dict(word.split("=", 1) for word in words[:start]), words[start + 1 : -1]


def _begin(
    argv: list[str], env: Mapping[str, str], cwd: Any, streams: tuple[int, int, int],
    preexec_fn: Callable[[], None] | None, start_new_session: bool, process_group: int,
) -> None:  # fmt: skip
    """Be the new process, to its end."""
    try:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, 32, 33}:
            with contextlib.suppress(OSError, ValueError):
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in PYTHON_ITSELF:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        atexit._clear()
        thread._threads_queues.clear()  # type: ignore[attr-defined] # else its end would wait for its parent's pools
        for target, stream in enumerate(streams):
            if stream >= 0:
                os.dup2(stream, target)
        os.closerange(3, HIGHEST)
        forks.open_streams()
        if env.get(FAULTHANDLER):
            faulthandler.enable()
        if start_new_session:
            os.setsid()
        if process_group >= 0:
            os.setpgid(0, process_group)
        if preexec_fn is not None:
            preexec_fn()
        gc.freeze()
        forks.end_with(forks.run, {"argv": argv, "env": env, "directory": os.fspath(cwd) if cwd else str(Path.cwd())})
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(255)  # whatever happens: this process may not go on as another one of its parent
