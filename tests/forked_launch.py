"""`geomx launch` whose processes are all forked from one that has done their imports: agents, servers and workers.

Each is a process of its own with its real parent, session, output and signals, so that agents watch, kill and restart
it as always, at a tenth of the CPU time. What the kernel tells of a process's command and environment is that of the
fork server, so a job's processes are found by `pids` here, and tests of cleaning up take a real launch.
"""

import atexit
import contextlib
import faulthandler
import gc
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import thread
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forks
from desk import Desk, Launch

from geomx_cli.agent import processes

FAULTHANDLER = "PYTHONFAULTHANDLER"
PIDS = "FORKED_LAUNCH_PIDS"
HIGHEST = 1 << 16
"""Of a process's descriptors."""


@dataclass
class ForkedLaunch(Launch):
    """See Launch. process: that of `geomx launch`. pid_folder: has a file named as the pid of each forked process."""

    process: Any
    pid_folder: Path = Path()

    @classmethod
    def begin(
        cls, desk: Desk, *arguments: str, imported: str, folder: Path | None = None, **variables: str
    ) -> "ForkedLaunch":
        """Launch a job of the real roles in the directory "job", on this machine, unless `arguments` differ.

        imported: what all are forked from, see forks.ForkServer.
        folder: where it is launched; that of the desk otherwise.
        """
        number = len(desk.launches)
        pid_folder, out = desk.folder / f"pids-{number}", desk.folder / f"launch-{number}.out"
        pid_folder.mkdir()
        environment = {**desk.environment, **variables, PIDS: str(pid_folder)}
        words = ["launch", *arguments] if "--job-dir" in arguments else ["launch", "--job-dir", "job", *arguments]
        argv = [__file__, str(out.with_suffix(".err")), *words]
        process = forks.server(imported).start(argv, environment, folder or desk.folder, out)
        job = cls(desk, process, "", pid_folder=pid_folder)
        job.found = desk.folder / words[words.index("--job-dir") + 1]
        desk.launches.append(job)
        return job

    @classmethod
    def run(cls, desk: Desk, *arguments: str, imported: str, **variables: str) -> "ForkedLaunch":
        """Run a job to its end."""
        job = cls.begin(desk, *arguments, imported=imported, **variables)
        job.finish()
        return job

    @property
    def returncode(self) -> int | None:
        """The exit status of `geomx launch`; None while it runs."""
        status: int | None = self.process.poll()
        return status

    def pids(self) -> list[int]:
        """See Launch."""
        found = [int(path.name) for path in self.pid_folder.iterdir()] + [self.process.pid]
        return sorted(pid for pid in found if _runs(pid, self.pid_folder))

    def finish(self, limit: float = 240) -> int:
        """See Launch."""
        self.process.wait(limit)
        self._read()
        print(self.errors)
        return int(self.process.returncode)

    def end(self) -> str:
        """See Launch."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
        for folder in Path("/dev/shm").glob(f"geomx-*-{self.id}-*"):
            shutil.rmtree(folder, ignore_errors=True)
        self._read()
        return self.errors

    def _read(self) -> None:
        out = self.pid_folder.with_name(f"launch-{self.pid_folder.name.partition('-')[2]}.out")
        self.output = out.read_text()
        self.errors = out.with_suffix(".err").read_text() if out.with_suffix(".err").exists() else ""


def _runs(pid: int, folder: Path) -> bool:
    """Whether it is the process that was forked, and has not ended."""
    identity = processes.identify(pid)
    if identity is None or processes.state(identity) in ("Z", "X", ""):
        return False
    path = folder / str(pid)
    return not path.exists() or path.read_text() in ("", str(identity))


class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Forks this process where a command of this Python would be run."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        (
            _, _, cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _, _, _, _, _,
            start_new_session, process_group,
        ) = rest  # fmt: skip
        argv = None if shell or executable is not None else _forkable(args, os.environ if env is None else env)
        if argv is None:
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        self.pid = os.fork()
        if self.pid == 0:
            _begin(argv, dict(os.environ if env is None else env), cwd, (p2cread, c2pwrite, errwrite), preexec_fn,
                   start_new_session, process_group)  # fmt: skip
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _forkable(args: Any, env: Mapping[str, str]) -> list[str] | None:
    """The arguments of Python, if a fork behaves as the command would."""
    if not isinstance(args, list | tuple) or len(args) < 2:
        return None
    argv = [os.fspath(word) for word in args]
    program = shutil.which(argv[0], path=env.get("PATH"))
    early = {name: text for name, text in env.items() if name != FAULTHANDLER}  # which `_begin` sees to
    if program != sys.executable or not forks.can_be_forked([program, *argv[1:]], early):
        return None
    return argv[1:]


def _begin(
    argv: list[str], env: dict[str, str], cwd: Any, streams: tuple[int, int, int],
    preexec_fn: Callable[[], None] | None, start_new_session: bool, process_group: int,
) -> None:  # fmt: skip
    """Be the new process, to its end."""
    try:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, 32, 33}:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        atexit._clear()
        thread._threads_queues.clear()  # type: ignore[attr-defined] # else its end would wait for its parent's pools
        for target, stream in enumerate(streams):
            if stream >= 0:
                os.dup2(stream, target)
        os.closerange(3, HIGHEST)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (open(number, "w", 1, closefd=False) for number in (1, 2))  # noqa: SIM115
        if env.get(FAULTHANDLER):
            faulthandler.enable()
        if start_new_session:
            os.setsid()
        if process_group >= 0:
            os.setpgid(0, process_group)
        if preexec_fn is not None:
            preexec_fn()
        Path(env[PIDS], str(os.getpid())).write_text(str(processes.identify(os.getpid())))
        gc.freeze()
        forks.end_with(forks.run, {"argv": argv, "env": env, "directory": os.fspath(cwd) if cwd else str(Path.cwd())})
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(255)  # whatever happens: this process may not go on as another one of its parent


def main() -> None:
    """Run the command with ForkingPopen. Words: the file for stderr, and the arguments of `geomx`."""
    _, errors, *arguments = sys.argv
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    from geomx_cli import cli

    sys.exit(cli.main(arguments))


if __name__ == "__main__":
    main()
