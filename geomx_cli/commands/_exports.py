"""Live export of a job's metrics to TensorBoard event files and Prometheus."""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from geomx_cli.core.errors import InvalidSettings, UsageError

if TYPE_CHECKING:
    from geomx_cli.core.events import Event
    from geomx_cli.jobs.view.progress import Progress
    from geomx_cli.observe.exports.tensorboard import Board

__all__ = ["Exports", "export_options"]


class Exports:
    """Exports a job's metrics to a folder for TensorBoard and at a port for Prometheus, each if given. Must be closed.

    Raises UsageError for a token without a port.
    """

    def __init__(
        self, tensorboard: str | None = None, metrics_port: int | None = None, metrics_token: str | None = None
    ) -> None:
        if metrics_token and not metrics_port:
            raise UsageError("--metrics-token without --metrics-port", "give both")
        self._folder, self._port, self._token = tensorboard, metrics_port, metrics_token
        self._board: Board | None = None
        self._opened = ExitStack()

    def __bool__(self) -> bool:
        """Whether anything is exported."""
        return bool(self._folder or self._port)

    def open(self, progress: "Progress") -> None:
        """Export the metrics of `progress` from now on. Raises InvalidSettings if a package is not installed or the
        token is invalid, CheckFailed if the folder or port cannot be used.
        """
        if self._folder:
            from geomx_cli.observe.exports.tensorboard import Board

            self._board = Board(Path(self._folder, progress.job))
            self._opened.callback(self._board.close)
            click.echo(f"TensorBoard's event files: {self._board.folder}", err=True)
        if self._port:
            from geomx_cli.observe.exports.prometheus import Metrics

            metrics = Metrics(progress, self._port, _token(self._token))
            self._opened.callback(metrics.close)
            click.echo(f"metrics: http://127.0.0.1:{self._port}/metrics", err=True)

    def on_event(self, process: str, event: "Event") -> None:
        """Export an event of a process, after it was applied to the progress."""
        if self._board is not None:
            self._board.take(process, event)

    def close(self) -> None:
        """Write what is pending, and stop serving."""
        self._opened.close()


def export_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds --tensorboard, --metrics-port and --metrics-token to a command, as its argument `exports`."""

    @functools.wraps(function)
    def command(
        *, tensorboard: str | None, metrics_port: int | None, metrics_token: str | None, **others: Any
    ) -> Any:
        return function(exports=Exports(tensorboard, metrics_port, metrics_token), **others)

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
    return board(metrics(token(command)))


def _token(path: str | None) -> str:
    """Return the file's content; "" without a file. Raises InvalidSettings for an invalid token."""
    text = Path(path).read_text(errors="replace").strip() if path else ""
    if path and not (text.isascii() and text.isprintable() and len(text) >= 16):
        raise InvalidSettings(f"{path} has no token", "write one line of 16 characters or more to it")
    return text
