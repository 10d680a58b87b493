"""The status files of a job's agents, read from their hosts without contacting the agents."""

from collections.abc import Mapping
from dataclasses import dataclass

from geomx_cli.agent.status import FILE_NAME
from geomx_cli.core.agent_status import AgentStatus
from geomx_cli.core.errors import GeomxError
from geomx_cli.core.untrusted import decode, first_line
from geomx_cli.hosts import Connector, everywhere
from geomx_cli.jobs.store.registry import KnownJob

__all__ = ["HostStatus", "read_all"]

_LIMIT = 10.0
_SILENT = 5.0  # seconds; agents write every second
_KERNEL = ("/proc/sys/kernel/hostname", "/proc/uptime", "/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class HostStatus:
    """One host's status.json (`content`, None if missing) and its age when read, in seconds by that host's own clock.
    `problem`: an error to report to the user; "" if there is none.
    """

    host: str
    content: AgentStatus | None = None
    late: float = 0.0
    agent: str = ""
    problem: str = ""

    @property
    def reachable(self) -> bool:
        """Whether the host answered, and it is the machine that the agent was started on."""
        return self.agent not in ("unreachable", "elsewhere")

    @property
    def over(self) -> bool:
        """Whether nothing of the job can run there any more, as far as known."""
        return self.agent in ("over", "rebooted", "not started")


def read_all(job: KnownJob, hosts: Mapping[str, Connector]) -> dict[str, HostStatus]:
    """Read the status of each host, in parallel; a host that does not answer has a `problem`."""

    def read(host: Connector) -> HostStatus:
        try:
            return _read(host, job.directory_on(host.name))
        except (GeomxError, OSError) as error:
            return HostStatus(host.name, agent="unreachable", problem=first_line(error, host.name))

    return {status.host: status for status in everywhere(read, hosts.values())}


def _read(host: Connector, directory: str) -> HostStatus:
    done = host.run(["cat", f"{directory}/{FILE_NAME}", *_KERNEL], limit=_LIMIT)
    lines = done.output.decode(errors="replace").splitlines()
    if len(lines) <= len(_KERNEL) and done.status != 0:
        return HostStatus(host.name, agent="not started", problem="no agent status was found there")
    try:
        content = decode(lines[0], AgentStatus)
        late = max(0.0, float(lines[-2].split()[0]) - content["uptime"])
        alive = late > _SILENT and lines[-1] == content["boot"] and _lives(host, content)
        return _judge(host.name, content, late, lines[-1], lines[-3], alive=alive)
    except (ValueError, IndexError):
        return HostStatus(host.name, agent="damaged", problem=f"{directory}/{FILE_NAME} is damaged")


def _lives(host: Connector, content: AgentStatus) -> bool:
    """Return whether the agent that wrote `content` still runs."""
    pid, started = content["agent"]
    done = host.run(["cat", f"/proc/{pid}/stat"], limit=_LIMIT)
    fields = done.output.decode(errors="replace").rpartition(")")[2].split()
    return len(fields) > 19 and fields[0] not in "ZX" and fields[19] == str(started)


def _judge(host: str, content: AgentStatus, late: float, boot: str, machine: str, *, alive: bool) -> HostStatus:
    """Return the state of the agent. `boot`, `machine`: where the file was read; machines may share their files."""
    if content["stage"] == "over":
        return HostStatus(host, content, late, "over")
    if content["boot"] != boot and content["machine"] != machine:
        problem = f"it was started on {content['machine']}, and this is {machine}: whether it runs is known there"
        return HostStatus(host, content, 0.0, "elsewhere", problem)
    if content["boot"] != boot:
        return HostStatus(host, content, 0.0, "rebooted", "the host has rebooted; no process of the job runs there")
    if late > _SILENT and alive:
        problem = f"its agent runs, but has not written its status for {late:.0f} s (is the disk full, does it hang?)"
        return HostStatus(host, content, late, "silent", problem)
    if late > _SILENT:
        problem = f"its agent was killed: no status for {late:.0f} s, and it no longer runs"
        return HostStatus(host, content, late, "gone", problem)
    return HostStatus(host, content, late, "running")
