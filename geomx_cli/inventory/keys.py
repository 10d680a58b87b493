"""The keys of an inventory file, the single source for its parser, its template and docs/reference/inventory.md."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from geomx_cli.core import env_names
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.option import nearest
from geomx_cli.core.options import OPTIONS, check
from geomx_cli.core.plugins import allocators
from geomx_cli.inventory import values

__all__ = [
    "DEFAULT_PORTS", "HOST_KEYS", "Key", "LINK_KEYS", "Lines", "Mistakes", "Path", "SSH_KEYS", "TOP_KEYS", "shortened",
]  # fmt: skip

# Collects the errors of a user's file, to report them together.

# Line numbers of tables and keys in a TOML text, which tomllib does not provide.

Path = tuple[str | int, ...]
"""Keys from the top, e.g. ("host", 1, "ports"). Elements of an array of tables have an index."""

_KEY = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
_KEYS = rf"{_KEY}(?:[ \t]*\.[ \t]*{_KEY})*"
_HEADER = re.compile(rf"\[(\[?)[ \t]*({_KEYS})[ \t]*\]\]?")
_ASSIGNMENT = re.compile(rf"({_KEYS})[ \t]*=")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)+")
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'|#[^\n]*|[\[\]{}\n]", re.DOTALL
)


@dataclass(frozen=True)
class Lines:
    """The line numbers, from 1, of tables and keys."""

    by_path: Mapping[Path, int]

    @classmethod
    def of(cls, text: str) -> "Lines":
        """Scan a text that `tomllib` accepts."""
        found: dict[Path, int] = {}
        table: Path = ()
        counts: dict[Path, int] = {}
        position, line, counted = 0, 1, 0
        while position < len(text):
            if blank := _BLANK.match(text, position):
                position = blank.end()
                continue
            line, counted = line + text.count("\n", counted, position), position
            if header := _HEADER.match(text, position):
                table = _table(_keys(header[2]), counts, another=bool(header[1]))
                found.setdefault(table, line)
                position = header.end()
            elif assignment := _ASSIGNMENT.match(text, position):
                found.setdefault(table + _keys(assignment[1]), line)
                position = _line_after_value(text, assignment.end())
            else:
                break
        return cls(found)

    def of_path(self, path: Path) -> int:
        """Return the line of `path`, or of its nearest enclosing table; 1 if there is none."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.by_path:
                return self.by_path[path[:length]]
        return 1


def _table(keys: Path, counts: dict[Path, int], *, another: bool) -> Path:
    """Return the path of a header's table. In an array of tables, this is the last element, or with `another` a new
    one.
    """
    path: Path = ()
    for place, key in enumerate(keys):
        path += (key,)
        if another and place == len(keys) - 1:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path += (counts[path],)
    return path


def _keys(text: str) -> Path:
    """Split a dotted key and remove quotes."""
    found: list[str] = []
    value: Any = tomllib.loads(f"{text} = 0")
    while isinstance(value, dict):
        ((key, value),) = value.items()
        found.append(key)
    return tuple(found)


def _line_after_value(text: str, position: int) -> int:
    """Return the position after the line on which the value starting at `position` ends."""
    depth = 0
    for token in _TOKEN.finditer(text, position):
        if token[0] == "\n" and depth == 0:
            return token.end()
        depth += (token[0] in "[{") - (token[0] in "]}")
    return len(text)


_LONGEST = 1000  # maximum characters of a message or hint, which may quote the file
_MOST = 50  # maximum number reported


@dataclass
class Mistakes:
    """The errors in the file called `name`, by line. `keys`: names of the keys with errors."""

    name: str
    lines: Lines
    keys: set[str] = field(default_factory=set)
    _found: set[tuple[int, str, str]] = field(default_factory=set)

    def add(self, path: Path, message: str, hint: str) -> None:
        """Add an error at the line of a key or table."""
        if path and isinstance(path[-1], str):
            self.keys.add(path[-1])
        self.add_at(self.lines.of_path(path), message, hint)

    def add_inherited(self, host: int, key: str, message: str, hint: str) -> None:
        """Add an error in the key of a host, at the line of the key under the host or in [defaults], otherwise at the
        host's line.
        """
        shared = ("host", host, key) not in self.lines.by_path and ("defaults", key) in self.lines.by_path
        self.add(("defaults", key) if shared else ("host", host, key), message, hint)

    def add_at(self, line: int, message: str, hint: str) -> None:
        """Add an error at a line."""
        self._found.add((line, shortened(message), shortened(hint)))

    def raise_if_any(self) -> None:
        """Raise InvalidSettings if there are errors."""
        if self._found:
            self._raise()

    def _raise(self) -> NoReturn:
        entries = [(f"{self.name}:{line}: {message}", hint) for line, message, hint in sorted(self._found)[:_MOST]]
        if len(entries) == 1:
            raise InvalidSettings(*entries[0])
        text = "".join(f"\n  {message}\n    {hint}" for message, hint in entries)
        more = f"\n  and {len(self._found) - _MOST} more" if len(self._found) > _MOST else ""
        raise InvalidSettings(f"{self.name} has {len(self._found)} mistakes:{text}{more}")


def shortened(text: str) -> str:
    """Elide the middle of a very long text."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-100:]}"


DEFAULT_PORTS = "9100-9163"
Group = Literal["file", "client", "who", "ssh", "batch", "network", "work", "place", "link"]


@dataclass(frozen=True)
class Key:
    """One key. `parse` converts its TOML value or raises InvalidSettings (see values.py).

    `example` is TOML. `default` describes the default in words. `shared`: whether [defaults] may have the key.
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
        "central", "file", values.name, '"hub"', "the party without devices, otherwise the first",
        "The central party. It has the global scheduler and the master worker.", shared=False,
    ),
    Key(
        "topology", "file", _option("topology"), '"spread"', "auto",
        "Where the global servers run. central: in the central party. spread: in every party. flat: workers exchange"
        " with global servers directly, and there are no local servers. auto: if two or more parties train and their"
        " hosts reach each other, spread; otherwise central.", shared=False,
    ),
    Key(
        "global_servers", "file", _option("global_servers"), "1", "1",
        "Global servers among which the model is divided. With topology spread: in each party.", shared=False,
    ),
    Key(
        "local_servers", "file", _option("local_servers"), "1", "1",
        "Local servers of each party, among which the model is divided.", shared=False,
    ),
)  # fmt: skip

SSH_KEYS: tuple[Key, ...] = (
    Key(
        "client", "client", values.ssh_client, '"openssh"', "auto",
        "What connects to the hosts. paramiko: the SSH client within geomx. openssh: the program `ssh` of the control"
        " machine. auto: paramiko, but openssh for a host whose ssh_config asks for what paramiko cannot do.",
        shared=False,
    ),
)  # fmt: skip

HOST_KEYS: tuple[Key, ...] = (
    Key(
        "name", "who", values.name, '"beijing-1"', "required",
        "The host's name in plans, logs and messages.", shared=False,
    ),
    Key(
        "party", "who", values.name, '"beijing"', "required",
        "The party (data centre) of the host. A job has all parties that its hosts name.", shared=False,
    ),
    Key(
        "devices", "who", values.devices, '["gpu0", "gpu1"]', "none",
        "geomx starts one worker for each device. cpu may be repeated. For gpuN geomx sets CUDA_VISIBLE_DEVICES of the"
        " worker to N.",
    ),
    Key(
        "local", "ssh", values.flag, "true", "false",
        "Whether the host is the control machine, on which you type geomx. geomx then uses no SSH.", shared=False,
    ),
    Key(
        "ssh", "ssh", values.ssh_address, '"203.0.113.7"', "the host's name",
        "The address for SSH: an IP address, a name, or an alias of your ~/.ssh/config.", shared=False,
    ),
    Key("ssh_port", "ssh", values.number(1, 65535), "2222", "port in ~/.ssh/config, or 22", "The sshd's port."),
    Key("user", "ssh", values.user, '"alice"', "user in ~/.ssh/config, or yours", "The account on the host."),
    Key(
        "key", "ssh", values.text, '"~/.ssh/id_ed25519"', "keys of your SSH agent, then the usual ones",
        "Your private key, on the control machine. A relative path begins at the folder of this file.",
    ),
    Key(
        "jump", "ssh", values.jump, '"alice@gate.example.org"', "jump in ~/.ssh/config, or none",
        "Jump hosts between you and the host, as in ProxyJump: user@host:port. Commas separate several.",
    ),
    Key(
        "fingerprint", "ssh", values.fingerprint, '"SHA256:mVPwvezndPv/ARoIadVY98vAC0g+P/5633yTC4d/wXE"',
        "your known_hosts", "The machine's host key, if it is not in known_hosts yet.", shared=False,
    ),
    Key(
        "allocator", "batch", _allocator, '"slurm"', "none",
        "What gives the machines of this entry at launch, and takes them back at the job's end: slurm, or the name of a"
        " plug-in. none: the entry names its machine.",
    ),
    Key(
        "login", "batch", values.ssh_address, '"login.example.org"', "this machine",
        "The login node, on which geomx runs the batch system's commands. It is an address for SSH, with the same"
        " user, key and so on as ssh has.",
    ),
    Key("nodes", "batch", values.number(1, 1024), "4", "1", "How many machines the entry stands for.", shared=False),
    Key("partition", "batch", values.text, '"gpu"', "the cluster's", "The partition (queue)."),
    Key("account", "batch", values.text, '"project-7"', "yours there", "The account that is charged."),
    Key("constraint", "batch", values.text, '"a100"', "none", "The features that the nodes have."),
    Key("gres", "batch", values.text, '"gpu:2"', "none", "What each node has, such as GPUs."),
    Key(
        "time", "batch", values.duration, '"4h"', "the partition's",
        "The time limit. The job is asked to stop --grace and 30 s before it.",
    ),
    Key(
        "sbatch", "batch", values.sbatch, '["--qos=high", "--exclusive"]', "none",
        "Further arguments of sbatch. They override the arguments that geomx gives. geomx refuses --array, --job-name,"
        " --nodes, --output, --wait and --wrap.",
    ),
    Key(
        "container", "batch", values.absolute, '"/images/geomx.sif"', "none",
        "The image in which Apptainer runs all of geomx on the nodes; python is then a Python in it.",
    ),
    Key(
        "address", "network", values.address, '"10.0.0.11"',
        "address of the interface, or the address for SSH",
        "The address that other hosts of the same party dial. Write IPv6 without brackets.", shared=False,
    ),
    Key(
        "wan_address", "network", values.address, '"203.0.113.7"',
        "address of wan_interface, or address",
        "The address that hosts of other parties dial, such as the public address of a NAT that forwards the ports.",
        shared=False,
    ),
    Key(
        "interface", "network", values.interface, '"eth0"', "any",
        "The network interface towards the host's own party. Without address, geomx uses this interface's address.",
    ),
    Key(
        "wan_interface", "network", values.interface, '"eth1"', "any",
        "The network interface towards the other parties. Without wan_address, geomx uses this interface's address.",
    ),
    Key(
        "listen", "network", values.listen, '"0.0.0.0"', "address; with several addresses, all",
        "The address to which schedulers and servers of the host bind.",
    ),
    Key(
        "ports", "network", values.ports, '"9100-9119"', DEFAULT_PORTS,
        "Ports for schedulers and servers of the host: a range, a list or one port. The firewall must let connections"
        " to them in.",
    ),
    Key(
        "reachable_from", "network", values.parties, '["beijing"]', "all",
        "The other parties whose machines can dial this host. [] means none, such as for a host behind NAT without"
        " forwarded ports. A process that a party must dial cannot run here unless this list has the party. For the"
        " links of --tsengine this host dials the parties that cannot dial it. If it cannot reach them, there is no"
        " link.",
    ),
    Key(
        "python", "work", values.python, '"/opt/geomx/bin/python"', "the path of the Python that runs geomx here",
        "A Python of the host that has geomx: an absolute path, ~/... in the home directory, or a command"
        " on the PATH. If the script's command begins with an absolute path of Python, this path is the default.",
    ),
    Key(
        "workdir", "work", values.absolute, '"/home/alice/project"', "beside the script",
        "The folder in which processes of the host start. Default: the folder to which geomx has copied the script; on"
        " a local host, the folder where you type geomx.",
    ),
    Key(
        "state_dir", "work", values.absolute, '"/data/geomx"', "~/.local/state/geomx",
        "The folder for the logs and events of jobs.",
    ),
    Key(
        "threads", "work", values.number(1, 1024), "4", "1",
        "Threads in the numeric libraries of each worker (OMP_NUM_THREADS).",
    ),
    Key(
        "env", "work", values.env(env_names.of_options()), '{ LD_LIBRARY_PATH = "/opt/cuda/lib64" }', "none",
        "Environment variables for all processes of the host, in addition to the variables in [defaults].",
    ),
    Key(
        "runs", "place", values.roles, '["scheduler", "server"]',
        "schedulers on a party's first host, servers on its hosts in turn",
        "Processes that may run on this host in addition to workers: scheduler, server, global_scheduler,"
        " global_server.",
        shared=False,
    ),
)  # fmt: skip

LINK_KEYS: tuple[Key, ...] = (
    Key("from", "link", values.name, '"beijing"', "required", "The party that sends.", shared=False),
    Key("to", "link", values.name, '"shenzhen"', "required", "The party that receives.", shared=False),
    Key("rate", "link", values.rate, '"50mbit"', "unlimited", "The bandwidth in this direction.", shared=False),
    Key("delay", "link", values.delay, '"40ms"', "none", "The delay in this direction.", shared=False),
)
