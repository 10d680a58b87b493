"""Measures round trip and bandwidth of the links between parties, in both directions."""

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
    """A link between hosts of different parties: round trip in seconds; bits per second from `dialler` to `listener`
    (`there`) and back (`back`). `error`: why the measurement failed, or "".
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

    `results` are those of the dials; links that could not be dialled are skipped. `say` receives progress messages.
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
