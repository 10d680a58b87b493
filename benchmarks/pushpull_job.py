"""The processes of a measured job: commands per site, for geomx and for MXNet's own cluster."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import structs
from wan import Wan

from geomx_cli.contract import security
from geomx_cli.core import plugins
from geomx_cli.core.options import Value, defaults
from geomx_cli.core.state_notes import StateNotes
from geomx_cli.hosts.ports import free_ports
from geomx_cli.inventory import Inventory
from geomx_cli.plan import JobSpec, Plan, Process, plan
from geomx_cli.plan.automatic_topology import with_topology
from geomx_cli.plan.ports import ports_needed
from geomx_cli.plan.this_machine import this_machine

__all__ = [
    "MOST_PARTIES", "Case", "Command", "central_sites", "letters", "mxnet_cluster", "mxnet_commands", "our_commands",
    "planned",
]  # fmt: skip

_LETTERS = "ABDEFGHIJKLMNOPQRSTUVWXYZ"
MOST_PARTIES = len(_LETTERS)
HERE = Path(__file__).parent
WORKER = HERE / "pushpull_worker.py"
Command = tuple[str, str, list[str], dict[str, str]]
"""Role, site, argv, environment."""


@dataclass
class Case:
    """One push-pull measurement. `system` is client, store or mxnet (see pushpull_worker.py). saving: "on" or "off"."""

    system: str
    topology: str
    tensors: str
    parties: int
    workers: int
    global_servers: int
    local_servers: int
    iterations: int
    warm_up: int
    rate: str
    rtt: str
    server_hosts: int = 1
    saving: str = "off"
    options: dict[str, Any] = field(default_factory=dict)


def central_sites(count: int) -> list[str]:
    """The sites of this many hosts of the central party, each with a link of its own."""
    return ["C", *(f"C{number}" for number in range(2, count + 1))]


def letters(count: int) -> str:
    """The sites of this many parties, at most MOST_PARTIES; C is the central one."""
    return _LETTERS[:count]


def our_commands(case: Case, directory: Path, state: Path | None, wan: Wan | None) -> list[Command]:
    """A planned job, with each party at its site. state: the folder in which its processes save their state, if any."""
    options = case.options | {
        "parties": case.parties, "workers": case.workers, "topology": case.topology,
        "global_servers": case.global_servers, "local_servers": case.local_servers,
    }  # fmt: skip
    script = ("python", str(WORKER), case.system, case.tensors, str(case.warm_up), str(case.iterations))
    return [
        ("master" if item.role == "worker" and item.global_rank is None else item.role, site, argv,
         env | _saving(state, number))
        for number, (item, site, argv, env) in enumerate(
            planned(options, directory, wan, script, server_hosts=case.server_hosts)
        )
    ]  # fmt: skip


def _saving(state: Path | None, number: int) -> dict[str, str]:
    """The variables by which an agent has a process save its state, here the process with this number."""
    if state is None:
        return {}
    folder = state / str(number)
    folder.mkdir()
    StateNotes(folder).prepare()
    return {"GEOMX_INCARNATION": "0", "GEOMX_STATE_DIR": str(folder)}


def planned(
    options: Mapping[str, Value], directory: Path, wan: Wan | None, script: tuple[str, ...] = (),
    *, python: str = sys.executable, server_hosts: int = 1,
) -> list[tuple[Process, str, list[str], dict[str, str]]]:
    """Each process of a job with its site, argv and environment; without a script it is the bundled job. server_hosts:
    of the central party, with `wan`, each at a site of its own; the global servers are divided over them.
    """
    values = defaults(plugins.table()) | dict(options)
    inventory = this_machine(values, free_ports(ports_needed(values)), one_host=wan is None)
    if wan is not None:
        inventory = _placed(inventory, wan, server_hosts)
    inventory = with_topology(inventory)
    spec = JobSpec(
        job="benchmark", options=values, script=script, job_dir=str(directory), socket_dir=str(directory),
        key_dir=str(directory) if wan is not None else "", python=python,
        env={"PYTHONPATH": f"{HERE.parent}:{HERE}"},
    )  # fmt: skip
    laid = plan(inventory, spec)
    if wan is not None:
        _write_keys(laid, directory)
    site = _sites(inventory)
    return [
        (item, site[item.host if wan is not None else item.party], list(item.argv), dict(item.env))
        for item in laid.processes
    ]


def _sites(inventory: Inventory) -> dict[str, str]:
    """The site of each host; of one with all parties, of each party."""
    central = ["central", *(host.name for host in inventory.hosts if host.name.startswith("central-"))]
    sites = dict(zip(central, central_sites(len(central)), strict=True))
    return sites | dict(zip((party.name for party in inventory.parties), letters(len(inventory.parties)), strict=True))


def _placed(inventory: Inventory, wan: Wan, server_hosts: int) -> Inventory:
    """The inventory with each host at its site's address, so that hosts may use the same ports."""
    (first,) = inventory.hosts_of("central")
    names = ["central", *(f"central-{number}" for number in range(2, server_hosts + 1))]
    central = [structs.replace(first, name=name) for name in names]
    inventory = structs.replace(inventory, hosts=(*central, *(host for host in inventory.hosts if host != first)))
    sites = _sites(inventory)
    hosts = [structs.replace(host, address=wan.address(sites[host.name])) for host in inventory.hosts]
    return structs.replace(inventory, hosts=tuple(hosts))


def _write_keys(laid: Plan, directory: Path) -> None:
    files = security.generate(laid.job, {item.name: laid.callers.get(item.name) for item in laid.processes})
    for item in laid.processes:
        path = directory / f"{item.file_name}.key"
        path.touch(0o600)
        path.write_bytes(files[item.name])


def mxnet_commands(case: Case, wan: Wan | None) -> list[Command]:
    """MXNet's own cluster with the same measurement."""
    work = [sys.executable, str(WORKER), "mxnet", case.tensors, str(case.warm_up), str(case.iterations)]
    servers = letters(case.parties) if case.topology == "spread" else "C" * case.global_servers
    return mxnet_cluster(work, case.parties, case.workers, wan, servers=servers)


def mxnet_cluster(
    work: Sequence[str], parties: int, workers: int, wan: Wan | None, *, servers: Sequence[str] = "C",
    bound: int = 1_000_000,
) -> list[Command]:
    """MXNet's own flat cluster: a server at each of the sites `servers`, the scheduler at C, and the workers, which run
    `work`, in their parties. Tensors of at least `bound` elements are cut in as many parts as there are servers.
    WORKER_RANK numbers workers party by party; MXNet itself by their arrival.
    """
    names = "bool int float object complex"
    prelude = f"import numpy as n\nfor k in {names!r}.split(): setattr(n, k, __builtins__.__dict__[k])\n"
    serve = [sys.executable, "-c", prelude + "import mxnet"]
    common = {
        "DMLC_PS_ROOT_URI": "127.0.0.1" if wan is None else wan.address("C"),
        "DMLC_PS_ROOT_PORT": str(free_ports(1)[0]),
        "DMLC_NUM_SERVER": str(len(servers)),
        "MXNET_KVSTORE_BIGARRAY_BOUND": str(bound),
        "DMLC_NUM_WORKER": str(parties * workers),
        "PYTHONPATH": f"{HERE.parent}:{HERE}",
        "OMP_NUM_THREADS": "1",
    }
    roles = [("scheduler", "C", serve), *(("global_server", site, serve) for site in servers)]
    roles += [("worker", letter, list(work)) for letter in letters(parties) for _ in range(workers)]
    return [
        (role, site, argv, {
            **common,
            "DMLC_ROLE": role.removeprefix("global_"),
            "DMLC_NODE_HOST": "127.0.0.1" if wan is None else wan.address(site),
            "WORKER_RANK": str(index - 1 - len(servers)),
        })
        for index, (role, site, argv) in enumerate(roles)
    ]  # fmt: skip
