"""Leaves the job in the name of a worker that has died. Its agent runs this module with the worker's variables.

    python -m geomx_cli.runtime.departure

It completes the contributions that the worker had begun, so that each of them counts at all servers or at none. Then it
leaves like a worker that has finished: servers and barriers no longer wait for it.
"""

import sys
from pathlib import Path

from geomx_cli.contract.settings import Settings
from geomx_cli.core import plugins
from geomx_cli.core.errors import GeomxError
from geomx_cli.core.events import ProcessFailed
from geomx_cli.ps.client import Client
from geomx_cli.runtime.plugin_factory import event_log, part
from geomx_cli.runtime.training import parting

__all__ = ["main"]


def main() -> int:
    """Return the exit status: 0 once all servers know, or the job has ended without this worker."""
    settings = Settings.from_environment(plugins.table())
    events = event_log(settings)
    if parting.has_begun(settings):
        parting.end(settings, events)
        return 0
    client = Client(settings, events, part(settings, "delivery", "worker")())
    client.report(state="leaving")
    try:
        plugins.algorithms()[settings.text("algo")].depart(client)
        client.recovery.complete_contributions(Path(settings.state_dir))
        client.leave()
        parting.begin(settings)
        client.close()
    except GeomxError as error:
        cause = client.failure or error
        events.write(ProcessFailed(message=cause.message, hint=cause.hint))
        client.close(cause)
        print(f"error: {cause}", file=sys.stderr)
        return cause.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
