"""Binds the planned ports on their hosts, and dials them from the planned hosts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from geomx_cli.plan import Plan
from geomx_cli.preflight.check import Check
from geomx_cli.preflight.connect import Dial, Dialled, place
from geomx_cli.preflight.diagnose import addresses_of
from geomx_cli.preflight.probe_pool import Facts, ProbePool

__all__ = ["Listening", "dial_all", "listen"]

_LISTEN_LIMIT = 5.0
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
    """Dial all concurrently, at most 1000 per dialling host; results of hosts that fail meanwhile are omitted."""
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
    """Yield one check per port, but only one for all ports at an address that the host does not have."""
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
