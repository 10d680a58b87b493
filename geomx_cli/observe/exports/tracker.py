"""Sends a job's scalars to W&B or MLflow, by their own clients in a child process.

The clients take seconds to import, and may wait for networks or crash. None of this affects the job. The child reads
one JSON object a line from its stdin, and writes notes and warnings for the user to its stdout.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.events import Event
from geomx_cli.core.jsonlines import decode, encode
from geomx_cli.core.untrusted import first_line, plain
from geomx_cli.observe.exports.scalars import Backlog, Scalars

__all__ = ["CLIENTS", "Tracker", "main", "require"]

# The child process of Tracker logs one job's scalars as a run of W&B or MLflow. stdin: {"client", "project", "job",
# "config"}, then {"scalars": [[tag, value, step, Unix seconds], ...]}, then {"end": "finished", "failed" or "killed"}.
# If the end is missing, the run was killed. stdout: {"note"} and {"warning"}, for the user. A failure of the client
# ends this process, after a warning.

INIT_LIMIT = 15  # seconds; without an answer by then W&B runs offline
BATCH = 1000  # metrics in a request, MLflow's own limit
LONGEST = 500  # characters of a parameter

_Scalar = Sequence[Any]  # tag, value, step, Unix seconds


class Run(Protocol):
    """A run of a tracker. `place`: where to find it."""

    place: str

    def log(self, scalars: Sequence[_Scalar]) -> None:
        """Log scalars of any tags and steps."""

    def end(self, how: str) -> None:
        """End the run. how: "finished", "failed" or "killed"."""


class WandbRun:
    """A run of W&B; offline without an API key, or if the server does not answer.

    Processes have steps of their own, which may go back in W&B's order. So "step" is a metric, and the axis of all
    metrics.
    """

    def __init__(self, project: str, job: str, config: Mapping[str, Any]) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        settings = wandb.Settings(silent=True, console="off", init_timeout=INIT_LIMIT)
        given: dict[str, Any] = {"project": project, "name": job, "config": dict(config), "settings": settings}
        try:
            self._run = wandb.init(**given | {"mode": mode})
        except wandb.errors.Error:
            if mode != "online":
                raise
            mode = "offline"
            self._run = wandb.init(**given | {"mode": mode})
        self._run.define_metric("*", step_metric="step")
        folder = Path(self._run.dir).parent
        self.place = f"W&B: {self._run.url}" if mode == "online" else f"W&B, offline: wandb sync {folder}"

    def log(self, scalars: Sequence[_Scalar]) -> None:
        rows: dict[int, dict[str, Any]] = {}
        for tag, value, step, _ in scalars:
            rows.setdefault(step, {"step": step})[tag] = value
        for row in rows.values():
            self._run.log(row)

    def end(self, how: str) -> None:
        self._run.finish(exit_code=0 if how == "finished" else 1)


class MlflowRun:
    """A run of MLflow, at MLFLOW_TRACKING_URI. If that is not set, in MLflow's database ./mlflow.db. mlflow-skinny has
    no database, so there the run is in the folder ./mlruns.
    """

    def __init__(self, project: str, job: str, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri and importlib.util.find_spec("sqlalchemy") is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = Path("mlruns").absolute().as_uri()
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(uri or None)
        known = self._client.get_experiment_by_name(project)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(project)
        self._run = self._client.create_run(experiment, run_name=job).info.run_id
        parameters = [Param(name, str(value)[:LONGEST]) for name, value in config.items()]
        for first in range(0, len(parameters), 100):
            self._client.log_batch(self._run, params=parameters[first : first + 100])
        self.place = f"MLflow: run {self._run} of experiment {project} in {uri or 'its default store'}"

    def log(self, scalars: Sequence[_Scalar]) -> None:
        found = [self._metric(tag, value, round(1000 * when), step) for tag, value, step, when in scalars]
        for first in range(0, len(found), BATCH):
            self._client.log_batch(self._run, metrics=found[first : first + BATCH])

    def end(self, how: str) -> None:
        self._client.set_terminated(self._run, how.upper())


RUNS: Mapping[str, Callable[[str, str, Mapping[str, Any]], Run]] = {"wandb": WandbRun, "mlflow": MlflowRun}


def main(runs: Mapping[str, Callable[[str, str, Mapping[str, Any]], Run]] = RUNS) -> int:
    """Log the objects that arrive on stdin. Return the exit status."""
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the client may print
    begin = json.loads(sys.stdin.readline())
    try:
        run = runs[begin["client"]](begin["project"], begin["job"], begin["config"])
        _tell(own, note=run.place)
        how = "killed"
        for line in sys.stdin:
            message = json.loads(line)
            how = message.get("end", how)
            if message.get("scalars"):
                run.log(message["scalars"])
        run.end(how)
    except Exception as error:
        _tell(own, warning=first_line(error) or repr(error))
    return 0


def _tell(stream: Any, **message: str) -> None:
    print(json.dumps(message), file=stream, flush=True)


def _has_key() -> bool:
    """Whether W&B has an API key: from WANDB_API_KEY, or from `wandb login`, which writes it to ~/.netrc."""
    import wandb

    return bool(wandb.login(prompt=False, verify=False))


if __name__ == "__main__":
    sys.exit(main())


CLIENTS: Mapping[str, tuple[str, str]] = {"wandb": ("W&B", "wandb"), "mlflow": ("MLflow", "mlflow-skinny")}
"""By the client's module: its title, and the package that contains it."""
CHILD = (sys.executable, "-P", "-m", "geomx_cli.observe.exports.tracker")
LIMIT = 30.0  # seconds for the end of the upload
ENDS: Mapping[str, str] = {"done": "finished", "done in part": "finished", "failed": "failed"}
"""How the run ends, by the job's status; otherwise it was killed."""


def require(client: str) -> None:
    """Raise InvalidSettings if the client is not installed. It is not imported: that takes seconds."""
    found = importlib.util.find_spec(client)
    if found is None or found.origin is None:  # a module without an origin is a folder, such as ./wandb of earlier runs
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
        """Send the pending scalars, and wait until the client has ended the run. status: the job's; see ENDS."""
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
