"""The machines of a command: those of an inventory file, or this one."""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from geomx_cli.core.errors import UsageError
from geomx_cli.core.options import USUAL, USUAL_OF_CODEC, Value, codec_name
from geomx_cli.core.units import counted

if TYPE_CHECKING:
    from geomx_cli.hosts.allocation import Present
    from geomx_cli.hosts.ssh.options import SshOptions
    from geomx_cli.inventory import Inventory
    from geomx_cli.inventory.file import InventoryFile

_Command = TypeVar("_Command", bound=Callable[..., Any])

__all__ = [
    "DEFAULT_FILE",
    "given_machines",
    "hostfile_option",
    "inventory_options",
    "inventory_path",
    "machines",
    "machines_again",
    "other_machines",
    "read_inventory",
    "reshaped",
    "source",
    "ssh_options",
    "with_job_options",
]

DEFAULT_FILE = "hosts.toml"
_OF_THIS_MACHINE = ("parties", "workers", "central_workers")
_HOSTFILE = "geomx.hostfile"
_PRINTED = "geomx.notes"
_SHAPE = ("topology", "global_servers", "local_servers")
_KEPT = (
    *_SHAPE, "topology_is_automatic", "topology_reason", "central_server", "rank_scope", "delivery", "delivery_options",
    "reduce", "shards",
)  # fmt: skip
"""What an inventory that takes another one's place keeps of it: what geomx or the user chose for the job."""


def inventory_options(command: _Command) -> _Command:
    """Decorator that adds --hosts, --hostfile, --local and --accept-new-host-keys to a command."""
    options = (
        click.option(
            "--hosts",
            type=click.Path(path_type=Path),
            envvar="GEOMX_HOSTS",
            show_envvar=True,
            help=f"The inventory file, which lists the machines; {DEFAULT_FILE} of this folder by default.",
        ),
        hostfile_option,
        click.option("--local", is_flag=True, help=f"Use only this machine, even if there is a {DEFAULT_FILE}."),
        click.option(
            "--accept-new-host-keys", is_flag=True, help="Accept unknown SSH host keys on first connection."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _use_hostfile(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is not None:
        ctx.meta[_HOSTFILE] = path


hostfile_option = click.option(
    "--hostfile",
    type=click.Path(path_type=Path),
    callback=_use_hostfile,
    expose_value=False,
    help="An MPI host file instead: on each line a machine and its workers, such as `node1 slots=4` or `node1:4`.",
)
"""Decorator that adds --hostfile to a command, whose `inventory_path` it changes."""


def _hostfile() -> Path | None:
    ctx = click.get_current_context(silent=True)
    found: Path | None = None if ctx is None else ctx.meta.get(_HOSTFILE)
    return found


def inventory_path(hosts: Path | None, *, local: bool) -> Path | None:
    """Return the file that lists a command's machines; None if the command uses only this machine. Raises UsageError
    for two files.
    """
    if (hostfile := _hostfile()) is not None:
        if local or (hosts is not None and _from_command_line("hosts")):
            what = f"--hostfile {hostfile} and {'--local' if local else '--hosts'}"
            raise UsageError(f"{what} name different machines", "leave out one of them")
        return hostfile
    if local:
        return None
    return hosts or (Path(DEFAULT_FILE) if Path(DEFAULT_FILE).exists() else None)


def read_inventory(path: Path) -> "InventoryFile":
    """Read the inventory file at `path`, or the host file of --hostfile, resolving ssh_config aliases. Raises
    InvalidSettings listing all errors by line.
    """
    from geomx_cli.hosts import with_addresses
    from geomx_cli.inventory import file, hostfile
    from geomx_cli.plan.automatic_topology import with_topology
    from geomx_cli.plan.ports import host_errors

    read = hostfile.read if path == _hostfile() else file.read
    found = read(path, lambda inventory: host_errors(with_topology(inventory)))
    return replace(found, inventory=with_addresses(found.inventory, ssh_options()))


def machines(
    hosts: Path | None, local: bool, given: Mapping[str, Value]
) -> "tuple[Inventory, dict[str, Value]]":
    """Return the inventory, and the effective option values.

    `given`: option values by name. Values set on the command line or in the environment take precedence over the
    file's, which take precedence over the defaults. Reports on stderr which file is used. Raises InvalidSettings for
    errors in the file, UsageError for options incompatible with it.
    """
    path = inventory_path(hosts, local=local)
    if local and hosts is not None and _written("hosts"):
        raise UsageError("--local uses this machine alone, and --hosts others", "leave out one of them")
    if path is None and not local and (present := _present()) is not None:
        from geomx_cli.plan.this_allocation import described, this_allocation

        values = {**given, **_usual(given, ()), **_fixed(given)}
        written = {name: values[name] for name in _OF_THIS_MACHINE if name in values and _written(name)}
        found = this_allocation(present, values, written | _fixed(given))
        _print_once(described(present, found))
        return _shaped(found, values)
    if path is None:
        from geomx_cli.hosts.ports import free_ports
        from geomx_cli.plan.ports import ports_needed
        from geomx_cli.plan.this_machine import this_machine

        values = {**given, **_usual(given, ()), **_fixed(given)}
        return _shaped(this_machine(values, free_ports(ports_needed(values))), values)
    read = read_inventory(path)
    for name in _OF_THIS_MACHINE:
        if name in given and _written(name):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} applies to --local only; {path} defines the cluster", "add --local, or edit it")
    _print_once(f"inventory {path}: {counted(len(read.inventory.hosts), 'host')}", *read.notes)
    return with_job_options(read, given)


def source(hosts: Path | None, *, local: bool) -> str:
    """Return where a command's machines are listed, for messages."""
    if (path := inventory_path(hosts, local=local)) is not None:
        return str(path)
    present = None if local else _present()
    return "this machine" if present is None else present.title


def _present() -> "Present | None":
    """Return the allocation of a batch system in which this process runs."""
    from geomx_cli.core import plugins

    each = (getattr(plugin, "present", None) for plugin in plugins.allocators().values())
    return next((found for look in each if look is not None and (found := look(os.environ)) is not None), None)


def other_machines(hosts: Path | None, inventory: "Inventory") -> "Inventory | None":
    """Return the machines of --hosts or --hostfile in place of an inventory's, for the same job; None if the user has
    given neither. Raises as `machines`.
    """
    from msgspec import structs

    path = _hostfile() or (hosts if _written("hosts") else None)
    if path is None:
        return None
    read = read_inventory(path)
    _print_once(f"inventory {path}: {counted(len(read.inventory.hosts), 'host')}", *read.notes)
    return structs.replace(read.inventory, **{name: getattr(inventory, name) for name in _KEPT})


def given_machines(inventory: "Inventory") -> "Inventory | None":
    """As `other_machines`, for a file that this command names: one in the environment is for other jobs too."""
    context = click.get_current_context()
    hosts = context.params.get("hosts") if _from_command_line("hosts") else None
    if context.params.get("local") or (hosts is None and _hostfile() is None):
        return None
    for name in _OF_THIS_MACHINE:
        if _written(name):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} applies to this machine; {_hostfile() or hosts} defines the cluster", "edit it")
    return other_machines(hosts, inventory)


def machines_again(inventory: "Inventory") -> "Inventory":
    """Return the machines of a job that has ended for one that goes on, without those that it was given at launch.
    Raises InvalidSettings if it was launched in an allocation, and this is none of as many nodes.
    """
    present = _present() if any(request.job for request in inventory.requests) else None
    if present is None:
        return inventory.requested_again()
    _print_once(f"going on in {present.title} ({present.nodes})")
    return inventory.requested_again(present.job, list(present.devices))


def _print_once(*notes: str) -> None:
    """Print notes that this command has not printed before: a sweep reads the inventory for each algorithm."""
    printed = click.get_current_context().meta.setdefault(_PRINTED, set())
    for note in notes:
        if note not in printed:
            printed.add(note)
            click.echo(note, err=True)


def with_job_options(
    read: "InventoryFile", given: Mapping[str, Value]
) -> "tuple[Inventory, dict[str, Value]]":
    """Return the inventory of a file as a job with these options has it, and the effective values, as `machines`."""
    import msgspec

    from geomx_cli.inventory import topology_fields, validated

    values = {name: read.job.get(name, value) if not _written(name) else value for name, value in given.items()}
    values |= _usual(values, read.job)
    shape = {name: given[name] for name in _SHAPE if name in given and _written(name)} | _fixed(values)
    for name in _OF_THIS_MACHINE:
        if name in shape and shape.pop(name) != read.inventory.options()[name]:
            raise UsageError(f"--algo {values['algo']} is for one worker on this machine", "add --local")
    chosen = topology_fields(shape["topology"]) if "topology" in shape else {}
    inventory = validated({**msgspec.to_builtins(read.inventory), **shape, **chosen}) if shape else read.inventory
    return _shaped(inventory, values)


def reshaped(inventory: "Inventory", values: Mapping[str, Value]) -> "tuple[Inventory, dict[str, Value]]":
    """Return an inventory with the shape that these values give it, and the values, as `machines`.

    Raises UsageError for a shape that the algorithm cannot have.
    """
    import msgspec

    from geomx_cli.inventory import topology_fields, validated

    values = {**values, **_fixed(values)}
    shape = {name: values[name] for name in _SHAPE}
    fields = {**msgspec.to_builtins(inventory), **shape, **topology_fields(str(shape["topology"]))}
    return _shaped(validated(fields), values)


def _usual(values: Mapping[str, Value], in_file: Collection[str]) -> dict[str, Value]:
    """Return the defaults that the network and the codec have instead of the table's, where neither the user nor the
    file has a value.
    """
    codec = codec_name(str(values.get("compress", "")))
    usual = {**USUAL.get(str(values.get("network", "")), {}), **USUAL_OF_CODEC.get(codec, {})}
    return {name: value for name, value in usual.items() if not _written(name) and name not in in_file}


def _framework(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the framework in place of auto."""
    from geomx_cli.contract.frontends import framework_for

    if values.get("framework") != "auto":
        return {}
    return {"framework": framework_for(str(values["network"]))}


def _fixed(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the cluster options fixed by the algorithm. Raises UsageError if the user set another value."""
    from geomx_cli.core import plugins

    fixed = plugins.algorithms()[str(values["algo"])].forced_options if "algo" in values else {}
    for name, value in fixed.items():
        if _written(name) and values[name] != value:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"--algo {values['algo']} works with {flag} {value} only", f"leave {flag} out")
    return dict(fixed)


def _shaped(inventory: "Inventory", values: Mapping[str, Value]) -> "tuple[Inventory, dict[str, Value]]":
    """Return the inventory with the chosen topology, delivery and reduction and, if the algorithm needs one, a local
    server for a central party that trains; and the values, with topology and framework in place of auto.
    """
    from msgspec import structs

    from geomx_cli.core import deliveries, plugins
    from geomx_cli.plan.automatic_topology import with_topology

    algorithm = plugins.algorithms()[str(values["algo"])] if "algo" in values else None
    wanted = algorithm is not None and algorithm.needs_local_server and inventory.topology != "flat"
    chosen: dict[str, Any] = {name: values[name] for name in ("reduce", "shards") if name in values}
    if "delivery" in values:
        chosen["delivery"] = deliveries.chosen(values)
        chosen["delivery_options"] = deliveries.own_options(deliveries.chosen(values), values)
    shaped = with_topology(structs.replace(inventory, **chosen, **({"central_server": True} if wanted else {})))
    topology = {"topology": shaped.topology} if "topology" in values else {}
    return shaped, {**values, **topology, **_framework(values)}


def ssh_options(accept_new_host_keys: bool = False) -> "SshOptions":
    """Return the SSH options for all connections of a command."""
    from geomx_cli.hosts.ssh.options import SshOptions

    return SshOptions(accept_new_host_keys=accept_new_host_keys, notify=lambda text: click.echo(text, err=True))


def _from_command_line(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _written(name: str) -> bool:
    """Return whether the user set this option, on the command line or in the environment."""
    source = click.get_current_context().get_parameter_source(name)
    return source not in (None, click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)
