"""Live export of a job's metrics: TensorBoard event files, Prometheus, W&B, MLflow."""

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from geomx_cli.core.errors import InvalidSettings, UsageError

if TYPE_CHECKING:
    from geomx_cli.core.events import Event
    from geomx_cli.core.options import Value
    from geomx_cli.jobs.view.progress import Progress
    from geomx_cli.observe.exports.scalars import Board
    from geomx_cli.observe.exports.tracker import Tracker

__all__ = ["Exports", "export_options"]


class Exports:
    """Exports a job's metrics to a folder for TensorBoard, at a port for Prometheus, and to a project of W&B and an
    experiment of MLflow, each if given. Must be closed.

    Raises UsageError for a token without a port, InvalidSettings if the client of W&B or MLflow is not installed.
    """

    def __init__(
        self, tensorboard: str | None = None, metrics_port: int | None = None, metrics_token: str | None = None,
        trackers: Mapping[str, str | None] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        if metrics_token and not metrics_port:
            raise UsageError("--metrics-token without --metrics-port", "give both")
        self._folder, self._port, self._token = tensorboard, metrics_port, metrics_token
        self._trackers = {client: project for client, project in trackers.items() if project}
        self._takers: list[Board | Tracker] = []
        self._status = ""
        self._opened = ExitStack()
        if self._trackers:
            from geomx_cli.observe.exports.tracker import require

            for client in self._trackers:
                require(client)

    def __bool__(self) -> bool:
        """Whether anything is exported."""
        return bool(self._folder or self._port or self._trackers)

    def open(self, progress: "Progress", options: Mapping[str, "Value"], *, replays: bool = False) -> None:
        """Export the metrics of `progress` from now on; `options` are the parameters of a run. Raises InvalidSettings
        if a package is not installed or the token is invalid, CheckFailed if the folder or port cannot be used.

        replays: `on_event` may wait for those who write, as its events may be those of a finished job.
        """
        if self._folder:
            from geomx_cli.observe.exports.scalars import Board

            board = Board(Path(self._folder, progress.job), waits=replays)
            self._takers.append(board)
            self._opened.callback(board.close)
            click.echo(f"TensorBoard's event files: {board.folder}", err=True)
        if self._port:
            from geomx_cli.observe.exports.prometheus import Metrics

            metrics = Metrics(progress, self._port, _token(self._token))
            self._opened.callback(metrics.close)
            click.echo(f"metrics: http://127.0.0.1:{self._port}/metrics", err=True)
        for client, project in self._trackers.items():
            from geomx_cli.observe.exports.tracker import Tracker

            tracker = Tracker(client, project, progress.job, options, waits=replays)
            self._takers.append(tracker)
            self._opened.callback(lambda one: one.close(self._status), tracker)

    def on_event(self, process: str, event: "Event") -> None:
        """Export an event of a process, after it was applied to the progress."""
        for taker in self._takers:
            taker.take(process, event)

    def close(self, status: str = "") -> None:
        """Write what is pending, and stop serving. status: of the job; see Observer."""
        self._status = status
        self._opened.close()


def export_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds the options of exports to a command, as its argument `exports`."""

    @functools.wraps(function)
    def command(
        *, tensorboard: str | None, metrics_port: int | None, metrics_token: str | None, wandb: str | None,
        mlflow: str | None, **others: Any,
    ) -> Any:  # fmt: skip
        exports = Exports(tensorboard, metrics_port, metrics_token, {"wandb": wandb, "mlflow": mlflow})
        return function(exports=exports, **others)

    metrics = click.option(
        "--metrics-port", type=click.IntRange(1, 65535), metavar="NUMBER",
        help="Serve Prometheus metrics on this loopback port; needs geomx-cli[metrics].",
    )  # fmt: skip
    token = click.option(
        "--metrics-token", type=click.Path(exists=True, dir_okay=False), metavar="FILE",
        help="Require the bearer token in FILE from Prometheus.",
    )  # fmt: skip
    board = click.option(
        "--tensorboard", type=click.Path(file_okay=False), metavar="DIR",
        help="Write TensorBoard's event files to DIR/JOB; needs geomx-cli[tensorboard].",
    )  # fmt: skip
    wandb = click.option(
        "--wandb", metavar="PROJECT",
        help="Log the metrics as a run of this W&B project (offline without an API key); needs geomx-cli[wandb].",
    )  # fmt: skip
    mlflow = click.option(
        "--mlflow", metavar="EXPERIMENT",
        help="Log the metrics as a run of this MLflow experiment; needs geomx-cli[mlflow].",
    )  # fmt: skip
    return board(metrics(token(wandb(mlflow(command)))))


def _token(path: str | None) -> str:
    """Return the file's content; "" without a file. Raises InvalidSettings for an invalid token."""
    text = Path(path).read_text(errors="replace").strip() if path else ""
    if path and not (text.isascii() and text.isprintable() and len(text) >= 16):
        raise InvalidSettings(f"{path} has no token", "write one line of 16 characters or more to it")
    return text
