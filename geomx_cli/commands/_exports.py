"""Live export of a job's metrics to TensorBoard event files and Prometheus."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from geomx_cli.core.events import Event
    from geomx_cli.jobs.view.progress import Progress

__all__ = ["export_options", "exporting"]


def export_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds --tensorboard, --metrics-port and --metrics-token to a command."""
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
    return board(metrics(token(function)))


@contextlib.contextmanager
def exporting(
    progress: "Progress", tensorboard: str | None, metrics_port: int | None, metrics_token: str | None = None
) -> Iterator[Callable[[str, "Event"], None]]:
    """Export the metrics of `progress` while the block runs. Call the yielded function with each event and its process,
    after applying the event to `progress`.

    Raises UsageError for a token without a port, InvalidSettings if a package is not installed, CheckFailed if the
    folder or port cannot be used.
    """
    if metrics_token and not metrics_port:
        from geomx_cli.core.errors import UsageError

        raise UsageError("--metrics-token without --metrics-port", "give both")
    with contextlib.ExitStack() as stack:
        board = None
        if tensorboard:
            from geomx_cli.observe.exports.tensorboard import Board

            board = Board(Path(tensorboard, progress.job))
            stack.callback(board.close)
            click.echo(f"TensorBoard's event files: {board.folder}", err=True)
        if metrics_port:
            from geomx_cli.observe.exports.prometheus import Metrics

            metrics = Metrics(progress, metrics_port, _token(metrics_token))
            stack.callback(metrics.close)
            click.echo(f"metrics: http://127.0.0.1:{metrics_port}/metrics", err=True)
        yield board.take if board is not None else lambda process, event: None


def _token(path: str | None) -> str:
    """Return the file's content; "" without a file. Raises InvalidSettings for an invalid token."""
    from geomx_cli.core.errors import InvalidSettings

    text = Path(path).read_text(errors="replace").strip() if path else ""
    if path and not (text.isascii() and text.isprintable() and len(text) >= 16):
        raise InvalidSettings(f"{path} has no token", "write one line of 16 characters or more to it")
    return text
