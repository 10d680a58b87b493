"""Emulated wide-area links between sites on one machine, used by all sides of a comparison. Needs root.

    python benchmarks/wan.py self-test --rate 200mbit --rtt 30ms [--sites 3] [--json]
    python benchmarks/wan.py run --rate 200mbit --rtt 30ms [--sites 3] A -- COMMAND
    python benchmarks/wan.py clean

Each site is a network namespace with one link, `eth0`, to a namespace for the router:

    site C ── tbf ──┐                    ┌── tbf ── site A       tbf: the rate, at both ends of every link
                   tbf ──┬─ switch ─┬── tbf
                        tbf         └── ...                      switch: the delay
                         └── tbf ── site B

`rate` limits each site's link in each direction, counting Ethernet frames of at most 1514 bytes as
tc-tbf(8) does: up at the site's end, down at the router's. `rtt` is the round trip between any two sites
on an idle link; the router delays each direction by half of it. Without `rtt` the router is a kernel
bridge. With it, the delay is made by sch_netem if the kernel has it, else by wan_delay.py. Frames are
forwarded as segmentation-offload bursts of at most about a millisecond, so the emulation takes little CPU
time from the processes under test.

Timers are 0.1 to 0.2 ms late on each round trip through wan_delay.py, so the self-test refuses one below
about 5 ms. All sites use TCP cubic, whatever the machine's default is, unless a benchmark says otherwise;
that namespaces may use it stays allowed on the machine.
"""

import argparse
import contextlib
import json
import os
import signal
import string
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from netns import Namespaces, call, sweep
from wan_router import ROUTER, Router
from wan_selftest import SelfTest, measure

from geomx_cli.core.errors import GeomxError, Interrupted, UsageError
from geomx_cli.core.units import parse_duration, parse_rate

__all__ = ["Wan"]

HEADER_BYTES = 66
LETTERS = "CAB" + string.ascii_uppercase[3:]


def _stop(number: int, frame: FrameType | None) -> None:
    raise Interrupted(f"stopped by {signal.Signals(number).name}")


@contextlib.contextmanager
def _handling(handler: Any, *numbers: int) -> Iterator[None]:
    """Replace signal handlers within the block; no effect outside the main thread, which cannot set any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Defer SIGINT, SIGTERM and SIGHUP to the end of the block."""
    waiting: list[int] = []
    with _handling(
        lambda number, frame: waiting.append(number), signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    ):
        yield
    for number in waiting[:1]:
        signal.raise_signal(number)


class Wan:
    """A context manager that creates the sites and on exit removes them with all processes in them.

    `rate` and `rtt` are texts such as "200mbit" and "30ms", or None for no limit and no delay. `delay_by` names the
    source of the delay: "nothing", "netem" or "wan_delay.py". The links of `wide` sites have no rate limit. Also cleans
    up on exceptions, SIGINT, SIGTERM and SIGHUP (the last two become `Interrupted` in the main thread); leftovers of a
    killed run are removed when the next one starts. Raises CheckFailed if a namespace or device cannot be made, for
    lack of root or iproute2. Not thread-safe.
    """

    def __init__(
        self, sites: Sequence[str] = ("C", "A", "B"), rate: str | None = None, rtt: str | None = None,
        wide: Sequence[str] = (),
    ) -> None:  # fmt: skip
        if len(set(sites)) < max(2, len(sites)) or len(sites) > 200:
            raise UsageError(
                f"{len(sites)} sites, {len(set(sites))} of them different", "name 2 to 200, each once"
            )
        if any(
            not (site.isalnum() and site.isascii() and len(site) <= 8) or site == ROUTER for site in sites
        ):
            raise UsageError(
                f"sites {', '.join(sites)}", "use at most 8 letters and digits, and not 'router'"
            )
        self.sites = tuple(sites)
        self.rate = parse_rate(rate) if rate else None
        self.rtt = parse_duration(rtt) if rtt else None
        self._spaces = Namespaces()
        self._router = Router(self._spaces, self.sites, self.rate, self.rtt, wide)
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_handling(_stop, signal.SIGTERM, signal.SIGHUP))
            stack.callback(self._remove)
            sweep()
            for site in self.sites:
                self._spaces.add(site)
            self._router.build()
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def delay_by(self) -> str:
        return self._router.delay_by

    def address(self, site: str) -> str:
        """The IPv4 address of a site, the only one at which other sites reach it."""
        return self._router.address(site)

    def namespace(self, site: str) -> str:
        """The name of the site's network namespace, as ip-netns(8) knows it."""
        return self._spaces.name(site)

    def command(self, site: str, argv: Sequence[str]) -> list[str]:
        """`argv` with a prefix that runs it inside the site: same environment, same process id."""
        return self._spaces.command(site, argv)

    def run(self, site: str, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """subprocess.run inside the site."""
        return subprocess.run(self.command(site, argv), **options)  # noqa: PLW1510

    def popen(self, site: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """subprocess.Popen inside the site."""
        return subprocess.Popen(self.command(site, argv), **options)

    def bytes(self) -> dict[str, dict[str, int]]:
        """Bytes that each site has sent and received since the start, from its interface's counters.

        `sent` and `received` count each offload frame with one header. `sent_payload` and `received_payload` exclude
        the 66 bytes of Ethernet, IPv4 and TCP header of each frame: the TCP payload, plus the options that only some
        segments have. Retransmissions are included in all of them.
        """
        return {site: self._counters(site) for site in self.sites}

    def lose(self, site: str, percent: int, congestion: str) -> None:
        """Drop so many of 100 packets on their way to a site, by chance and whatever their protocol, and let the TCP of
        all sites use this congestion control. Packets leave their sites one by one, so that each is lost by itself.
        Raises CheckFailed if the kernel lacks nftables or the congestion control.
        """
        self._router.lose(site, percent, congestion)

    def keep_windows(self) -> None:
        """Let the TCP of all sites remember in pauses how much its connections can carry, which is not Linux's default.
        """
        for site in self.sites:
            self._spaces.sysctl(site, {"net.ipv4.tcp_slow_start_after_idle": "0"})

    def emulation_cpu_seconds(self) -> float:
        """CPU time used by the forwarder so far; 0 without one."""
        return self._router.cpu_seconds()

    def self_test(self) -> SelfTest:
        """Measure the links; call `.check()` on the result before relying on any other measurement."""
        return measure(self)

    def _counters(self, site: str) -> dict[str, int]:
        output = call(["ip", "-n", self.namespace(site), "-j", "-s", "link", "show", "eth0"])
        stats = json.loads(output)[0]["stats64"]
        result = {}
        for name, side in (("sent", stats["tx"]), ("received", stats["rx"])):
            result[name] = side["bytes"]
            result[f"{name}_payload"] = side["bytes"] - HEADER_BYTES * side["packets"]
        return result

    def _remove(self) -> None:
        with _uninterrupted():
            self._router.stop()
            self._spaces.close()


def _self_test(wan: Wan, as_json: bool) -> int:
    result = wan.self_test()
    print(result.to_json() if as_json else "\n".join(result.lines()))
    result.check()
    return 0


def _run(wan: Wan, site: str, argv: Sequence[str]) -> int:
    if site not in wan.sites or not argv:
        raise UsageError(
            "run needs a site and a command", f"sites are {', '.join(wan.sites)}; write: A -- COMMAND"
        )
    places = {f"WAN_{each}_ADDRESS": wan.address(each) for each in wan.sites}
    places |= {f"WAN_{each}_NAMESPACE": wan.namespace(each) for each in wan.sites}
    status = wan.run(site, argv, env=os.environ | places).returncode
    return status if status >= 0 else 128 - status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="wan.py", description="Emulated wide-area links on one machine; needs root."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("clean", help="remove what dead runs have left")
    links = argparse.ArgumentParser(add_help=False)
    links.add_argument(
        "--rate", help='of each site\'s link in each direction, as in "200mbit"; default: no limit'
    )
    links.add_argument("--rtt", help='round trip between any two sites, as in "30ms"; default: no delay')
    links.add_argument(
        "--sites", type=int, default=3, choices=range(2, 27), metavar="N", help="C, A, B, D, ..."
    )
    test = commands.add_parser(
        "self-test", parents=[links], help="measure; status 5 if 5 %% off what was asked for"
    )
    test.add_argument("--json", action="store_true", help="print one object")
    run = commands.add_parser(
        "run", parents=[links], help="run a command in a site; it finds WAN_<SITE>_ADDRESS and _NAMESPACE set"
    )
    run.add_argument("site")
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status, or one of geomx_cli.core.errors."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "clean":
            print("\n".join(sweep()) or "nothing to remove")
            return 0
        with Wan(LETTERS[: options.sites], options.rate, options.rtt) as wan:
            if options.command == "self-test":
                return _self_test(wan, options.json)
            return _run(
                wan, options.site, [word for word in options.argv[:1] if word != "--"] + options.argv[1:]
            )
    except GeomxError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
