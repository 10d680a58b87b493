"""The keys of an inventory file, the single source for its parser, its template and docs/reference/inventory.md."""

from dataclasses import dataclass
from typing import Any, Literal

from geomx_cli.core import env_names
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.nearest import nearest
from geomx_cli.core.options import OPTIONS, check
from geomx_cli.core.plugins import allocators
from geomx_cli.inventory import values

__all__ = ["DEFAULT_PORTS", "HOST_KEYS", "LINK_KEYS", "TOP_KEYS", "Key"]

DEFAULT_PORTS = "9100-9163"
Group = Literal["file", "who", "ssh", "network", "work", "place", "link"]


@dataclass(frozen=True)
class Key:
    """One key. `parse` converts its TOML value or raises InvalidSettings (see values.py).

    `example` is TOML; `default` describes the default in words. `shared`: allowed in [defaults].
    """

    name: str
    group: Group
    parse: values.Parse
    example: str
    default: str
    help: str
    shared: bool = True


def _option(name: str) -> values.Parse:
    """Return the parser of a cluster option at the top of the file."""
    option = next(option for option in OPTIONS if option.name == name)
    if option.kind == "int":
        return values.number(int(option.minimum), int(option.maximum))

    def parse(value: Any, example: str) -> str:
        found = values.text(value, example)
        try:
            check(option, found)
        except InvalidSettings as error:
            raise InvalidSettings(f"there is no {name} {found!r}", error.hint) from None
        return found

    return parse


def _allocator(value: Any, example: str) -> str:
    """Parse the name of a plug-in; "none" yields an empty string."""
    found = values.text(value, example)
    known = ("none", *allocators())
    if found not in known:
        raise InvalidSettings(f"there is no allocator {found!r}", nearest(found, known))
    return "" if found == "none" else found


TOP_KEYS: tuple[Key, ...] = (
    Key(
        "central", "file", values.name, '"hub"', "the party without devices, or else the first",
        "The central party: it has the scheduler of the global plane and the master worker.", shared=False,
    ),
    Key(
        "topology", "file", _option("topology"), '"spread"', "auto",
        "Where the global servers run: central, spread over the parties, or flat, one plane without local servers."
        " auto: spread where two or more parties train and their hosts reach each other, else central.",
        shared=False,
    ),
    Key(
        "global_servers", "file", _option("global_servers"), "1", "1",
        "Global servers that share the model; with topology spread, in each party.", shared=False,
    ),
    Key(
        "local_servers", "file", _option("local_servers"), "1", "1",
        "Local servers in each party that share the model.", shared=False,
    ),
    Key(
        "allocator", "file", _allocator, '"none"', "none",
        "What gives the hosts their machines when a job is launched, and takes them back at its end, as a batch system:"
        " a plug-in by its name. none: the machines are those that the hosts name.", shared=False,
    ),
)  # fmt: skip

HOST_KEYS: tuple[Key, ...] = (
    Key(
        "name", "who", values.name, '"beijing-1"', "must be there",
        "What plans, logs and messages call this host.", shared=False,
    ),
    Key(
        "party", "who", values.name, '"beijing"', "must be there",
        "The party (data centre) that it belongs to. Parties are those that hosts name.", shared=False,
    ),
    Key(
        "devices", "who", values.devices, '["gpu0", "gpu1"]', "none",
        "One worker for each: cpu (as often as wanted) or gpuN, which is the one that CUDA_VISIBLE_DEVICES shows.",
    ),
    Key(
        "local", "ssh", values.flag, "true", "false",
        "This is the machine on which geomx is typed; no SSH is used.", shared=False,
    ),
    Key(
        "ssh", "ssh", values.ssh_address, '"203.0.113.7"', "the host's name",
        "Where SSH finds it: an IP address, a name, or an alias of your ~/.ssh/config.", shared=False,
    ),
    Key("ssh_port", "ssh", values.number(1, 65535), "2222", "that of ~/.ssh/config, or 22", "The port of its sshd."),
    Key("user", "ssh", values.user, '"alice"', "that of ~/.ssh/config, or yours", "The account there."),
    Key(
        "key", "ssh", values.text, '"~/.ssh/id_ed25519"', "your SSH agent's, then the usual ones",
        "Your private key, on the machine where geomx is typed; a relative path is from the folder of this file.",
    ),
    Key(
        "jump", "ssh", values.jump, '"alice@gate.example.org"', "that of ~/.ssh/config, or none",
        "Machines to go through, as ProxyJump: user@host:port, several separated by commas.",
    ),
    Key(
        "fingerprint", "ssh", values.fingerprint, '"SHA256:mVPwvezndPv/ARoIadVY98vAC0g+P/5633yTC4d/wXE"',
        "your known_hosts", "Its host key, for a machine that known_hosts does not know yet.", shared=False,
    ),
    Key(
        "address", "network", values.address, '"10.0.0.11"',
        "that of the interface, or what SSH dials",
        "What hosts of its own party dial. IPv6 is written without brackets.", shared=False,
    ),
    Key(
        "wan_address", "network", values.address, '"203.0.113.7"',
        "that of wan_interface, or the address",
        "What hosts of other parties dial, where that is another: behind NAT with its ports forwarded.", shared=False,
    ),
    Key(
        "interface", "network", values.interface, '"eth0"', "any",
        "The network interface towards its own party; its address is taken where address is left out.",
    ),
    Key(
        "wan_interface", "network", values.interface, '"eth1"', "any",
        "The same towards the other parties, for wan_address.",
    ),
    Key(
        "listen", "network", values.listen, '"0.0.0.0"', "the address, or all where it has several",
        "What its schedulers and servers bind.",
    ),
    Key(
        "ports", "network", values.ports, '"9100-9119"', DEFAULT_PORTS,
        "Ports that its schedulers and servers may take: a range, a list or one. The firewall must let them in.",
    ),
    Key(
        "reachable_from", "network", values.parties, '["beijing"]', "all",
        "The other parties whose machines can dial it; [] for none, as behind NAT without forwarded ports. Processes"
        " that those dial cannot run there; with --tsengine the others dial from there, or are not linked.",
    ),
    Key(
        "python", "work", values.python, '"/opt/geomx/bin/python"', "the path of the one that runs geomx here",
        "A Python there that has geomx: an absolute path, ~/... for one in the home there, or a command on the PATH."
        " The default is an absolute path of Python in the script's command, if any.",
    ),
    Key(
        "workdir", "work", values.absolute, '"/home/alice/project"', "beside the script",
        "Where its processes start. Without it, where geomx has put the script; on a local host, where it was typed.",
    ),
    Key(
        "state_dir", "work", values.absolute, '"/data/geomx"', "~/.local/state/geomx",
        "Where jobs keep logs and events on it.",
    ),
    Key(
        "threads", "work", values.number(1, 1024), "4", "1",
        "Threads in the numeric libraries of each worker (OMP_NUM_THREADS).",
    ),
    Key(
        "env", "work", values.env(env_names.of_options()), '{ LD_LIBRARY_PATH = "/opt/cuda/lib64" }', "none",
        "Variables for each of its processes, on top of those in [defaults].",
    ),
    Key(
        "runs", "place", values.roles, '["scheduler", "server"]',
        "schedulers on a party's first host, servers on its hosts in turn",
        "Only these run here beside workers: scheduler, server, global_scheduler, global_server.", shared=False,
    ),
)  # fmt: skip

LINK_KEYS: tuple[Key, ...] = (
    Key("from", "link", values.name, '"beijing"', "must be there", "The party that sends.", shared=False),
    Key("to", "link", values.name, '"shenzhen"', "must be there", "The party that receives.", shared=False),
    Key("rate", "link", values.rate, '"50mbit"', "unlimited", "What passes, in this direction.", shared=False),
    Key("delay", "link", values.delay, '"40ms"', "none", "How long it takes, in this direction.", shared=False),
)
