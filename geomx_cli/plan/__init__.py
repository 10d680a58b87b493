"""The plan of a job: every process with its host, command, environment and endpoints. Pure functions.

`launch` starts what the plan contains and `--dry-run` prints it; planning does not access any machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from geomx_cli.contract.frontends import needs
from geomx_cli.contract.security import Identity
from geomx_cli.contract.settings import factors
from geomx_cli.core import deliveries, plugins
from geomx_cli.core.env_names import SETTINGS
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.option import did_you_mean, nearest
from geomx_cli.core.options import Value, check, defaults
from geomx_cli.core.units import counted
from geomx_cli.datasets import catalog
from geomx_cli.inventory import Inventory
from geomx_cli.plan import party_loss
from geomx_cli.plan.automatic_topology import emulated_network
from geomx_cli.plan.callers import callers
from geomx_cli.plan.endpoints import Endpoint
from geomx_cli.plan.job_spec import JobSpec
from geomx_cli.plan.processes import Layout, Process
from geomx_cli.plan.topology import TopologyNode, build_topology, group_links, reachability_errors

__all__ = ["SCHEMA_VERSION", "Endpoint", "JobSpec", "Plan", "Process", "plan"]

SCHEMA_VERSION = 1
"""Algorithms for --shards. Their rounds follow from the number of steps alone, so all shards have the same rounds."""


@dataclass(frozen=True)
class Plan:
    """Every process of a job, and the links between them.

    spec: the job, with every option's value.
    topology_reason: why geomx has chosen the topology; "" if the user chose it.
    job_dirs: for each host that runs processes, the job's directory on it.
    socket_dirs: for each of these hosts, its folder for unix sockets.
    here: the hosts that are this machine.
    sharing: the hosts that have the files of this machine.
    callers: see callers.py; empty in the plan of a started job that was read back from its file.
    """

    job: str
    spec: JobSpec
    topology: Literal["central", "spread", "flat"]
    processes: tuple[Process, ...]
    links: tuple[tuple[str, str], ...]
    job_dirs: Mapping[str, str]
    socket_dirs: Mapping[str, str]
    here: tuple[str, ...] = ()
    sharing: tuple[str, ...] = ()
    topology_reason: str = ""
    callers: Mapping[str, Mapping[str, Identity]] = field(default_factory=dict)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The endpoints of all processes."""
        return tuple(endpoint for process in self.processes for endpoint in process.endpoints)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts that run processes, in the order of the processes."""
        return tuple(dict.fromkeys(process.host for process in self.processes))

    @property
    def where(self) -> str:
        """Where the processes run, as "this machine" or "3 hosts"."""
        return "this machine" if set(self.hosts) <= set(self.here) else counted(len(self.hosts), "host")

    @property
    def network(self) -> str:
        """A line about the emulated links; "" if there are none."""
        links = self.processes[0].env.get(SETTINGS["links"], "").split()
        return emulated_network(str(self.spec.options.get("wan", "")), links)

    def process(self, name: str) -> Process:
        """Return the process called `name`. Raises InvalidSettings if there is none."""
        for process in self.processes:
            if process.name == name:
                return process
        known = [process.name for process in self.processes]
        raise InvalidSettings(f"there is no process {name!r}", nearest(name, known))

    def files_dir(self, host: str) -> str:
        """Return the directory of the files copied to a remote host for the job."""
        return f"{self.job_dirs[host]}/files"

    def on_host(self, host: str) -> tuple[Process, ...]:
        """Return the processes of one host."""
        return tuple(process for process in self.processes if process.host == host)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON data."""
        return {
            "schema_version": SCHEMA_VERSION,
            "job": self.job,
            "topology": self.topology,
            "topology_reason": self.topology_reason,
            "script": list(self.spec.script),
            "script_digest": self.spec.script_digest,
            "script_warning": self.spec.script_warning,
            "options": dict(self.spec.options),
            "job_dir": self.spec.job_dir,
            "job_dirs": dict(self.job_dirs),
            "socket_dir": self.spec.socket_dir,
            "socket_dirs": dict(self.socket_dirs),
            "here": list(self.here),
            "sharing": list(self.sharing),
            "processes": [asdict(process) for process in self.processes],
            "links": [{"dialler": dialler, "listener": listener} for dialler, listener in self.links],
        }


def plan(inventory: Inventory, spec: JobSpec) -> Plan:
    """Plan the job `spec` on the machines of `inventory`.

    The inventory overrides cluster options in `spec`. Raises InvalidSettings for an unknown option, a value out of
    range, an unsupported combination, a host with too few ports, and a socket path that is too long.
    """
    spec = replace(spec, options=_complete(inventory, spec))
    _check(inventory, spec)
    if inventory.reduce == "torch":
        _check_reduction(spec, inventory.topology)
    elif inventory.shards > 1:
        what = f"--shards {inventory.shards} without --reduce torch: servers add whole gradients"
        raise InvalidSettings(what, "write --reduce torch too")
    _check_worker_loss(spec, inventory)
    if not spec.script:
        _check_training(spec, inventory)
    nodes = build_topology(inventory)
    _check_slowdown(spec, nodes)
    layout = Layout.of(nodes, spec, inventory.links)
    for error in reachability_errors(layout.wires):
        raise InvalidSettings(f"host {error.host}: {error.message}", error.hint)
    return Plan(
        job=spec.job,
        spec=spec,
        topology=inventory.topology,
        processes=tuple(layout.process(node) for node in nodes),
        links=tuple((wire.dialler.name, wire.listener.name) for wire in (*layout.wires, *group_links(nodes))),
        job_dirs={node.host.name: spec.job_dir_on(node.host) for node in nodes},
        socket_dirs=layout.socket_dirs,
        here=tuple(dict.fromkeys(node.host.name for node in nodes if node.host.is_here)),
        sharing=tuple(dict.fromkeys(node.host.name for node in nodes if node.host.shares_files)),
        topology_reason=inventory.topology_reason,
        callers=callers(layout.wires),
    )


def _complete(inventory: Inventory, spec: JobSpec) -> dict[str, Value]:
    known = {option.name: option for option in plugins.table()}
    for name in spec.options:
        if name not in known:
            raise InvalidSettings(f"there is no option {name!r}", nearest(name, sorted(known)))
    values = defaults(known.values()) | dict(spec.options) | inventory.options()
    values["delivery"] = deliveries.chosen(values)
    values = {name: check(known[name], value) for name, value in values.items()}
    return values | {"party_loss": party_loss.policy(inventory, values, spec.script)}


def _check(inventory: Inventory, spec: JobSpec) -> None:
    """Reject unsupported combinations of options."""
    options, topology = spec.options, inventory.topology
    if topology == "flat" and inventory.central.workers:
        raise InvalidSettings(
            "--topology flat has no central workers",
            "use --central-workers 0, or list no devices under [central]",
        )
    if topology == "flat" and inventory.local_servers > 1:
        raise InvalidSettings("--topology flat has no local servers", "share the model with --global-servers")
    if float(options["silence"]) < 2 * float(options["heartbeat"]):
        raise InvalidSettings(
            f"--silence {options['silence']:g}s is too short for a heartbeat every {options['heartbeat']:g}s",
            "make --silence at least twice --heartbeat",
        )
    remote = [host.name for host in inventory.hosts if not host.is_here]
    for emulation in (*(["--wan"] if options["wan"] else []), *(["[[link]]"] if inventory.links else [])):
        if remote:
            what = f"{emulation} emulates links on one machine, and host {remote[0]} is another"
            raise InvalidSettings(what, f"leave out {emulation}")
    if topology == "flat" and options["compress_lan"] not in ("", "none"):
        what = "--topology flat has no local servers, with which workers would exchange by --compress-lan"
        raise InvalidSettings(what, "write --compress, for what workers and servers exchange")
    _check_codecs(options, central_workers=bool(inventory.central.workers))
    chosen: tuple[tuple[plugins.Kind, str, str], ...] = (
        ("algorithm", "--algo", str(options["algo"])),
        *(("delivery", "--delivery", name) for name in deliveries.chain(options)),
        *(("allocator", "allocator", name) for name in sorted({request.allocator for request in inventory.requests})),
    )
    for kind, key, name in chosen:
        plugin = plugins.find(kind, name) if name else None
        reason = plugin.refuses(spec) if plugin is not None else None
        if reason:
            by = getattr(plugin, "chosen_by", "")
            option, value = (f"--{by}", options[by]) if by and options.get(by) else (key, name)
            raise InvalidSettings(f"{option} {value}: {reason}", f"change {option} or what it cannot work with")


def _check_codecs(options: Mapping[str, Value], *, central_workers: bool) -> None:
    if not (options["compress"] or options["compress_lan"]):
        return
    from geomx_cli.contract.codecs import complete_lan_spec, complete_spec, has_momentum

    table = {option.name: option for option in plugins.table()}
    for name, complete in (("compress", complete_spec), ("compress_lan", complete_lan_spec)):
        try:
            complete(str(options[name]), int(options["compress_min"]))
        except InvalidSettings as error:
            what = f"{table[name].flag} ({table[name].env}): {error.message}"
            raise InvalidSettings(what, error.hint) from None
    only_parties = has_momentum(str(options["compress"])) and not has_momentum(str(options["compress_lan"]))
    if central_workers and only_parties and plugins.algorithms()[str(options["algo"])].exchanges == "gradients":
        what = f"--compress {options['compress']} corrects the momentum of parties' gradients, not of central workers'"
        hint = "write topk, or leave out the central workers"
        raise InvalidSettings(f"{what}, which would count up to 10 times less", hint)


def _check_reduction(spec: JobSpec, topology: str) -> None:
    """Raise InvalidSettings for options that do not work if workers add their gradients themselves."""
    hint = "leave --reduce out: then the servers add the gradients"
    if not spec.script:
        raise InvalidSettings("--reduce torch is for scripts that call geomx_cli.torch.wrap, not the bundled job", hint)
    if topology == "flat":
        what = "--topology flat has no parties, whose workers would add their gradients by --reduce torch"
        raise InvalidSettings(what, hint)
    algorithm = plugins.algorithms()[str(spec.options["algo"])]
    if algorithm.asynchronous or algorithm.standalone:
        raise InvalidSettings(f"--reduce torch does not work with --algo {algorithm.name}", hint)
    if int(spec.options["shards"]) == 1:
        return
    if not algorithm.shards:
        possible = ", ".join(name for name, each in plugins.algorithms().items() if each.shards)
        what = f"--shards does not work with --algo {algorithm.name}"
        raise InvalidSettings(what, f"use {possible}, or leave --shards out")
    if spec.options["delivery"] != "direct":
        what = f"--shards does not work with --delivery {spec.options['delivery']}, which merges contributions"
        raise InvalidSettings(what, "leave --delivery or --shards out")


def _check_worker_loss(spec: JobSpec, inventory: Inventory) -> None:
    """Reject combinations that `--on-worker-loss` does not support."""
    chosen = str(spec.options["on_worker_loss"])
    if chosen == "end":
        return
    option, hint = f"--on-worker-loss {chosen}", "leave --on-worker-loss out: then the job ends"
    if not spec.script:
        what = f"{option} is for scripts: geomx restarts a killed worker of the bundled training"
        raise InvalidSettings(what, "leave --on-worker-loss out")
    if not int(spec.options["restarts"]):
        raise InvalidSettings(f"{option} with --restarts 0: nothing is restarted then", "allow some --restarts")
    if chosen != "leave":
        return
    if inventory.reduce == "torch":
        what = f"{option} with --reduce torch: the workers of a party cannot add their gradients without one of them"
        raise InvalidSettings(what, f"use --on-worker-loss restart-all, or {hint}")
    for name in deliveries.chain(spec.options):
        if deliveries.peers(name, 2, spec.options):
            what = f"{option} with --delivery {name}: workers send through one another"
            raise InvalidSettings(what, f"use another delivery, or {hint}")


def _check_training(spec: JobSpec, inventory: Inventory) -> None:
    """Reject unknown networks, data sets and splits of the bundled training, and GPUs for a network that uses none."""
    network = str(spec.options["network"])
    if not needs(network, str(spec.options["framework"])):
        for host in inventory.hosts:
            if gpus := [device for device in host.devices if device != "cpu"]:
                what = f"host {host.name}: {gpus[0]} is to train, and --network {network} uses no GPU"
                raise InvalidSettings(what, 'choose another --network, or write devices = ["cpu"] in the inventory')
    catalog.check_data(str(spec.options["data"]))
    catalog.check_fit(str(spec.options["data"]), network, str(spec.options["split"]))
    catalog.check_split(str(spec.options["split"]), flat=inventory.topology == "flat")


def _check_slowdown(spec: JobSpec, nodes: Sequence[TopologyNode]) -> None:
    """Reject a slowdown of unknown workers or parties."""
    workers = [node for node in nodes if node.role == "worker"]
    known = {node.name for node in workers} | {node.party for node in workers}
    for who, _ in factors(str(spec.options["slowdown"])):
        if who and who not in known:
            example = f"name a party or a worker, like {workers[-1].party} or {workers[-1].name}"
            hint = did_you_mean(who, known) or example
            raise InvalidSettings(f"--slowdown: there is no worker or party {who!r}", hint)
