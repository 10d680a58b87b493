"""How launch and attach end: the job's result on stdout, its error raised."""

import json as json_module
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from geomx_cli.status.end import End

__all__ = ["tell"]


def tell(end: "End", *, json: bool) -> int:
    """Print the result, as a summary or one JSON object; 0, or raises the end's error."""
    from geomx_cli.status.result import in_words

    if end.result and (words := json_module.dumps(end.result) if json else in_words(end.result)):
        click.echo(words)
    if end.error is not None:
        raise end.error
    return 0
