"""An allocator for tests. Its machines are files in $POOL/free, moved to $POOL/JOB/REQUEST while a job has them; each
file holds the fields of Host that it determines. Requests wait while $POOL/closed exists.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.options import Option
from geomx_cli.core.plugins import Spec
from geomx_cli.core.typed import to_type
from geomx_cli.hosts.allocation import Waiting
from geomx_cli.hosts.interface import Connector
from geomx_cli.inventory import Host, Request

name = "pool"
options: tuple[Option, ...] = ()


def refuses(spec: Spec) -> str | None:
    """See Plugin.refuses."""
    return "it has no machines for one plane" if spec.options["topology"] == "flat" else None


def ask(request: Request, hosts: Sequence[Host], job: str, spec: Spec, login: Connector) -> None:
    """See Allocator.ask."""
    folder(job, request).mkdir(parents=True)


def given(request: Request, hosts: Sequence[Host], job: str, login: Connector) -> Sequence[Host] | Waiting:
    """See Allocator.given."""
    pool, own = Path(os.environ["POOL"]), folder(job, request)
    if (pool / "closed").exists():
        return Waiting("for the pool to open")
    for number, host in enumerate(hosts):
        if not (own / str(number)).exists():
            machine = min((pool / "free").iterdir(), default=None)
            if machine is None:
                raise CheckFailed(f"there is no machine for {host.name}", "wait until another job has ended")
            machine.rename(own / str(number))
    fields = [json.loads((own / str(number)).read_bytes()) for number in range(len(hosts))]
    return [to_type({**msgspec.to_builtins(host), **own}, Host) for host, own in zip(hosts, fields, strict=True)]


def release(request: Request, job: str, login: Connector) -> str:
    """See Allocator.release."""
    pool = Path(os.environ["POOL"])
    if (pool / "broken").exists():
        raise OSError("the pool does not answer")
    for machine in folder(job, request).glob("*"):
        machine.rename(pool / "free" / f"{job}-{request.name}-{machine.name}")
    return ""


def folder(job: str, request: Request) -> Path:
    return Path(os.environ["POOL"], job, request.name)
