"""Runs a probe on each host of an inventory (see probe/), with parallel requests to all."""

import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from geomx_cli.core.conventions import module_command
from geomx_cli.core.errors import CheckFailed, GeomxError, HostUnreachable, TimedOut
from geomx_cli.core.typed import to_type
from geomx_cli.hosts import Connector, everywhere
from geomx_cli.preflight.probe_client import ProbeClient

__all__ = ["OLDEST_PYTHON", "Facts", "Folder", "ProbePool", "Skew", "old_python"]

OLDEST_PYTHON = (3, 11)

_START_LIMIT = 10.0
_FACTS_LIMIT = 8.0
_HOLD = 900.0  # the longest time that ports stay reserved: the files and data set of a job may take long
# Runs in any Python, including 2: prints its version and whether geomx is installed.
_PYTHON = """
import sys
sys.path = [path for path in sys.path if path]
try:
    from importlib.util import find_spec as find
except ImportError:
    from pkgutil import find_loader as find
print('.'.join(map(str, sys.version_info[:3])) + ' ' + str(find('geomx_cli') is not None))
"""
_Result = TypeVar("_Result")


class Folder(msgspec.Struct, frozen=True):
    """A folder on a host: absolute path. `error`: why it cannot be written to or created. `free`: bytes."""

    path: str
    exists: bool
    error: str
    free: int


class Facts(msgspec.Struct, frozen=True):
    """Facts that a host reports about itself.

    version, code: geomx's version and source digest.
    python, executable: Python's version, and its path.
    boot: equal for hosts on one machine.
    clock: Unix time in seconds.
    state: the directory of jobs.
    work: the working directory of processes.
    temp: the folder for unix sockets.
    sockets: why no sockets can be created in `temp`, or "".
    uid: the account's number.
    addresses: by interface.
    free: the candidate ports that can be bound, by address.
    taken: the holders of the other candidate ports.
    unusable: for addresses that cannot be bound, the reason.
    memory: in bytes, 0 if unknown.
    slow_start, shared_memory: see machine.py.
    missing: modules that cannot be imported.
    versions: versions of distributions. "torch.cuda" is the version of CUDA for which PyTorch is built, "" for none.
        "torch.nccl" is the version of NCCL that was installed with PyTorch.
    """

    version: str
    code: str
    package: str
    python: str
    executable: str
    home: str
    user: str
    boot: str
    clock: float
    state: Folder
    work: Folder
    temp: str
    sockets: str
    uid: int
    addresses: dict[str, list[str]]
    free: dict[str, list[int]]
    taken: dict[int, str]
    unusable: dict[str, str]
    memory: int
    cores: int
    slow_start: bool
    shared_memory: int
    gpus: list[str]
    missing: list[str]
    versions: dict[str, str]


@dataclass(frozen=True)
class Skew:
    """Offset of a host's clock from the control machine's, in seconds, with its `uncertainty`."""

    ahead: float
    uncertainty: float

    @classmethod
    def of(cls, sent: float, clock: float, received: float) -> "Skew":
        """Compute it from our Unix times of request and response, and the host's `clock` between them."""
        return cls(clock - (sent + received) / 2, (received - sent) / 2)

    @property
    def certain(self) -> float:
        """`ahead`, or 0 if the two clocks may agree."""
        return self.ahead if abs(self.ahead) > self.uncertainty else 0.0


class ProbePool:
    """A probe on each of `hosts`, running until `close`; also a context manager.

    If a host fails, its error is stored in `failures`, and it receives no further requests. The other hosts are not
    affected. Not thread-safe.

    token: returns, for a host, the token that authenticates diallers to the host's listeners.
    owner: distinguishes our ports from other launches' ports.
    """

    def __init__(self, hosts: Mapping[str, Connector]) -> None:
        self.failures: dict[str, GeomxError] = {}
        self.skews: dict[str, Skew] = {}
        self.owner = secrets.token_hex(8)
        self._tokens = {name: secrets.token_hex(16) for name in hosts}
        self._open: dict[str, ProbeClient] = {}
        opened = self._each(lambda name: _start(hosts[name]), hosts)
        self._open = {name: client for name, (client, _) in opened.items()}
        self.skews = {name: skew for name, (_, skew) in opened.items()}

    def __enter__(self) -> "ProbePool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *, release: bool = True) -> None:
        """End all probes; with `release` their listening ports are free on return."""
        everywhere(lambda name: self._open[name].close(release=release and name not in self.failures), list(self._open))
        self._open.clear()

    def hold_ports(self) -> None:
        """Stop listening. The ports stay reserved until `close`, but at most a quarter of an hour."""
        self.ask("release", {name: {"hold": True, "silence": _HOLD} for name in self.hosts}, _START_LIMIT)

    def release_ports(self) -> None:
        """Stop listening, and release the reserved ports."""
        self.ask("release", {name: {} for name in self.hosts}, _START_LIMIT)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that have not failed."""
        return tuple(name for name in self._open if name not in self.failures)

    def token(self, host: str) -> str:
        """Return the token that listeners on `host` require."""
        return self._tokens[host]

    def collect_facts(self, requests: Mapping[str, Mapping[str, Any]]) -> dict[str, Facts]:
        """Request facts from hosts; see probe/facts.py for a request's fields."""
        answers = self.ask("facts", requests, _FACTS_LIMIT)
        return self._each(lambda name: _decoded(name, answers[name]), answers)

    def ask(self, what: str, requests: Mapping[str, Mapping[str, Any]], limit: float) -> dict[str, dict[str, Any]]:
        """Send requests in parallel, with a timeout of `limit` seconds; return the responses of hosts that did not
        fail.
        """
        living = [name for name in self.hosts if name in requests]
        return self._each(lambda name: self._open[name].ask(what, requests[name], limit), living)

    def keep_alive(self) -> None:
        """Reset the probes' idle timeout of one minute."""
        self.ask("clock", {name: {} for name in self.hosts}, _START_LIMIT)

    def _each(self, do: Callable[[str], _Result], names: Iterable[str]) -> dict[str, _Result]:
        """Run `do` for each host in parallel; return results by host and store errors in `failures`."""
        results: dict[str, _Result] = {}

        def one(name: str) -> None:
            try:
                results[name] = do(name)
            except GeomxError as error:
                self.failures[name] = error
            except OSError as error:
                self.failures[name] = HostUnreachable(f"host {name}: {error}", "see that it runs and can be reached")

        everywhere(one, names)
        return {name: results[name] for name in names if name in results}


def _start(host: Connector) -> tuple[ProbeClient, Skew]:
    """Start a probe. Raises HostUnreachable, also if the host accepts no files. Raises CheckFailed if the host has no
    working Python or geomx.
    """
    host.check_files()
    try:
        client = ProbeClient(host.name, host.open(module_command(host.python, "geomx_cli.probe")))
    except (FileNotFoundError, PermissionError):
        raise _no_python(host) from None
    try:
        client.ask("clock", {}, _START_LIMIT)
        sent = time.time()
        clock = float(client.ask("clock", {}, _START_LIMIT)["clock"])
        if not math.isfinite(clock):
            client.close(release=False)
            raise CheckFailed(f"host {host.name}: its clock is {clock}", "look at its time: date")
        return client, Skew.of(sent, clock, time.time())
    except HostUnreachable:
        client.close(release=False)
        raise _explain(host, client) from None
    except TimedOut:
        client.close(release=False)
        raise TimedOut(
            f"host {host.name}: geomx did not start within {_START_LIMIT:g} s",
            "see how long a command takes there (ssh ... true): a slow start-up file of its shell, or too much load",
        ) from None
    except GeomxError:
        client.close(release=False)
        raise


def _explain(host: Connector, client: ProbeClient) -> CheckFailed:
    """Return the cause of a probe's immediate exit. Raises HostUnreachable if the host is lost."""
    python = host.python
    done = host.run([python, "-c", _PYTHON], limit=_START_LIMIT)
    words = done.output.decode(errors="replace").split()[-2:]  # a wrapper may print something first
    if done.status != 0 or len(words) < 2:
        return _no_python(host)
    version, there = words
    if tuple(int(part) for part in version.split(".") if part.isdigit()) < OLDEST_PYTHON:
        return old_python(host.name, version, python)
    if there != "True":
        return CheckFailed(
            f"host {host.name}: {python} has no geomx",
            "install there what is installed here, in a virtual environment (docs/how-to/sites.md), and set python in"
            " the inventory to its interpreter",
        )
    last = client.errors().strip().splitlines()[-1:] or ["no output"]
    return CheckFailed(f"host {host.name}: geomx does not start: {last[0]}", f"install it anew in {python}")


def _no_python(host: Connector) -> CheckFailed:
    hint = "install it there, or correct python in the inventory"
    return CheckFailed(f"host {host.name}: there is no Python at {host.python}", hint)


def old_python(host: str, version: str, path: str) -> CheckFailed:
    """Build the error for a Python version that is too old for geomx."""
    oldest = ".".join(map(str, OLDEST_PYTHON))
    hint = f"install Python {oldest} or newer there, or correct python in the inventory"
    return CheckFailed(f"host {host}: Python {version} at {path} is too old", hint)


def _decoded(name: str, answer: Mapping[str, Any]) -> Facts:
    try:
        return to_type(answer, Facts, str_keys=True)
    except msgspec.ValidationError as error:
        raise CheckFailed(
            f"host {name}: its probe sent an invalid answer: {error}",
            "install the same version of geomx on all hosts",
        ) from None
