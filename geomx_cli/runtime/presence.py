"""Sends messages to a process's scheduler in its name, with its variables. An agent runs this for other processes.

    python -m geomx_cli.runtime.presence fail CAUSE HINT    it has failed: one that was killed tells nobody
    python -m geomx_cli.runtime.presence absent CAUSE HINT  it has ended; this is a failure if it had not joined
    python -m geomx_cli.runtime.presence stay PROCESS...    these of its host have not joined; until stdin ends

A process that has not joined has no connection. Without these messages, other processes would wait for it, and for a
killed one.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from geomx_cli.contract.settings import Settings
from geomx_cli.core import plugins
from geomx_cli.core.errors import GeomxError
from geomx_cli.core.event_log import EventLog
from geomx_cli.core.events import Telemetry
from geomx_cli.ps.cluster.bodies import MAX_AWAITED, Body
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.scheduler import PRESENCE

__all__ = ["RoundTelemetry", "main"]

# Telemetry of a script's worker that is no member of a plane.

_PERIOD = 1.0


class RoundTelemetry:
    """Writes the number of rounds once per second, in a thread of its own, as members of a plane do."""

    def __init__(self, events: EventLog, rounds: Callable[[], int]) -> None:
        self._events = events
        self._rounds = rounds
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="geomx-telemetry", daemon=True).start()

    def stop(self) -> None:
        """Write the last number, and stop."""
        self._ended.set()
        self._write()

    def _run(self) -> None:
        while not self._ended.wait(_PERIOD):
            self._write()

    def _write(self) -> None:
        self._events.write(Telemetry(state="training", round=self._rounds()))


_LIMIT = 8.0  # seconds for an answer


def main(verb: str, *words: str) -> int:
    """Return 0 if the scheduler has answered, or there is none."""
    settings = Settings.from_environment(plugins.table())
    plane = settings.local or settings.upper
    if plane is None or settings.role.endswith("scheduler"):
        return 0  # members notice that their scheduler has ended
    node = Node(
        replace(settings, incarnation=0), EventLog(None), on_tensor=lambda *_: None, on_request=lambda _: None,
        on_renewed=lambda _: stay() if verb == "stay" else None,
    )  # fmt: skip
    link = node.transport.dial(plane.to_dial(), "the scheduler", wide_area=False, plane=PRESENCE)
    answered = list[bool]()

    def ask(topic: str, body: Body, limit: float, *, last: bool) -> None:
        def end(answer: object) -> None:
            answered.append(not isinstance(answer, GeomxError))
            if last or not answered[-1]:
                node.loop.stop()

        node.rpc.ask(link, topic, body, end, end, limit, "always")

    def tell(processes: Sequence[str], limit: float, *, last: bool) -> None:
        ask("awaited", {"host": settings.host, "processes": list(processes)}, limit, last=last)

    def stay() -> None:
        """Report the awaited processes; a restarted scheduler gets this report too."""
        for first in range(0, len(words), MAX_AWAITED):
            tell(words[first : first + MAX_AWAITED], settings.number("silence"), last=False)

    def leave() -> None:
        sys.stdin.buffer.read()
        node.loop.submit(lambda: tell((), _LIMIT, last=True))

    if verb != "stay":
        cause, hint = words
        ask(verb, {"process": node.process, "message": f"{node.process} {cause}", "hint": hint}, _LIMIT, last=True)
    else:
        node.liveness.watch(link)
        stay()
        threading.Thread(target=leave, daemon=True).start()
    try:
        node.run()
    except GeomxError:  # the scheduler is lost
        return 1
    node.close()
    return 0 if answered[-1:] == [True] else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
