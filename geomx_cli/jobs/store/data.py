"""Provides the bundled job's data set on every host that trains; downloads it if missing."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.module_command import module_command
from geomx_cli.hosts import Connector, everywhere
from geomx_cli.inventory import Inventory
from geomx_cli.plan import Plan
from geomx_cli.runtime.training import catalog

if TYPE_CHECKING:
    from geomx_cli.runtime.training.fetch import Progress

__all__ = ["provide"]

_LIMIT = 1200.0
_WORDS = 500


def provide(
    planned: Plan,
    inventory: Inventory,
    hosts: Mapping[str, Connector],
    note: Callable[[str], None],
    on_progress: "Progress",
) -> None:
    """Ensure that each host that trains has the data; a no-op for jobs with a script or a user's data.

    `on_progress` receives the progress of a download to this machine. Blocks for at most 20 minutes. Raises
    HostUnreachable or InvalidSettings for this machine, CheckFailed with the remote message for another.
    """
    name, folder = str(planned.spec.options["data"]), str(planned.spec.options["data_dir"])
    if planned.spec.script or name not in catalog.DATA_SETS:
        return
    train = list(dict.fromkeys(process.host for process in planned.processes if process.global_rank is not None))
    far = [host for host in train if not inventory.host(host).shares_files]
    if far != train and catalog.find(name, folder) is None:
        from geomx_cli.runtime.training import fetch

        fetch.ensure(name, folder, on_progress)
    there = [hosts[host] for host in far]

    def fetch_on(host: Connector) -> None:
        where = ["--data-dir", folder, "--existing"] if folder else []
        done = host.run(module_command(host.python, "geomx_cli", "data", "fetch", name, *where), limit=_LIMIT)
        if done.status != 0:
            said = done.errors.decode(errors="replace").strip()[-_WORDS:]
            raise CheckFailed(f"host {host.name} has no {name} and cannot fetch it: {said}", "put it there by hand")

    if there:
        note(f"looking for {name} on {', '.join(host.name for host in there)}")
        everywhere(fetch_on, there)
