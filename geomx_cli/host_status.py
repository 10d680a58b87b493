"""What the agents of a job have written down about themselves, read from their hosts: cheap, and without them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from geomx_cli.agent.status import FILE_NAME
from geomx_cli.errors import GeomxError
from geomx_cli.hosts import Host, everywhere
from geomx_cli.jobs import KnownJob

__all__ = ["HostStatus", "read_all"]

_LIMIT = 10.0
_SILENT = 5.0  # seconds; an agent writes every second
_KERNEL = ("/proc/uptime", "/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class HostStatus:
    """One host's status.json (`content`, None where there is none) and how old it was when it was read, in
    seconds by that host's own clock. `problem`: what a person must know about it; "" when all is well.
    """

    host: str
    content: Mapping[str, Any] | None = None
    late: float = 0.0
    agent: str = ""
    problem: str = ""

    @property
    def reachable(self) -> bool:
        """Whether the host answered."""
        return self.agent != "unreachable"

    @property
    def over(self) -> bool:
        """Whether nothing of the job can run there any more, for all we know."""
        return self.agent in ("over", "rebooted", "not started")


def read_all(job: KnownJob, hosts: Mapping[str, Host]) -> dict[str, HostStatus]:
    """The status of each of these hosts, asked in parallel; one that does not answer says so in `problem`."""

    def read(host: Host) -> HostStatus:
        try:
            return _read(host, job.directory_on(host.name))
        except (GeomxError, OSError) as error:
            return HostStatus(host.name, agent="unreachable", problem=_first_line(error))

    return {status.host: status for status in everywhere(read, hosts.values())}


def _read(host: Host, directory: str) -> HostStatus:
    done = host.run(["cat", f"{directory}/{FILE_NAME}", *_KERNEL], limit=_LIMIT)
    *found, uptime, boot = done.output.decode(errors="replace").splitlines() or ["", ""]
    if not found and done.status != 0:
        return HostStatus(host.name, agent="not started", problem="no agent has written anything there")
    try:
        content = json.loads(found[0])
        late = max(0.0, float(uptime.split()[0]) - float(content["uptime"]))
        return _judge(host.name, content, late, boot)
    except (ValueError, KeyError, TypeError, IndexError):
        return HostStatus(host.name, agent="damaged", problem=f"{directory}/{FILE_NAME} is damaged")


def _judge(host: str, content: Mapping[str, Any], late: float, boot: str) -> HostStatus:
    if content["stage"] == "over":
        return HostStatus(host, content, late, "over")
    if content["boot"] != boot:
        return HostStatus(host, content, 0.0, "rebooted", "it was booted again since; nothing of the job runs there")
    if late > _SILENT:
        problem = f"its agent has written nothing for {late:.0f} s: it was killed, hangs, or the disk is full"
        return HostStatus(host, content, late, "silent", problem)
    return HostStatus(host, content, late, "running")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
