"""Binds the planned ports on their hosts, and dials them from the planned hosts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from geomx_cli.plan import Plan
from geomx_cli.preflight.connect import Dial, Dialled, place
from geomx_cli.preflight.diagnose import Check, addresses_of
from geomx_cli.preflight.probe_pool import Facts, ProbePool

__all__ = ["Listening", "Measured", "check_bandwidth", "dial_all", "listen", "measure"]

# Measures round trip and bandwidth of the links between parties, in both directions.

_SECONDS = 2.0
_CONNECT_LIMIT = 4.0
_WAN_SLACK = 4.0


@dataclass(frozen=True)
class Measured:
    """A link between hosts of different parties.

    round_trip: in seconds.
    there: bits per second from `dialler` to `listener`.
    back: bits per second from `listener` to `dialler`.
    error: why the measurement failed, or "".
    """

    dialler: str
    listener: str
    address: str
    port: int
    round_trip: float
    there: float
    back: float
    error: str

    def to_json(self) -> dict[str, Any]:
        """Return the measurement as JSON data."""
        return asdict(self)


def measure(
    probes: ProbePool, results: Iterable[Dialled], facts: Mapping[str, Facts], say: Callable[[str], None]
) -> list[Measured]:
    """Measure each pair of hosts once, for 2 s in each direction; links that share a machine are measured
    sequentially.

    `results` are the results of the dials. Links that could not be dialled are skipped. `say` receives progress
    messages.
    """
    left: dict[frozenset[str], Dialled] = {}
    for result in results:
        if result.kind == "ok" and result.dial.wide_area:
            left.setdefault(frozenset((result.dial.dialler, result.dial.listener)), result)
    waiting, found = list(left.values()), []
    while waiting:
        now = _apart(waiting, facts)
        waiting = [result for result in waiting if result not in now]
        say("measuring " + ", ".join(result.dial.subject for result in now))
        probes.keep_alive()
        found += _at_once(probes, now)
    return found


def check_bandwidth(measured: Iterable[Measured]) -> Iterable[Check]:
    """Report links that pass the handshake but no bulk data."""
    for link in measured:
        subject = f"{link.dialler} -> {link.listener}"
        if not link.error and link.there > 0 and link.back > 0:
            yield Check(subject, "bandwidth")
            continue
        why = link.error or "large packets do not arrive, small ones do"
        what = f"nothing can be measured at {link.address} port {link.port}: {why}"
        yield Check(subject, "bandwidth", "problem", what, "look for a wrong MTU or a firewall between them")


def _apart(waiting: Sequence[Dialled], facts: Mapping[str, Facts]) -> list[Dialled]:
    """Return a maximal subset of links without a common machine."""
    busy: set[str] = set()
    chosen = []
    for result in waiting:
        ends = {facts[host].boot or host for host in (result.dial.dialler, result.dial.listener) if host in facts}
        if busy.isdisjoint(ends):
            busy |= ends
            chosen.append(result)
    return chosen


def _at_once(probes: ProbePool, links: Sequence[Dialled]) -> list[Measured]:
    by_host = {link.dial.dialler: link for link in links}
    requests = {
        host: {
            "address": link.dial.address,
            "port": link.dial.port,
            "token": probes.token(link.dial.listener),
            "seconds": _SECONDS,
            "limit": _CONNECT_LIMIT,
        }
        for host, link in by_host.items()
    }
    answers = probes.ask("measure", requests, 4 * _SECONDS + 2 * _CONNECT_LIMIT + _WAN_SLACK)
    return [_measured(by_host[host], answer) for host, answer in answers.items()]


def _measured(link: Dialled, answer: Mapping[str, Any]) -> Measured:
    dial, kind = link.dial, str(answer["kind"])
    return Measured(
        dialler=dial.dialler,
        listener=dial.listener,
        address=dial.address,
        port=dial.port,
        round_trip=link.round_trip,
        there=8 * float(answer["sent"]),
        back=8 * float(answer["received"]),
        error="" if kind == "ok" else str(answer["detail"]) or kind,
    )


_LISTEN_LIMIT = 15.0
_DIAL_LIMIT = 4.0
_MOST_DIALS = 1000
_SLACK = 2.0


Listening = tuple[str, int, str]  # host, port, protocol


class _Bind(NamedTuple):
    address: str
    port: int
    process: str
    protocol: str


def listen(probes: ProbePool, planned: Plan, facts: Mapping[str, Facts]) -> tuple[list[Check], set[Listening]]:
    """Bind every planned port on its host; return the checks, and the ports that are listening."""
    binds: dict[str, list[_Bind]] = {}
    for process in planned.processes:
        for endpoint in process.endpoints:
            if endpoint.protocol != "ipc":
                bind = _Bind(*place(endpoint), process.name, endpoint.protocol)
                binds.setdefault(process.host, []).append(bind)
    requests = {
        host: {
            "token": probes.token(host),
            "owner": probes.owner,
            "binds": [(bind.address, bind.port, bind.protocol) for bind in own],
        }
        for host, own in binds.items()
    }
    checks: list[Check] = []
    listened: set[Listening] = set()
    for host, answer in probes.ask("listen", requests, _LISTEN_LIMIT).items():
        bound = list(zip(binds[host], answer["results"], strict=True))
        checks += _ports(host, bound, facts)
        listened |= {(host, bind.port, bind.protocol) for bind, result in bound if not result["error"]}
    return checks, listened


def dial_all(probes: ProbePool, wanted: Sequence[Dial]) -> list[Dialled]:
    """Dial all concurrently, at most 1000 for each dialling host. Results of hosts that fail meanwhile are omitted."""
    by_host: dict[str, list[Dial]] = {}
    for each in wanted:
        own = by_host.setdefault(each.dialler, [])
        if len(own) < _MOST_DIALS:
            own.append(each)
    requests = {
        host: {
            "limit": _DIAL_LIMIT,
            "targets": [_target(each, probes.token(each.listener)) for each in own],
        }
        for host, own in by_host.items()
    }
    answers = probes.ask("dial", requests, _DIAL_LIMIT + _SLACK)
    return [
        Dialled(each, str(result["kind"]), str(result["detail"]), str(result["ip"]), float(result["round_trip"]))
        for host, answer in answers.items()
        for each, result in zip(by_host[host], answer["results"], strict=True)
    ]


def _target(dial: Dial, token: str) -> dict[str, Any]:
    return {"address": dial.address, "port": dial.port, "token": token, "protocol": dial.protocol}


def _ports(host: str, bound: Iterable[tuple[_Bind, Mapping[str, Any]]], facts: Mapping[str, Facts]) -> Iterator[Check]:
    """Yield one check for each port. If the host lacks an address, yield one check for all ports at the address."""
    nowhere: set[str] = set()
    for bind, result in bound:
        if not result["error"]:
            yield Check(host, "port")
        elif result["in_use"]:
            holder = f" by {result['holder']}" if result["holder"] else ""
            udp = " (UDP)" * (bind.protocol == "udp")
            what = f"port {bind.port}{udp}, where {bind.process} is to listen, is in use{holder}"
            yield Check(
                host, "port", "problem", what, "end that program, or give the host other ports in the inventory"
            )
        elif bind.address not in nowhere:
            nowhere.add(bind.address)
            what = f"nothing can listen at {bind.address}: {result['error']}"
            fix = f"correct its address in the inventory ({addresses_of(host, facts)})"
            yield Check(host, "address", "problem", what, f'{fix}; if it is a gateway\'s, set listen = "0.0.0.0"')
