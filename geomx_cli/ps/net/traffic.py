"""The bytes that a process's links have carried."""

from collections.abc import Iterable

from geomx_cli.core.events import Traffic
from geomx_cli.ps.net.link import Link

__all__ = ["traffic_of"]


def traffic_of(links: Iterable[Link]) -> Traffic:
    """The sums over all links."""
    peers: dict[str, tuple[int, int]] = {}
    lan = wan = (0, 0)
    for link in links:
        if link.wide_area:
            wan = (wan[0] + link.sent, wan[1] + link.received)
            sent, received = peers.get(link.name, (0, 0))
            peers[link.name] = (sent + link.sent, received + link.received)
        else:
            lan = (lan[0] + link.sent, lan[1] + link.received)
    return Traffic(lan, wan, peers)
