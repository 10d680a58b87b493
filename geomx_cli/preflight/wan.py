"""Measures the links between parties: round trip and bandwidth, each way."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from geomx_cli.preflight.check import Check
from geomx_cli.preflight.connect import Dialled
from geomx_cli.preflight.probe_pool import Facts, ProbePool

__all__ = ["Measured", "check_bandwidth", "measure"]

_SECONDS = 2.0
_CONNECT_LIMIT = 4.0
_SLACK = 4.0


@dataclass(frozen=True)
class Measured:
    """One link between two hosts of different parties: the round trip in seconds, and bits a second from `dialler`
    to `listener` (`there`) and the other way (`back`). `error` says why there is no rate, "" when there is one."""

    dialler: str
    listener: str
    address: str
    port: int
    round_trip: float
    there: float
    back: float
    error: str

    def to_json(self) -> dict[str, Any]:
        """As an object that `json` writes."""
        return asdict(self)


def measure(
    probes: ProbePool, results: Iterable[Dialled], facts: Mapping[str, Facts], say: Callable[[str], None]
) -> list[Measured]:
    """Measure each pair of hosts once, for two seconds each way; links with a machine in common one after the other.

    `results` are those of the dials; what could not be dialled is not measured. `say` is told what is measured.
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
    """A link that carries a greeting but no stream of bytes."""
    for link in measured:
        subject = f"{link.dialler} -> {link.listener}"
        if not link.error and link.there > 0 and link.back > 0:
            yield Check(subject, "bandwidth")
            continue
        why = link.error or "large packets do not arrive, small ones do"
        what = f"nothing can be measured at {link.address} port {link.port}: {why}"
        yield Check(subject, "bandwidth", "problem", what, "look for a wrong MTU or a firewall between them")


def _apart(waiting: Sequence[Dialled], facts: Mapping[str, Facts]) -> list[Dialled]:
    """As many as have no machine in common."""
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
    answers = probes.ask("measure", requests, 4 * _SECONDS + 2 * _CONNECT_LIMIT + _SLACK)
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
