"""A single-process cluster, for running a script with `kv.create("dist_sync")` standalone."""

import atexit
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace

from geomx_cli.contract.settings import Settings
from geomx_cli.core import plugins
from geomx_cli.core.errors import GeomxError
from geomx_cli.core.event_log import EventLog

__all__ = ["begin"]


def begin() -> None:
    """Start a scheduler and a server in threads, and set the variables of their only worker: this process."""
    from geomx_cli.ps.cluster.scheduler import Scheduler
    from geomx_cli.ps.server import Server
    from geomx_cli.runtime.plugin_factory import part

    directory = tempfile.mkdtemp(prefix="geomx-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    endpoint = f"ipc://{directory}/scheduler"
    os.environ |= {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": "1",  # unused: both are found through the directory
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "1",
        "GEOMX_SCHEDULER": endpoint,
        "GEOMX_HOST": "this",
    }
    worker = Settings.from_environment(plugins.table())
    leading = replace(worker, role="scheduler", bind=(endpoint,))
    serving = replace(worker, role="server", bind=(f"ipc://{directory}/server",))
    assert worker.local is not None
    scheduler = Scheduler(leading, worker.local, EventLog(None))
    server = Server(
        serving, EventLog(None), part(serving, "algo", "server")(serving), part(serving, "delivery", "server")()
    )
    for node in (scheduler, server):
        threading.Thread(target=_run, args=(node.run,), name=f"geomx-{type(node).__name__}", daemon=True).start()


def _run(run: Callable[[], object]) -> None:
    """Run; failures reach the worker, which reports them."""
    try:
        run()
    except GeomxError:
        return
