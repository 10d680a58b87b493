"""Output of launch and attach at the end: the job's result on stdout, its error raised."""

from typing import TYPE_CHECKING

import click

from geomx_cli.commands._json import print_json

if TYPE_CHECKING:
    from geomx_cli.jobs.view.conclusion import Conclusion

__all__ = ["report"]


def report(end: "Conclusion", *, json: bool) -> int:
    """Print the result, as a summary or one JSON object; return 0, or raise the end's error."""
    from geomx_cli.jobs.view.result import in_words

    if json and end.result:
        print_json(end.result)
    elif end.result and (words := in_words(end.result)):
        click.echo(words)
    if end.error is not None:
        raise end.error
    return 0
