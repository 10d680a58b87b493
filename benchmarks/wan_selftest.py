"""Measures the emulated links with plain TCP and compares them with the requested rate and delay."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from geomx_cli.core.errors import CheckFailed

if TYPE_CHECKING:
    from wan import Wan

__all__ = ["FRAMING", "SelfTest", "measure"]

FRAMING = 1448 / 1514
TOLERANCE = 0.05
WARM_UP = 2.0
SECONDS = 4.0
PROBE = str(Path(__file__).with_name("wan_probe.py"))


@dataclass(frozen=True)
class SelfTest:
    """One measurement of a `Wan`. Goodputs are TCP payload in bytes per second, times in seconds.

    `one_way` is one connection with nothing in the other direction; `both_ways` two connections at once, one in each
    direction, between the same two sites. `shared_in` and `shared_out` (None with two sites) are what the first site
    receives from all others together while it sends to all of them, and what it sends. `emulation_cpu` is the CPU time
    of our forwarder during `both_ways`, in cores; 0 if the kernel does everything (its own share is not in any figure).
    """

    rate: float | None
    rtt: float | None
    one_way: float
    both_ways: tuple[float, float]
    shared_in: float | None
    shared_out: float | None
    round_trip: float
    emulation_cpu: float
    delay_by: str

    @property
    def wire_goodput(self) -> float:
        """Mean bytes per second of both directions when both are busy: the denominator of the wire limit."""
        return statistics.fmean(self.both_ways)

    @property
    def expected(self) -> float | None:
        """The goodput of one direction at the requested rate, in bytes per second.

        A full segment carries 1448 bytes of payload (MTU 1500 less IPv4 20, TCP 20, timestamps 12) in a frame that the
        shaper counts as 1514 (Ethernet's 14, without preamble, check sum and gap): 95.6 % of the nominal rate.
        """
        return None if self.rate is None else self.rate / 8 * FRAMING

    def check(self) -> None:
        """Raise CheckFailed if one-way goodput or the idle round trip is more than 5 % off the requested value."""
        for what, measured, asked, unit, scale in (
            ("goodput", self.one_way, self.expected, "Mbit/s", 8e-6),
            ("round trip", self.round_trip, self.rtt, "ms", 1e3),
        ):
            if asked is not None and abs(measured / asked - 1) > TOLERANCE:
                raise CheckFailed(
                    f"the emulated {what} is {measured * scale:.4g} {unit}, not {asked * scale:.4g}",
                    "is the machine busy with something else? figures measured over this link would be wrong",
                )

    def to_json(self) -> str:
        """A JSON object of the fields and the two derived figures."""
        derived = {"schema": 1, "expected": self.expected, "wire_goodput": self.wire_goodput}
        return json.dumps(derived | asdict(self))

    def lines(self) -> list[str]:
        """The figures as text."""
        rows = {"one way": [self.one_way], "both ways": [*self.both_ways]}
        if self.shared_in is not None and self.shared_out is not None:
            rows["first site, in and out"] = [self.shared_in, self.shared_out]
        if self.expected is not None:
            rows["expected one way"] = [self.expected]
        figures = {
            name: ", ".join(f"{value * 8e-6:.1f} Mbit/s" for value in row) for name, row in rows.items()
        }
        figures["round trip"] = f"{self.round_trip * 1e3:.2f} ms"
        figures["delay by"] = f"{self.delay_by}, {self.emulation_cpu * 100:.1f} % of a core"
        return [f"{name + ':':24}{figure}" for name, figure in figures.items()]


def _probe(wan: "Wan", site: str, *arguments: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-I", "-S", PROBE, *arguments]
    return wan.popen(site, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _line(pipe: IO[str] | None) -> str:
    line = pipe.readline().strip() if pipe else ""
    if not line:
        raise CheckFailed("an end of the self-test's connection failed", "its own message is above")
    return line


def _tell(process: subprocess.Popen[str], line: str) -> None:
    if process.stdin:
        process.stdin.write(line)
        process.stdin.flush()


def _close(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def flows(wan: "Wan", pairs: Sequence[tuple[str, str]], seconds: float = SECONDS) -> list[float]:
    """Goodput in bytes per second of one connection per (from, to), all of them at once."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for _, receiver in pairs:
            processes.append(_probe(wan, receiver, "sink", wan.address(receiver)))
        sinks = list(processes)
        for (sender, receiver), sink in zip(pairs, sinks, strict=True):
            port = _line(sink.stdout)
            processes.append(_probe(wan, sender, "source", wan.address(receiver), port))
            _line(processes[-1].stdout)
        begin = time.monotonic() + WARM_UP
        for process in processes:
            _tell(process, f"{begin} {begin + seconds}\n")
        results: list[dict[str, Any]] = [json.loads(_line(sink.stdout)) for sink in sinks]
        return [result["bytes"] / result["seconds"] if result["seconds"] else 0.0 for result in results]
    finally:
        _close(processes)


def round_trip(wan: "Wan", one: str, other: str) -> float:
    """Seconds: the median of 20 exchanges of one byte over a TCP connection on an idle link."""
    processes = [_probe(wan, other, "echo", wan.address(other))]
    try:
        port = _line(processes[0].stdout)
        processes.append(_probe(wan, one, "ping", wan.address(other), port, "20"))
        times: list[float] = json.loads(_line(processes[1].stdout))["seconds"]
        return statistics.median(times)
    finally:
        _close(processes)


def measure(wan: "Wan") -> SelfTest:
    """Measure between the last two sites and, with three or more, at the first site; 13 to 20 seconds."""
    first, *others = wan.sites
    one, other = wan.sites[-2:]
    trip = round_trip(wan, one, other)
    (one_way,) = flows(wan, [(one, other)])
    started, used = time.monotonic(), wan.emulation_cpu_seconds()
    there, back = flows(wan, [(one, other), (other, one)])
    cpu = (wan.emulation_cpu_seconds() - used) / (time.monotonic() - started)
    shared: tuple[float | None, float | None] = (None, None)
    if len(others) > 1:
        rates = flows(wan, [(site, first) for site in others] + [(first, site) for site in others])
        shared = (sum(rates[: len(others)]), sum(rates[len(others) :]))
    return SelfTest(wan.rate, wan.rtt, one_way, (there, back), *shared, trip, cpu, wan.delay_by)
