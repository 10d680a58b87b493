"""Common parts of commands on a job: the argument, and the default job."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.units import format_duration, parse_duration

if TYPE_CHECKING:
    from geomx_cli.jobs.store.registry import KnownJob

__all__ = ["Duration", "chosen", "job_argument"]


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """Seconds, written as "10s" or "2m", from `least` to `most`."""

    name = "duration"

    def __init__(self, least: float, most: float) -> None:
        self._least, self._most = least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See click.ParamType.convert."""
        try:
            seconds = value if isinstance(value, float) else parse_duration(value)
        except InvalidSettings as error:
            self.fail(f"{error.message}; {error.hint}", param, ctx)
        if not self._least <= seconds <= self._most:
            least, most = format_duration(self._least), format_duration(self._most)
            self.fail(f"{value} is not from {least} to {most}", param, ctx)
        return seconds


def job_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds the argument [JOB] to a command, as `name`."""
    return click.argument("name", default="", metavar="[JOB]")(function)


def chosen(name: str) -> "KnownJob":
    """Return the job `name`; without a name the newest running job, else the newest, reported on stderr."""
    from geomx_cli.jobs.store.registry import find

    job = find(name)
    if not name:
        click.echo(f"job {job.id}", err=True)
    return job
