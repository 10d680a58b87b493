"""The end of a bundled worker that may be killed while it says goodbye.

Some of its servers and its scheduler may have heard it then, and may have ended. Others wait for it. So a worker notes
that it has done all before it says goodbye, and its next life only says it once more, to whom it still finds.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from geomx_cli.core.errors import GeomxError
from geomx_cli.core.state_notes import StateNotes, are_continued

if TYPE_CHECKING:
    from geomx_cli.contract.settings import Settings
    from geomx_cli.core.event_log import EventLog
    from geomx_cli.ps.cluster.membership import Membership
    from geomx_cli.ps.cluster.node import Node

__all__ = ["await_end", "begin", "end", "has_begun", "is_over", "note_over"]

_LOOK = 0.05  # seconds
_LIMIT = 10.0  # seconds: who is still there answers at once, or is restarted itself


def begin(settings: "Settings") -> None:
    """The worker has done all, and only says goodbye."""
    if settings.state_dir:
        _notes(settings).part()


def has_begun(settings: "Settings") -> bool:
    """Whether an earlier life of this worker was killed while it said goodbye."""
    return bool(settings.state_dir) and _notes(settings).is_parting


def note_over(settings: "Settings") -> None:
    """The scripts of all workers of this one's group are over: its next life only leaves the job, without them."""
    _notes(settings).note_over()


def is_over(settings: "Settings") -> bool:
    """Whether an earlier life of this worker has called `note_over`."""
    return bool(settings.state_dir) and _notes(settings).is_over


def await_end(settings: "Settings", fails: Callable[[], bool]) -> None:
    """Wait for the agent, after another worker of this one's group has died. Usually the agent ends this process, and
    starts the whole group again. Return if the job ends, if `fails` is true, or if the option `silence` has passed.
    """
    until = time.monotonic() + settings.number("silence")
    folder = Path(settings.state_dir).parent
    while are_continued(folder) and not fails() and time.monotonic() < until:
        time.sleep(_LOOK)


def end(settings: "Settings", events: "EventLog") -> None:
    """Leave the planes once more. The job does not wait for this worker: it ends without workers that have ended."""
    from geomx_cli.ps.cluster.node import Node
    from geomx_cli.ps.peers import Peers

    plane = settings.local
    assert plane is not None
    limits = {"timeout": _LIMIT, "silence": _LIMIT}
    settings = replace(settings, supervised=False, options={**settings.options, **limits})
    node = Node(settings, events, on_tensor=lambda *_: None, on_request=lambda _: None, on_lost=lambda *_: None)
    node.telemetry.state = "finished"
    try:
        node.loop.call_later(_LIMIT, node.loop.stop)
        endpoints = Peers(node).listen()
        node.join(plane, "worker", lambda roster: _say_goodbye(node, roster), rank=settings.rank, endpoints=endpoints)
        with suppress(GeomxError):
            node.run()
    finally:
        node.close()
    events.write(node.telemetry)  # tells the agent that this worker has left


def _notes(settings: "Settings") -> StateNotes:
    return StateNotes(Path(settings.state_dir))


def _say_goodbye(node: "Node", roster: "Membership") -> None:
    settings = node.settings
    links = [
        node.transport.dial(
            server.endpoint_for(settings.host, settings.party), server.process,
            wide_area=server.party != settings.party, plane="local", rank=roster.rank,
        )
        for server in roster.servers()
    ]  # fmt: skip
    node.goodbye(links)
