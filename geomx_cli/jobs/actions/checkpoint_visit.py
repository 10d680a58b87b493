"""A checkpoint before `geomx stop` ends a job, even if no `geomx launch` or `attach` follows the job."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from geomx_cli.agent.checkpoints import BUSY, NO_STATE
from geomx_cli.core.errors import GeomxError
from geomx_cli.core.jsonlines import decode
from geomx_cli.core.untrusted import plain
from geomx_cli.hosts import Connector, everywhere
from geomx_cli.jobs.actions.streams import HostStream
from geomx_cli.jobs.store.registry import KnownJob

__all__ = ["checkpoint_before_stop"]

_SHOWN = 400  # characters of a problem
_BUSY, _PAUSE = 20.0, 0.3  # seconds to wait for the end of a checkpoint that others take, and between attempts
_UPLOADING = 600.0  # seconds, and for the record as many


class _Absent(Exception):
    """An agent does not answer: it has ended, or its host cannot be reached."""


def checkpoint_before_stop(
    job: KnownJob, hosts: Mapping[str, Connector], note: Callable[[str], object]
) -> int | None:
    """Take a checkpoint of a job on all its hosts, and upload it if the job does that. Return its number; None if there
    is none, as the job takes none, or its agents do not all run.

    note: gets why there is none in a job that could have one, or why it is not uploaded.
    """
    options = job.plan.spec.options
    if not options["restarts"] or not options["checkpoint_every"]:
        return None
    with ExitStack() as stack:
        try:
            streams = everywhere(lambda name: HostStream(hosts[name], "checkpoint", job.directory_on(name)), hosts)
            visits = _Visits(dict(zip(hosts, streams, strict=True)))
            stack.callback(visits.close)
            return _checkpoint(visits, job.plan.hosts[0], str(options.get("checkpoint_to", "")), note)
        except (_Absent, GeomxError, OSError):  # `geomx stop` itself reports hosts that cannot be reached
            return None


def _checkpoint(visits: "_Visits", writer: str, place: str, note: Callable[[str], object]) -> int | None:
    until = time.monotonic() + _BUSY
    while problem := visits.ask({"type": "freeze"}):
        visits.tell({"type": "thaw"})
        if BUSY in problem and time.monotonic() < until:  # at an interval, or by another `geomx stop`
            time.sleep(_PAUSE)
            continue
        if NO_STATE not in problem:
            note(f"no checkpoint: {problem}")
        return None
    number = max(int(time.time()), visits.newest + 1)
    if problem := visits.ask({"type": "keep", "number": number}):
        note(f"no checkpoint: {problem}")
        return None
    if place and (problem := _upload(visits, writer, number)):
        note(f"the checkpoint is on the hosts only, not in {place}: {problem}")
    return number


def _upload(visits: "_Visits", writer: str, number: int) -> str:
    """Upload a checkpoint, and return the problem."""
    message = {"number": number, "limit": _UPLOADING}
    try:
        problem = visits.ask({"type": "upload", **message})
        return problem or visits.ask({"type": "publish", "hosts": list(visits.streams), **message}, [writer])
    except _Absent as error:
        return str(error)


class _Visits:
    """Connections to all agents of a job, as a visitor: whoever follows the job goes on.

    newest: the highest number of a checkpoint on a host, as far as the agents have said.
    """

    def __init__(self, streams: Mapping[str, HostStream]) -> None:
        self.streams = streams
        self.newest = 0

    def ask(self, message: dict[str, Any], names: list[str] | None = None) -> str:
        """Send a message to all agents, or to those of `names`; return the first problem, "" if none has one. Raises
        _Absent.
        """

        def one(name: str) -> tuple[str, int]:
            stream = self.streams[name]
            try:
                stream.send(message)
                answer = decode(stream.line(objects=True))
                problem, newest = str(answer.get("problem", "")), int(answer.get("newest", 0))
            except (EOFError, OSError, ValueError):
                raise _Absent(f"the agent on host {name} does not answer any more") from None
            return f"host {name}: {plain(problem)[:_SHOWN]}" if problem else "", newest

        answers = everywhere(one, self.streams if names is None else names)
        self.newest = max(self.newest, *(newest for _, newest in answers))
        return min((problem for problem, _ in answers if problem), default="")

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message without an answer."""
        for stream in self.streams.values():
            stream.send(message)

    def close(self) -> None:
        """End the visit."""
        for stream in self.streams.values():
            stream.close()
