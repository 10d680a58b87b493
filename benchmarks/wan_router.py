"""The router between the sites, and their links: rate by tc-tbf(8), delay by sch_netem or wan_delay.py."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from netns import Namespaces, call

from geomx_cli.core.errors import CheckFailed

__all__ = ["Router", "Shape"]

ROUTER = "router"
FRAME_BYTES = 1514
OFFLOAD_BYTES = 65536
BURST_SECONDS = 1e-3
BUCKET_SECONDS = 2e-3
QUEUE_SECONDS = 0.2
SOCKET_BYTES = 4 << 20
CONGESTION = "cubic"  # what nearly all machines have; some cloud images have bbr
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


class Shape(NamedTuple):
    """The shaper settings for a rate, in bytes: the largest offload frame, the token bucket, the queue.

    The bucket is what passes at once after a pause, so it is as small as possible while keeping the rate when a timer
    is late: 2 ms, and never less than two offload frames. The queue holds 200 ms, typical of a provider's router.
    """

    offload: int
    bucket: int
    queue: int

    @classmethod
    def of(cls, rate: float) -> Self:
        """From bits per second."""
        offload = min(OFFLOAD_BYTES, max(4 * FRAME_BYTES, round(rate / 8 * BURST_SECONDS)))
        bucket = max(2 * offload + FRAME_BYTES, round(rate / 8 * BUCKET_SECONDS))
        return cls(offload, bucket, bucket + max(16 * offload, round(rate / 8 * QUEUE_SECONDS)))

    def tbf(self, rate: float) -> list[str]:
        """The arguments of tc-qdisc(8)."""
        return f"tbf rate {round(rate)}bit burst {self.bucket} limit {self.queue}".split()


class Router:
    """Connects the namespaces of `sites`; `rate` in bits per second, `rtt` in seconds, either may be None. The links of
    `wide` sites have no limit.

    `delay_by` names the source of the delay: "nothing", "netem" or "wan_delay.py". Devices are removed with the
    namespaces; `stop`, which ends the forwarder, must be called before that.
    """

    def __init__(
        self, spaces: Namespaces, sites: Sequence[str], rate: float | None, rtt: float | None,
        wide: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.delay_by = "nothing"
        self._spaces = spaces
        self._sites = tuple(sites)
        self._rate = rate
        self._rtt = rtt
        self._wide = tuple(wide)
        self._forwarder: subprocess.Popen[str] | None = None

    def address(self, site: str) -> str:
        return f"10.77.0.{self._sites.index(site) + 1}"

    def build(self) -> None:
        """Create the links between the sites' namespaces. Raises CheckFailed if the kernel or a program lacks
        something.
        """
        self._spaces.add(ROUTER)
        _allow(CONGESTION)
        for site in self._sites:
            self._join(site)
            self._tune(site)
        if self._rtt and self._netem():
            self.delay_by = "netem"
        elif self._rtt:
            self._start_forwarder(self._rtt / 2)
            self.delay_by = "wan_delay.py"
        if self._forwarder is None:
            self._bridge()
        if self._rate:
            for site in self._sites:
                if site not in self._wide:
                    self._shape(site, self._rate)

    def stop(self) -> None:
        if self._forwarder:
            self._forwarder.kill()
            self._forwarder.communicate()
            self._forwarder = None

    def lose(self, site: str, percent: int, congestion: str) -> None:
        """See Wan.lose."""
        _allow(congestion)
        for each in self._sites:
            self._spaces.configure(each, ["link set eth0 gso_max_segs 1"])
            self._spaces.sysctl(each, {"net.ipv4.tcp_congestion_control": congestion})
        rules = [
            "add table netdev loss",
            f'add chain netdev loss up {{ type filter hook egress device "to{site}" priority 0; }}',
            f"add rule netdev loss up numgen random mod 100 < {percent} drop",
        ]
        call(self._spaces.command(ROUTER, ["nft", "-f", "-"]), lines=[*rules, ""])

    def cpu_seconds(self) -> float:
        """CPU time used by the forwarder so far; 0 without one."""
        if self._forwarder is None:
            return 0.0
        fields = Path(f"/proc/{self._forwarder.pid}/schedstat").read_text(encoding="ascii").split()
        return int(fields[0]) / 1e9

    def _station(self, site: str) -> str:
        return f"02:00:00:00:00:{self._sites.index(site) + 1:02x}"

    def _join(self, site: str) -> None:
        """Create the link of a site. Neighbours are static, so address resolution costs no round trip."""
        device, name = f"to{site}", self._spaces.name(site)
        offload = Shape.of(self._rate).offload if self._rate else OFFLOAD_BYTES
        self._spaces.configure(ROUTER, [f"link add {device} type veth peer name eth0 netns {name}"])
        for place, end in ((ROUTER, device), (site, "eth0")):
            self._spaces.sysctl(place, {f"net.ipv6.conf.{end}.disable_ipv6": "1"})
        self._spaces.configure(ROUTER, [f"link set {device} gso_max_size {offload} up"])
        neighbours = [
            f"neigh replace {self.address(other)} lladdr {self._station(other)} dev eth0 nud permanent"
            for other in self._sites
            if other != site
        ]
        own = f"link set eth0 address {self._station(site)} gso_max_size {offload} up"
        self._spaces.configure(site, [own, f"addr add {self.address(site)}/24 dev eth0", *neighbours])

    def _tune(self, site: str) -> None:
        """Configure this site's TCP: CONGESTION, windows that fill the link, no metrics cached between connections."""
        window = max(SOCKET_BYTES, round(4 * (self._rate or 1e9) / 8 * (self._rtt or 0.0)))
        values = {
            "net.ipv4.tcp_congestion_control": CONGESTION,
            "net.ipv4.tcp_no_metrics_save": "1",
            "net.ipv4.tcp_wmem": f"4096 16384 {window}",
            "net.ipv4.tcp_rmem": f"4096 131072 {2 * window}",
        }
        self._spaces.sysctl(site, values)

    def _bridge(self) -> None:
        lines = [
            "link add br0 type bridge mcast_snooping 0",
            *(f"link set to{site} master br0" for site in self._sites),
        ]
        self._spaces.configure(ROUTER, [*lines, "link set br0 up"])
        self._spaces.sysctl(ROUTER, {"net.ipv6.conf.br0.disable_ipv6": "1"})

    def _netem(self) -> bool:
        """Let the kernel delay what the router sends to each site; False if it cannot."""
        delay = f"netem delay {round((self._rtt or 0.0) / 2 * 1e6)}us limit 1000000".split()
        for site in self._sites:
            add = ["qdisc", "add", "dev", f"to{site}", "root", "handle", "1:", *delay]
            try:
                call(["tc", "-n", self._spaces.name(ROUTER), *add])
            except CheckFailed as error:
                if "kind is unknown" in error.message or "No such file" in error.message:
                    return False
                raise
        return True

    def _start_forwarder(self, delay: float) -> None:
        ports = [f"to{site}={self._station(site)}" for site in self._sites]
        argv = [
            sys.executable,
            "-I",
            "-S",
            str(Path(__file__).with_name("wan_delay.py")),
            f"{delay:.9f}",
            *ports,
        ]
        self._forwarder = subprocess.Popen(
            self._spaces.command(ROUTER, argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # ignore Ctrl-C: the links must outlive the processes under test
        )
        if self._forwarder.stdout is None or self._forwarder.stdout.readline().strip() != "ready":
            raise CheckFailed("the forwarder that delays frames does not start", "its own message is above")

    def _shape(self, site: str, rate: float) -> None:
        tbf = Shape.of(rate).tbf(rate)
        behind = ["parent", "1:1", "handle", "10:"] if self.delay_by == "netem" else ["root"]
        call(["tc", "-n", self._spaces.name(site), "qdisc", "add", "dev", "eth0", "root", *tbf])
        call(["tc", "-n", self._spaces.name(ROUTER), "qdisc", "add", "dev", f"to{site}", *behind, *tbf])


def _allow(congestion: str) -> None:
    """Let namespaces use a congestion control that is neither reno nor the machine's default. It stays allowed. Raises
    CheckFailed.
    """
    try:
        allowed = ALLOWED.read_text().split()
        if congestion not in allowed:
            ALLOWED.write_text(" ".join([*allowed, congestion]))
    except OSError as error:
        hint = f"modprobe tcp_{congestion}; be root, and in no container"
        raise CheckFailed(f"TCP {congestion}: {ALLOWED}: {error.strerror}", hint) from error
