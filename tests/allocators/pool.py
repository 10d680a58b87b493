"""An allocator for tests. Its machines are files in $POOL/free, moved to $POOL/JOB while a job has them; each file
holds the fields of Host that it determines. `allocate` waits while $POOL/closed exists.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.options import Option
from geomx_cli.core.plugins import Spec
from geomx_cli.core.typed import to_type
from geomx_cli.inventory import Host, Inventory

name = "pool"
options: tuple[Option, ...] = ()


def refuses(spec: Spec) -> str | None:
    """See Plugin.refuses."""
    return "it has no machines for one plane" if spec.options["topology"] == "flat" else None


def allocate(inventory: Inventory, job: str, spec: Spec) -> Iterator[Host]:
    """See Allocator.allocate."""
    pool = Path(os.environ["POOL"])
    (pool / job).mkdir()
    for host in inventory.hosts:
        while (pool / "closed").exists():
            time.sleep(0.02)
        machine = min((pool / "free").iterdir(), default=None)
        if machine is None:
            raise CheckFailed(f"there is no machine for {host.name}", "wait until another job has ended")
        taken = machine.rename(pool / job / machine.name)
        yield to_type({**msgspec.to_builtins(host), **json.loads(taken.read_bytes())}, Host)


def release(job: str) -> None:
    """See Allocator.release."""
    pool = Path(os.environ["POOL"])
    if (pool / "broken").exists():
        raise OSError("the pool does not answer")
    for machine in (pool / job).iterdir() if (pool / job).is_dir() else ():
        machine.rename(pool / "free" / machine.name)
