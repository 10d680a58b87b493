"""Clusters of real processes for tests, started by hand with little more than the DMLC variables of old start scripts.
"""

import contextlib
import importlib.util
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import forks
import pytest
from forks import Forked
from msgspec import structs

from geomx_cli.contract import security
from geomx_cli.core import plugins
from geomx_cli.core.options import Value, defaults
from geomx_cli.plan import JobSpec, Plan, plan
from geomx_cli.plan.ports import ports_needed
from geomx_cli.plan.this_machine import this_machine

ROOT = Path(__file__).parent.parent
RUNTIME = [sys.executable, "-m", "geomx_cli.runtime"]

# Above Linux's range for outgoing connections; geomx itself chooses ports below that range. Each test runner process
# has its own share: PyTorch's environment is tested at the same time as the other.
_RUNNER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_RUNNER += 4 if importlib.util.find_spec("torch") else 0
_SHARE = range(61_000 + 500 * (_RUNNER % 9), 61_500 + 500 * (_RUNNER % 9))
_next_port = itertools.cycle(random.sample(_SHARE, len(_SHARE)))


def free_ports(count: int) -> list[int]:
    """Ports that are free now and that no other test uses."""
    return [next(port for port in _next_port if _is_free(port)) for _ in range(count)]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@dataclass
class Cluster:
    """Processes by name, each with its output in a file. `wait` returns exit statuses, or fails after the limit.

    environment: variables of all processes; each: of single ones, by name. uri: the schedulers' address. forks: whether
    Python processes may be forked from one that has imported numpy and geomx; imported: see ForkServer.
    """

    directory: Path
    environment: dict[str, str] = field(default_factory=dict)
    each: dict[str, dict[str, str]] = field(default_factory=dict)
    uri: str = "127.0.0.1"
    forks: bool = True
    imported: str = "geomx"
    processes: dict[str, "subprocess.Popen[bytes] | Forked"] = field(default_factory=dict)
    sockets: list[str] = field(default_factory=list)

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], namespace: str = "") -> None:
        """Start one process in its own session, and in a network namespace."""
        variables = {**clean_environment(), **self.environment, **env, **self.each.get(name, {})}
        if self.forks and forks.can_be_forked(argv, variables):
            out = self.directory / f"{name}.out"
            with_mxnet = self.imported == "geomx" and forks.imports_mxnet(argv)
            server = forks.server("mxnet" if with_mxnet else self.imported)
            self.processes[name] = server.start(argv[1:], variables, self.directory, out, namespace)
            return
        with (self.directory / f"{name}.out").open("wb") as out:
            self.processes[name] = subprocess.Popen(
                [*(["ip", "netns", "exec", namespace] if namespace else []), *argv],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.directory,
            )

    def output(self, name: str) -> str:
        """The process's output so far."""
        return (self.directory / f"{name}.out").read_text(errors="replace")

    def outputs(self) -> str:
        """The output of all processes, for assertion messages."""
        return "\n".join(f"--- {name} ({p.poll()})\n{self.output(name)}" for name, p in self.processes.items())

    def wait(self, limit: float = 240.0) -> dict[str, int]:
        """Exit statuses of all processes."""
        end = time.monotonic() + limit
        for process in self.processes.values():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                pytest.fail(f"still running after {limit} s:\n{self.outputs()}")
        return {name: process.returncode for name, process in self.processes.items()}

    def finish(self, limit: float = 240.0) -> None:
        """Wait for all processes to exit successfully."""
        statuses = self.wait(limit)
        assert not any(statuses.values()), f"{statuses}\n{self.outputs()}"

    def stop(self) -> None:
        """Kill the remaining processes."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        while self.sockets:
            shutil.rmtree(self.sockets.pop())

    def planned(
        self,
        script: Sequence[str],
        options: Mapping[str, Value],
        *,
        one_host: bool = True,
        env: Mapping[str, str] = {},
        changes: Mapping[str, object] = {},
        hosts: Mapping[str, Mapping[str, object]] = {},
    ) -> Plan:
        """The plan of a job in this directory, without a script of the bundled one, with keys if it has several hosts;
        `changes` of the inventory, and of its `hosts` by name.
        """
        values = {**defaults(plugins.table()), **options}
        ports = free_ports(ports_needed(values))
        inventory = structs.replace(this_machine(values, ports, one_host=one_host), **changes)
        inventory = inventory.with_hosts(
            structs.replace(host, **hosts.get(host.name, {})) for host in inventory.hosts
        )
        spec = JobSpec(
            job="planned", options=values, script=("python", *script) if script else (), job_dir=str(self.directory),
            socket_dir=f"/tmp/gx-{uuid.uuid4().hex[:12]}",  # socket paths must be short
            key_dir="" if one_host else str(self.directory), python=sys.executable, env=env,
        )  # fmt: skip
        return plan(inventory, spec)

    def launch_planned(self, planned: Plan, argv: Mapping[str, Sequence[str]] = {}) -> None:
        """Start the plan's processes; `argv` replaces commands, by process file name."""
        Path(planned.spec.socket_dir).mkdir(0o700)
        self.sockets.append(planned.spec.socket_dir)
        if planned.spec.key_dir:
            callers = {process.name: planned.callers.get(process.name) for process in planned.processes}
            for name, content in security.generate(planned.job, callers).items():
                path = self.directory / f"{planned.process(name).file_name}.key"
                path.touch(0o600)
                path.write_bytes(content)
        for process in planned.processes:
            env = {**process.env, "PYTHONPATH": f"{ROOT}:{process.env.get('PYTHONPATH', '')}"}
            self.start(process.file_name, argv.get(process.file_name, process.argv), env)

    def launch(
        self,
        worker: Sequence[str],
        *,
        parties: Sequence[int] = (2, 2),
        roots: int = 1,
        local_servers: int = 1,
        central: bool = True,
        central_workers: int = 0,
        env: Mapping[str, str] = {},
        worker_env: Mapping[str, Mapping[str, str]] = {},
        root_env: Mapping[str, str] = {},
        ports: Sequence[int] = (),
    ) -> None:
        """Start two planes: the central party with `roots` and the master worker, and `parties` with these numbers of
        workers.

        Processes are called gs, root0, cs, master, central1..., and for each party A, B, ...: As, Asrv0, Aw0, Aw1, ...
        Without `central` the central party has no scheduler and no worker. `ports`: the schedulers' ports to dial: gs,
        cs, As, Bs, ... Parties have the order of their letters, not that in which their servers join.
        """
        ports = ports or free_ports(2 + len(parties))
        upper = {
            **self._plane("GLOBAL_", ports[0], roots, len(parties) * local_servers),
            **env,
        }
        plane = {**self._plane("", ports[1], roots, max(1, central_workers)), **env} if central else {}
        if central_workers:
            plane["DMLC_ENABLE_CENTRAL_WORKER"] = "1"
        self.start("gs", RUNTIME, {**upper, "DMLC_ROLE_GLOBAL": "global_scheduler"})
        for rank in range(roots):
            roles = {"DMLC_ROLE_GLOBAL": "global_server", "DMLC_ROLE": "server"}
            self.start(f"root{rank}", RUNTIME, {**upper, **plane, **roles, **root_env})
        if central:
            self.start("cs", RUNTIME, {**plane, "DMLC_ROLE": "scheduler"})
            extra = worker_env.get("master", {})
            self.start("master", worker, {**plane, "DMLC_ROLE": "worker", "DMLC_ROLE_MASTER_WORKER": "1", **extra})
        for rank in range(1, central_workers):
            name = f"central{rank}"
            self.start(name, worker, {**plane, "DMLC_ROLE": "worker", **worker_env.get(name, {})})
        for index, (letter, count, port) in enumerate(zip("ABCDEFGH", parties, ports[2:], strict=False)):
            local = {**self._plane("", port, local_servers, count), **env}
            self.start(f"{letter}s", RUNTIME, {**local, "DMLC_ROLE": "scheduler"})
            for rank in range(local_servers):
                server = {**upper, **local, "GEOMX_PARTY_INDEX": str(index), "DMLC_ROLE": "server"}
                self.start(f"{letter}srv{rank}", RUNTIME, server)
            for rank in range(count):
                name = f"{letter}w{rank}"
                self.start(name, worker, {**local, "DMLC_ROLE": "worker", **worker_env.get(name, {})})

    def launch_flat(
        self,
        worker: Sequence[str],
        *,
        workers: int = 4,
        servers: int = 1,
        env: Mapping[str, str] = {},
        worker_env: Mapping[str, Mapping[str, str]] = {},
    ) -> None:
        """Start one plane, like MXNet's own dist_sync: s, srv0..., w0, w1, ..."""
        plane = {**self._plane("", free_ports(1)[0], servers, workers), **env}
        self.start("s", RUNTIME, {**plane, "DMLC_ROLE": "scheduler"})
        for rank in range(servers):
            self.start(f"srv{rank}", RUNTIME, {**plane, "DMLC_ROLE": "server"})
        for rank in range(workers):
            self.start(f"w{rank}", worker, {**plane, "DMLC_ROLE": "worker", **worker_env.get(f"w{rank}", {})})

    def _plane(self, infix: str, port: int, servers: int, workers: int) -> dict[str, str]:
        return {
            f"DMLC_PS_{infix}ROOT_URI": self.uri,
            f"DMLC_PS_{infix}ROOT_PORT": str(port),
            f"DMLC_NUM_{infix}SERVER": str(servers),
            f"DMLC_NUM_{infix}WORKER": str(workers),
        }


def until(condition: Callable[[], object], limit: float = 120.0, state: Callable[[], str] = str) -> None:
    """Wait for `condition`; after `limit` seconds fail with the text that `state` returns."""
    end = time.monotonic() + limit
    began = time.process_time()
    while not condition():
        assert time.monotonic() < end, f"not within {limit} s: {state()}"
        # Some conditions read all of /proc: they take a tenth of a core at most.
        time.sleep(max(0.01, 10 * (time.process_time() - began)))
        began = time.process_time()


def clean_environment() -> dict[str, str]:
    """This process's environment without variables that assign a role; geomx is the tested one."""
    own = {name: text for name, text in os.environ.items() if not name.startswith(("DMLC_", "GEOMX_", "PS_"))}
    paths = [str(ROOT), *filter(None, [own.get("PYTHONPATH", "")])]
    return {**own, "PYTHONPATH": os.pathsep.join(paths)}
