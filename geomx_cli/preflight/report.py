"""The examination of `geomx doctor` and its report."""

import random
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

import msgspec

from geomx_cli.core.errors import GeomxError, HostUnreachable, InvalidSettings, TimedOut
from geomx_cli.core.units import counted
from geomx_cli.hosts import Connector, closing, connector
from geomx_cli.hosts.allocation import allocated
from geomx_cli.hosts.ssh.options import SshOptions
from geomx_cli.inventory import Host, Inventory
from geomx_cli.plan import JobSpec, Plan, plan
from geomx_cli.plan.automatic_topology import in_central
from geomx_cli.plan.job_spec import complete
from geomx_cli.plan.ports import choose
from geomx_cli.preflight import hosts as checks_of_hosts
from geomx_cli.preflight import links
from geomx_cli.preflight.connect import (
    ALL,
    Dialled,
    complete_inventory,
    dials,
    listening,
    unreached_servers,
    with_clocks,
)
from geomx_cli.preflight.diagnose import REACHABLE, Check, exit_code, link_checks, together
from geomx_cli.preflight.hosts import DISTRIBUTIONS, requirements
from geomx_cli.preflight.links import Measured, check_bandwidth, measure
from geomx_cli.preflight.probe_pool import Facts, ProbePool
from geomx_cli.probe.ports import ANOTHER

__all__ = ["Report", "examine", "examine_inventory", "failure_check"]

SCHEMA_VERSION = 1
_OTHERS = 30.0  # seconds to wait for the ports of other launches

Say = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """The result of an examination. `inventory` is completed as far as the hosts responded; `facts` are by host."""

    inventory: Inventory
    facts: Mapping[str, Facts]
    checks: tuple[Check, ...]
    wan: tuple[Measured, ...] = ()

    @property
    def exit_code(self) -> int:
        """See check.exit_code."""
        return exit_code(self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        levels = [check.level for check in self.checks]
        return {
            "schema_version": SCHEMA_VERSION,
            "hosts": [host.name for host in self.inventory.hosts],
            "ok": levels.count("ok"),
            "warnings": levels.count("warning"),
            "problems": levels.count("problem"),
            "checks": [asdict(check) for check in self.checks],
            "topology": self.inventory.topology,
            "topology_reason": self.inventory.topology_reason,
            "wan": [link.to_json() for link in self.wan],
            "facts": {name: msgspec.to_builtins(known, str_keys=True) for name, known in self.facts.items()},
        }


def examine(
    hosts: Mapping[str, Connector], inventory: Inventory, spec: JobSpec, *, full: bool, say: Say = lambda text: None,
    holding: ExitStack | None = None,
) -> Report:  # fmt: skip
    """Run the checks of hosts, ports and links that precede a launch.

    hosts: the inventory's hosts.
    full: also check GPUs and cores, and measure the bandwidth of each link between parties. This takes 4 s for each
        link of a machine.
    say: receives progress messages.
    holding: keeps the ports reserved against other launches and doctors until it is closed.

    Everything started on the hosts has ended on return, so the ports are free, except with `holding`. An unreachable or
    failing host is reported as a problem, and the others are still checked. If ports or interfaces are invalid, no plan
    is possible and no link is dialled. Without `full`, the checks take at most about 10 s in addition to connecting,
    even if no host responds. Raises InvalidSettings for a job that cannot be planned.
    """
    say(f"asking {counted(len(hosts), 'host')}")
    with ExitStack() as stack:
        probes = stack.enter_context(ProbePool(hosts))
        report = _Examination(probes, inventory, complete(spec), full, say).report()
        if holding is not None:
            probes.hold_ports()
            stack.pop_all()
            holding.callback(probes.close, release=False)
        return report


def examine_inventory(inventory: Inventory, spec: JobSpec, ssh: SshOptions, *, full: bool, say: Say) -> Report:
    """Run `examine` with new connections to all hosts of the inventory, allocating machines first if it has an
    allocator. A job that cannot be planned raises InvalidSettings before any host is accessed.
    """
    job = complete(spec)
    plan(choose(inventory, None), job)
    with allocated(inventory, job.job, job, ssh, job.python, say) as allocation:
        given = allocation.inventory
        with closing({host.name: connector(host, spec.python, ssh) for host in given.hosts}) as reached:
            return examine(reached, given, job, full=full, say=say)


class _Examination:
    """Turns the facts of all hosts into a report."""

    def __init__(self, probes: ProbePool, inventory: Inventory, spec: JobSpec, full: bool, say: Say) -> None:
        self._probes, self._inventory, self._spec, self._full, self._say = probes, inventory, spec, full, say
        self._checks: list[Check] = []
        self._wan: list[Measured] = []

    def report(self) -> Report:
        facts = self._facts()
        self._check_hosts(facts)
        facts = self._check_network(facts)
        failed = self._probes.failures
        names = [host.name for host in self._inventory.hosts]
        failures = [failure_check(name, failed[name]) for name in names if name in failed]
        lost = {Check(name, REACHABLE) for name in failed}  # some were reachable at first
        found = (check for check in self._checks if check not in lost)
        return Report(self._inventory, facts, tuple(together([*failures, *found])), tuple(self._wan))

    def _check_network(self, facts: dict[str, Facts]) -> dict[str, Facts]:
        """Check ports and links and return the last facts. A topology that geomx has chosen becomes central if parties
        do not reach each other.
        """
        given = self._inventory
        try:
            facts, planned, checks, listened = self._listen(facts)
        except InvalidSettings as error:
            self._checks.append(Check("inventory", "settings", "problem", error.message, error.hint))
            return facts
        self._checks += checks
        results = self._dial(planned, listened)
        if given.topology_is_automatic and (reason := unreached_servers(results, planned)):
            self._say(f"trying topology central: {reason}")
            self._probes.release_ports()
            self._checks = [check for check in self._checks if check not in checks]
            self._inventory = in_central(given, reason)
            return self._check_network(self._facts())
        self._check_links(facts, planned, results)
        return facts

    def _facts(self) -> dict[str, Facts]:
        required = requirements(self._inventory, self._spec)
        modules = sorted({module for each in required.values() for module in each.modules})
        hosts = {name: self._inventory.host(name) for name in self._probes.hosts}
        common = {
            "modules": modules,
            "distributions": DISTRIBUTIONS,
        }
        return self._probes.collect_facts({name: common | self._questions(host) for name, host in hosts.items()})

    def _questions(self, host: Host) -> dict[str, Any]:
        here, temp = "", ""
        if host.shares_files:
            here = str(PurePath(self._spec.job_dir).parent)
        if host.is_here:
            temp = str(PurePath(self._spec.socket_dir).parent)
        return {
            "state_dir": host.state_dir or here,
            "workdir": host.workdir,
            "temp": temp,
            "binds": [listening(host), ALL],
            "ports": list(host.ports),
            "gpus": self._full or checks_of_hosts.names_gpus(host),
        }

    def _check_hosts(self, facts: Mapping[str, Facts]) -> None:
        required = requirements(self._inventory, self._spec)
        for name, known in facts.items():
            self._checks.append(Check(name, REACHABLE))
            host = self._inventory.host(name)
            self._checks += checks_of_hosts.check_host(host, known, self._probes.skews[name], required[name])
        self._checks += checks_of_hosts.check_memory(facts, required)
        self._checks += checks_of_hosts.check_torch(facts, required)
        if self._full:
            self._checks += checks_of_hosts.check_hardware(self._inventory.hosts, facts, required)
        else:
            self._checks += checks_of_hosts.warn_of_gpus(self._inventory.hosts, facts)

    def _listen(self, facts: dict[str, Facts]) -> tuple[dict[str, Facts], Plan, list[Check], set[links.Listening]]:
        """Choose ports and bind them. If another launch or doctor has just taken some, or has all and may be done soon,
        try again with new facts. Returns the last facts, the plan, and the result of `links.listen`. Raises
        InvalidSettings.
        """
        given, end = self._inventory, time.monotonic() + _OTHERS
        while True:
            late = time.monotonic() > end
            try:
                self._inventory = with_clocks(complete_inventory(given, facts), self._probes.skews)
                planned = plan(self._inventory, self._spec)
                self._say("binding ports and dialling links")
                checks, listened = links.listen(self._probes, planned, facts)
                if late or not any(ANOTHER in check.what for check in checks):
                    return facts, planned, checks, listened
            except InvalidSettings as error:
                if late or ANOTHER not in error.message:
                    raise
            self._say(f"waiting for {ANOTHER} that has the ports")
            self._probes.release_ports()
            self._inventory = given  # all its ports are candidates again
            time.sleep(random.uniform(0.1, 1.0))  # two launches that wait for each other do not meet again
            facts = self._facts()

    def _dial(self, planned: Plan, listened: set[links.Listening]) -> list[Dialled]:
        wanted = [
            each
            for each in dials(self._inventory, planned)
            if each.dialler in self._probes.hosts and (each.listener, each.port, each.protocol) in listened
        ]
        return links.dial_all(self._probes, wanted)

    def _check_links(self, facts: Mapping[str, Facts], planned: Plan, results: list[Dialled]) -> None:
        self._checks += link_checks(results, facts)
        if self._full:
            self._checks += checks_of_hosts.check_slow_start(facts, planned)
            self._checks += checks_of_hosts.check_restarts(facts, planned)
            self._measure([result for result in results if result.dial.protocol == "tcp"], facts)

    def _measure(self, results: list[Dialled], facts: Mapping[str, Facts]) -> None:
        self._wan = measure(self._probes, results, facts, self._say)
        self._checks += check_bandwidth(self._wan)


def failure_check(host: str, error: GeomxError) -> Check:
    """Return the problem of a host that could not be examined."""
    name = REACHABLE if isinstance(error, HostUnreachable | TimedOut) else "geomx"
    what = error.message.removeprefix(f"host {host}: ").removeprefix(f"host {host} ")
    return Check(host, name, "problem", what, error.hint)
