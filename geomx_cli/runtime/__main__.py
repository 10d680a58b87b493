"""`python -m geomx_cli.runtime [SCRIPT [ARGUMENTS]]`: reads the environment and becomes the role that it names."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from geomx_cli import plugins
from geomx_cli.errors import GeomxError, InvalidSettings, PeerLost, TrainingFailed
from geomx_cli.events import EventLog
from geomx_cli.runtime.settings import Settings


def main(argv: list[str]) -> int:
    """Run the role to its end; returns the exit status."""
    try:
        settings = Settings.from_environment(plugins.table())
    except GeomxError as error:
        return _failed(EventLog(None), error)
    events = event_log(settings)
    try:
        if settings.role == "worker":
            _work(settings, events, argv)
        else:
            _serve(settings, events)
    except GeomxError as error:
        status = _failed(events, error)
        if settings.role == "worker":
            sys.stdout.flush()
            os._exit(status)  # at a normal exit MXNet would wait for operations that never end
        return status
    if settings.role != "worker":
        events.write("finished")
    return 0


def event_log(settings: Settings) -> EventLog:
    """This process's event log, in the job's directory; one that drops everything if there is none."""
    name = settings.process.replace("/", "-").replace(":", "-")
    path = Path(settings.job_dir, "events", f"{name}.jsonl") if settings.job_dir and name else None
    rank = -1 if settings.rank is None else settings.rank
    talk = None if settings.role == "worker" else sys.stderr
    return EventLog(path, party=settings.party, role=settings.role, rank=rank, talk=talk)


def _work(settings: Settings, events: EventLog, argv: list[str]) -> None:
    if argv:
        from geomx_cli.runtime import script

        script.run(argv)
        return
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime import training

    client = Client(settings, events, part(settings, "delivery", "worker")())
    try:
        training.main(client)
        client.leave()
        client.close()
    except Exception as error:
        cause = client.failure or error  # MXNet raises what failed in its engine as an error of its own
        client.close(cause if isinstance(cause, GeomxError) else TrainingFailed(repr(error)))
        if cause is error:
            raise
        raise cause from None


def _serve(settings: Settings, events: EventLog) -> None:
    if settings.role.endswith("scheduler"):
        from geomx_cli.ps.scheduler import Scheduler

        plane = settings.upper if settings.role == "global_scheduler" else settings.local
        assert plane is not None
        Scheduler(settings, plane, events).run()
        return
    from geomx_cli.ps.server import Server

    Server(settings, events, part(settings, "algo", "server")(settings), part(settings, "delivery", "server")()).run()


def part(settings: Settings, option: Literal["algo", "delivery"], side: plugins.Side) -> Callable[..., Any]:
    """The factory of the chosen plug-in's part. Raises InvalidSettings for one that has none."""
    kind: plugins.Kind = "algorithm" if option == "algo" else "delivery"
    name = settings.text(option)
    factory = plugins.factory(plugins.find(kind, name), side)
    if factory is None:
        raise InvalidSettings(f"the {kind} {name!r} has no part in a {side}", "choose another")
    return factory


def _failed(events: EventLog, error: GeomxError) -> int:
    peer = error.peer if isinstance(error, PeerLost) else ""
    events.write("failed", message=error.message, hint=error.hint, peer=peer)
    print(f"error: {error.message}" + (f"\n  {error.hint}" if error.hint else ""), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
