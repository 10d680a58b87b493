"""Sends a job's scalars to W&B or MLflow, by their own clients in a child process.

The clients take seconds to import, and may wait for networks or crash: none of that reaches the job. The child reads
one JSON object a line from its stdin, and writes notes and warnings for the user to its stdout; see tracker_client.py.
"""

import contextlib
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.events import Event
from geomx_cli.core.jsonlines import decode, encode
from geomx_cli.core.untrusted import plain
from geomx_cli.observe.exports.scalars import Backlog, Scalars

__all__ = ["CLIENTS", "Tracker", "require"]

CLIENTS: Mapping[str, tuple[str, str]] = {"wandb": ("W&B", "wandb"), "mlflow": ("MLflow", "mlflow-skinny")}
"""By the module of the client: its title, and the package that has it."""
CHILD = (sys.executable, "-P", "-m", "geomx_cli.observe.exports.tracker_client")
LIMIT = 30.0  # seconds for the end of the upload
ENDS: Mapping[str, str] = {"done": "finished", "done in part": "finished", "failed": "failed"}
"""How the run ends, by the job's status; otherwise it was killed."""


def require(client: str) -> None:
    """Raise InvalidSettings if the client is not installed. It is not imported: that takes seconds."""
    found = importlib.util.find_spec(client)
    if found is None or found.origin is None:  # without an origin it is a folder, such as ./wandb of earlier runs
        title, package = CLIENTS[client]
        hint = f"pip install {package}, or pip install 'geomx-cli[{client}]'"
        raise InvalidSettings(f"--{client} needs {title}'s client", hint)


class Tracker:
    """One run, named after the job, in a project (W&B) or experiment (MLflow). `config`: the job's options.

    `take` never blocks, except with `waits`; see Backlog. If the client fails, one warning is printed and the job
    continues. Must be closed, which takes up to LIMIT seconds.
    """

    def __init__(
        self, client: str, project: str, job: str, config: Mapping[str, Any], *, waits: bool = False,
        child: tuple[str, ...] = CHILD,
    ) -> None:  # fmt: skip
        self._title = CLIENTS[client][0]
        self._scalars = Scalars()
        self._backlog = Backlog(waits=waits)
        self._status = ""
        self._warned = False
        # A session of its own: Ctrl-C ends the job, and the child then ends the run.
        self._child = subprocess.Popen(
            child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        begin = {"client": client, "project": project, "job": job, "config": dict(config)}
        self._threads = [
            threading.Thread(target=work, name=f"{client}-{name}", args=arguments, daemon=True)
            for name, work, arguments in (("writer", self._write, (begin,)), ("reader", self._read, ()))
        ]
        for thread in self._threads:
            thread.start()

    def take(self, process: str, event: Event) -> None:
        """Queue an event's scalars; events without any are ignored."""
        for scalar in self._scalars.of(process, event):
            self._backlog.put(scalar)

    def close(self, status: str = "") -> None:
        """Send what is pending, and wait until the client has ended the run. status: the job's; see ENDS."""
        self._status = status
        self._backlog.close()
        try:
            self._child.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            self._warn(f"it did not end within {LIMIT:g} s")
        for thread in self._threads:
            thread.join(1.0)
        if self._child.returncode:
            self._warn(f"its client ended with status {self._child.returncode}")
        self._backlog.report(self._title)

    def _write(self, begin: Mapping[str, Any]) -> None:
        assert self._child.stdin is not None
        try:
            with self._child.stdin as pipe:
                pipe.write(encode(begin))
                pipe.flush()
                for batch in self._backlog.batches():
                    pipe.write(encode({"scalars": batch}))
                    pipe.flush()
                pipe.write(encode({"end": ENDS.get(self._status, "killed")}))
        except OSError:  # the client has ended; the other thread reports why
            self._backlog.abandon()

    def _read(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as pipe:
            for line in pipe:
                with contextlib.suppress(ValueError):
                    self._take(decode(line))

    def _take(self, message: Mapping[str, Any]) -> None:
        if "warning" in message:
            self._warn(str(message["warning"]))
        elif "note" in message:
            self._print(str(message["note"]))

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._print(f"warning: {self._title} gets no more of this job's metrics: {why}")

    def _print(self, text: str) -> None:
        print(plain(text), file=sys.stderr, flush=True)
