"""The child process of Tracker: logs one job's scalars as a run of W&B or MLflow.

stdin: {"client", "project", "job", "config"}, then {"scalars": [[tag, value, step, Unix seconds], ...]}, then
{"end": "finished", "failed" or "killed"}; without an end the run was killed. stdout: {"note"} and {"warning"}, for the
user. A failure of the client ends this process, after a warning.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from geomx_cli.core.untrusted import first_line

__all__ = ["main"]

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

    Processes have steps of their own, which may go back in W&B's order; so "step" is a metric, and the axis of all.
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
    """A run of MLflow, at MLFLOW_TRACKING_URI; else in MLflow's database ./mlflow.db, or with mlflow-skinny, which has
    none, in the folder ./mlruns.
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
    """Log what arrives on stdin; return the exit status."""
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
