"""python -m geomx_cli.runtime.death_notice CAUSE HINT: tells a process's scheduler, in its name, that it has failed.

Its agent runs this with the process's variables where no control machine follows the job: a process that was killed
tells nobody, one that has not joined yet is connected to nobody, and the others would wait for both.
"""

import sys

from geomx_cli.core import plugins
from geomx_cli.core.errors import GeomxError
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.cluster.node import Node
from geomx_cli.runtime.settings import Settings

__all__ = ["main"]

_LIMIT = 8.0  # seconds


def main(cause: str, hint: str) -> int:
    """Tell it; return 0 if it has answered."""
    settings = Settings.from_environment(plugins.table())
    plane = settings.local or settings.upper
    if plane is None or settings.role.endswith("scheduler"):
        return 0  # nobody to tell; members notice that their scheduler has ended
    node = Node(settings, EventLog(None), on_tensor=lambda *_: None, on_request=lambda _: None)
    link = node.transport.dial(plane.to_dial(), "the scheduler", wide_area=False)
    told: list[bool] = []

    def end(answer: object) -> None:
        told.append(not isinstance(answer, GeomxError))
        node.loop.stop()

    body = {"process": node.process, "message": f"{node.process} {cause}", "hint": hint}
    node.rpc.ask(link, "fail", body, end, end, _LIMIT, "always")
    node.run()
    node.close()
    return 0 if told == [True] else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
