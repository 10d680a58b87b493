"""Parsers for the values of an inventory file. Each takes a TOML value and an example of a valid one, as TOML, and
returns the typed value.

All raise InvalidSettings with the error, without the key's name, as message and the valid form as hint.
"""

import ipaddress
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, get_args

from geomx_cli.contract.config import Role
from geomx_cli.core import units
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.option import nearest
from geomx_cli.inventory import DEVICE, NAME
from geomx_cli.inventory.access import SshClient

__all__ = [
    "Parse", "absolute", "address", "delay", "devices", "duration", "env", "fingerprint", "flag", "interface", "jump",
    "kind_of", "listen", "name", "number", "ports", "python", "rate", "roles", "sbatch", "ssh_address", "ssh_client",
    "text", "user",
]  # fmt: skip

Parse = Callable[[Any, str], Any]

_LONGEST_DELAY = 60.0
_SHORTEST_LIMIT = 60.0  # seconds; Slurm counts minutes
_NODES = "; the key `nodes` has the number of nodes"
_OF_GEOMX = {
    "--array": "", "-a": "", "--job-name": "", "-J": "", "--nodes": _NODES, "-N": _NODES, "--output": "", "-o": "",
    "--wait": "", "-W": "", "--wrap": "",
}  # fmt: skip
"""Arguments of sbatch -> what to write in their place."""
_USER = r"(?!-)[^:,]+"  # /etc/passwd and directory services have names such as 7of9, CORP\\jo and jo@corp.example
_HOSTNAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})?)*\.?")
_JUMP = re.compile(rf"({_USER}@)?([A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\])(:[0-9]{{1,5}})?")
_PLACE = re.compile(
    r"(?:ssh://)?(?:(?P<user>.+)@)?(?:\[(?P<v6>[^]]*)\]|(?P<host>[^:/@\[\]]+))(?::(?P<port>[0-9]{1,5}))?/?"
)
"""An address as it is written for other programs."""
_TYPES = {
    bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "a table",
}  # fmt: skip


def kind_of(value: Any) -> str:
    """Return the TOML name of a value's type, for messages."""
    return _TYPES.get(type(value), "a date")


def text(value: Any, example: str) -> str:
    """Non-empty text without control characters."""
    if not isinstance(value, str):
        raise InvalidSettings(f"it is {kind_of(value)} and must be text", f"write it in quotes, as {example}")
    if not value.strip() or not value.isprintable():
        raise InvalidSettings(f"{value!r} is no text that can be used", f"write {example}, or leave the key out")
    return value.strip()


def flag(value: Any, _example: str) -> bool:
    """A boolean."""
    if not isinstance(value, bool):
        raise InvalidSettings(f"it is {kind_of(value)} and must be true or false", "leave quotes out")
    return value


def number(least: int, most: int) -> Parse:
    """An integer from `least` to `most`."""

    def parse(value: Any, _example: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidSettings(
                f"it is {kind_of(value)} and must be a whole number", f"write a number from {least} to {most}"
            )
        if not least <= value <= most:
            raise InvalidSettings(f"{value} is out of range", f"write a number from {least} to {most}")
        return value

    return parse


def rate(value: Any, example: str) -> float:
    """A link's rate, in bits per second."""
    found = units.parse_rate(text(value, example))
    if not found:
        raise InvalidSettings("a link of 0 bit/s carries nothing", "leave it out for a link without a limit")
    return found


def delay(value: Any, example: str) -> float:
    """A link's delay, in seconds."""
    found = units.parse_duration(text(value, example))
    if found > _LONGEST_DELAY:
        raise InvalidSettings(f"a delay of {units.format_duration(found)} is more than a minute", f"write {example}")
    return found


def duration(value: Any, example: str) -> float:
    """A time limit, in seconds."""
    found = units.parse_duration(text(value, example))
    if found < _SHORTEST_LIMIT:
        raise InvalidSettings(f"a time limit of {units.format_duration(found)} is too short", f"write {example}")
    return found


def sbatch(value: Any, example: str) -> tuple[str, ...]:
    """Arguments of sbatch, without those on which geomx relies."""
    found = _texts(value, example)
    for word in found:
        option = word.partition("=")[0] if word.startswith("--") else word[:2]
        if option in _OF_GEOMX:
            raise InvalidSettings(f"geomx sets {option} itself", f'leave it out{_OF_GEOMX[option]}')
    return found


def name(value: Any, example: str) -> str:
    """The name of a host or party."""
    found = text(value, example)
    if not re.match(NAME, found):
        raise InvalidSettings(
            f"{found!r} is no name",
            "a name begins with a letter, has at most 32 letters, digits, dots, hyphens and underscores",
        )
    return found


def ssh_address(value: Any, example: str) -> str:
    """As `address`; a hint says where the user and port go that ssh takes with it."""
    return address(value, example, of_ssh=True)


def ssh_client(value: Any, example: str) -> str:
    """The name of an SSH client."""
    found = text(value, example)
    if found not in get_args(SshClient):
        raise InvalidSettings(f"there is no client {found!r}", nearest(found, get_args(SshClient)))
    return found


def address(value: Any, example: str, *, of_ssh: bool = False) -> str:
    """An IP address or host name."""
    found = text(value, example)
    try:
        found_ip = ipaddress.ip_address(found)
    except ValueError:
        return _host_name(found, of_ssh=of_ssh)
    if found_ip.is_unspecified:
        raise InvalidSettings(f"nobody can dial {found}", "listen says what a host binds; this is what others dial")
    if "%" in found:
        raise InvalidSettings(f"{found} means something on one machine only", "write an address without a zone")
    return str(found_ip)


def _host_name(found: str, *, of_ssh: bool) -> str:
    parts = _PLACE.fullmatch(found)
    if parts is not None and (parts["user"] or parts["v6"] or parts["port"] or "/" in found):
        also = [f'user = "{parts["user"]}"'] * bool(parts["user"] and of_ssh)
        also += [f"ssh_port = {parts['port']}"] * bool(parts["port"] and of_ssh)
        hint = f'write "{parts["v6"] or parts["host"]}" here' + (f", and under it {' and '.join(also)}" if also else "")
        raise InvalidSettings(f"{found!r} is more than an address", hint)
    if ":" in found:
        raise InvalidSettings(f"{found!r} is no IPv6 address", 'write one such as "2001:db8::1"')
    if re.fullmatch(r"[0-9.]+", found):
        raise InvalidSettings(f"{found!r} is no IPv4 address", 'it has four numbers from 0 to 255, as "192.0.2.10"')
    if len(found) > 253 or not _HOSTNAME.fullmatch(found):
        raise InvalidSettings(f"{found!r} is neither an IP address nor the name of a machine", 'write "192.0.2.10"')
    return found


def listen(value: Any, example: str) -> str:
    """An IP address to bind."""
    found = text(value, example)
    try:
        return str(ipaddress.ip_address(found))
    except ValueError:
        raise InvalidSettings(
            f"{found!r} is no IP address", 'write one of the host\'s own, or "0.0.0.0" or "::" for all of them'
        ) from None


def user(value: Any, example: str) -> str:
    """An account name."""
    found = text(value, example)
    if not re.fullmatch(_USER, found):
        raise InvalidSettings(f"{found!r} is no name of an account", f"write {example}")
    return found


def jump(value: Any, example: str) -> str:
    """Jump hosts, separated by commas."""
    found = text(value, example)
    for part in found.split(","):
        match = _JUMP.fullmatch(part.strip())
        if match is None or (match[3] and not 0 < int(match[3][1:]) < 65536):
            raise InvalidSettings(
                f"{part.strip()!r} is no machine to jump over",
                'write "user@host:port", user and port as needed, IPv6 in brackets, several separated by commas',
            )
    return ",".join(part.strip() for part in found.split(","))


def fingerprint(value: Any, example: str) -> str:
    """The SHA-256 fingerprint of a host key."""
    found = text(value, example)
    if not re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43}=?", found):
        raise InvalidSettings(
            f"{found!r} is no fingerprint of a host key",
            "write SHA256: and 43 characters, as ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub prints it there",
        )
    return found.rstrip("=")


def interface(value: Any, example: str) -> str:
    """The name of a network interface."""
    found = text(value, example)
    if len(found) > 15 or re.search(r"[\s/]", found):
        hint = f"write its name, as ip address shows it: {example}"
        raise InvalidSettings(f"{found!r} is no network interface", hint)
    return found


def absolute(value: Any, example: str) -> str:
    """An absolute path on the host; ~ is the account's home there."""
    found = text(value, example)
    if not found.startswith(("/", "~/")):
        raise InvalidSettings(
            f"{found!r} is a relative path with no known base", f'write "/.../{found}", or "~/{found}"'
        )
    return found.rstrip("/") or "/"


def python(value: Any, example: str) -> str:
    """A Python of the host: an absolute path, a path below its home (~/), or a command on its PATH."""
    found = text(value, example)
    if "/" in found and not found.startswith(("/", "~/")):
        raise InvalidSettings(
            f"{found!r} is a relative path",
            'write the whole path, as "/opt/geomx/bin/python" or "~/geomx/bin/python", or a command, as "python3"',
        )
    return found


def devices(value: Any, example: str) -> tuple[str, ...]:
    """A list of devices, one per worker."""
    found = _texts(value, example)
    for device in found:
        if not re.match(DEVICE, device):
            gpu = re.fullmatch(r"(?:gpu|cuda)[:_ -]?([0-9]{1,2})?", device.lower())
            hint = f'write "gpu{int(gpu[1] or 0)}"' if gpu else 'write "cpu", or "gpu0", "gpu1", ...'
            raise InvalidSettings(f"{device!r} is no device", hint)
    _refuse_repeated([device for device in found if device != "cpu"], "each GPU has one worker")
    return found


def roles(value: Any, example: str) -> tuple[Role, ...]:
    """A list of roles that run on a host, besides workers."""
    known = [role for role in get_args(Role) if role != "worker"]
    found = _texts(value, example)
    for role in found:
        if role == "worker":
            raise InvalidSettings("workers follow from devices", 'take "worker" out, and write devices = ["cpu"]')
        if role not in known:
            raise InvalidSettings(f"there is no role {role!r}", nearest(role, known))
    _refuse_repeated(found, "once is enough")
    return found  # type: ignore[return-value]


def parties(value: Any, example: str) -> tuple[str, ...]:
    """A list of names of parties, possibly empty."""
    found = tuple(name(item, example) for item in _texts(value, example))
    _refuse_repeated(found, "once is enough")
    return found


def ports(value: Any, example: str) -> tuple[int, ...]:
    """Ports: a range such as "9100-9119", a list, or a single port."""
    hint = f"write {example}, or a list such as [9100, 9101]"
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:\s*-\s*([0-9]{1,5}))?\s*", value)
        if match is None:
            raise InvalidSettings(f"{value!r} is no range of ports", hint)
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise InvalidSettings(f"{value!r} runs backwards", f'write "{last}-{first}"')
        value = range(first, last + 1) if last < 65536 else [last]
    elif isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, list | range):
        raise InvalidSettings(f"it is {kind_of(value)} and must be a range or list of ports", hint)
    for port in value:
        if isinstance(port, bool) or not isinstance(port, int):
            raise InvalidSettings(f"{port!r} in the list is {kind_of(port)} and must be a number", hint)
        if not 0 < port < 65536:
            raise InvalidSettings(f"{port} is no port", "a port lies between 1 and 65535")
    if not value:
        raise InvalidSettings("the list is empty", hint)
    _refuse_repeated(value, "each stands for itself")
    return tuple(value)


def env(reserved: Collection[str]) -> Parse:
    """A table of environment variables; names in `reserved` or with prefix DMLC_ or GEOMX_ are rejected."""

    def parse(value: Any, _example: str) -> dict[str, str]:
        if not isinstance(value, Mapping):
            raise InvalidSettings(f"it is {kind_of(value)} and must be a table", 'write { NAME = "value" }')
        for variable, content in value.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
                raise InvalidSettings(
                    f"{variable!r} is no name of a variable", "it has letters, digits and underscores, no digit first"
                )
            if variable != "GEOMX_DATA_DIR" and (variable.startswith(("DMLC_", "GEOMX_")) or variable in reserved):
                raise InvalidSettings(f"{variable} is set by geomx itself", "an option stands in the table [job]")
            if not isinstance(content, str):
                hint = f'write {variable} = "{content}"'
                raise InvalidSettings(f"{variable} is {kind_of(content)} and must be text", hint)
            if "\0" in content:
                raise InvalidSettings(f"{variable} has a character in it that no variable can have", "leave it out")
        return dict(value)

    return parse


def _texts(value: Any, example: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        if isinstance(value, str) and (words := value.replace(",", " ").split()):
            example = "[" + ", ".join(f'"{word}"' for word in words) + "]"
        raise InvalidSettings(f"it is {kind_of(value)} and must be a list", f"write {example}")
    for item in value:
        if not isinstance(item, str):
            raise InvalidSettings(f"{item!r} in the list is {kind_of(item)} and must be text", f"write {example}")
    return tuple(value)


def _refuse_repeated(items: Sequence[Any], hint: str) -> None:
    seen = set()
    for item in items:
        if item in seen:
            raise InvalidSettings(f"{item} is there twice", hint)
        seen.add(item)
