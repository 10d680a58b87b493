"""What commands about a job have in common: its argument, and which one is meant without it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from geomx_cli.errors import InvalidSettings
from geomx_cli.units import parse_duration

if TYPE_CHECKING:
    from geomx_cli.job.known import KnownJob

__all__ = ["Duration", "chosen", "job_argument"]


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """Seconds, written as "10s" or "2m"."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See click.ParamType.convert."""
        try:
            return value if isinstance(value, float) else parse_duration(value)
        except InvalidSettings as error:
            self.fail(f"{error.message}; {error.hint}", param, ctx)


def job_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: the command takes [JOB], as `name`."""
    return click.argument("name", default="", metavar="[JOB]")(function)


def chosen(name: str) -> "KnownJob":
    """The job called `name`; without a name the newest that runs, else the newest, and stderr says which."""
    from geomx_cli.job.known import find

    job = find(name)
    if not name:
        click.echo(f"job {job.id}", err=True)
    return job
