"""Direct delivery: each slice goes straight to the server that owns it, in the order of the pushes."""

from typing import TYPE_CHECKING

from geomx_cli.core.options import Option

if TYPE_CHECKING:
    from geomx_cli.ps.net.link import Link
    from geomx_cli.ps.net.wire import Header

name = "direct"
options: tuple[Option, ...] = ()


def refuses(spec: object) -> str | None:
    """Works with everything."""
    return None


class Direct:
    """Every slice over its own link; the link's window and the slice's priority do the rest."""

    def up(self, link: "Link", header: "Header", payload: memoryview | None) -> None:
        """Send a contribution."""
        link.send(header, payload)

    def down(self, link: "Link", header: "Header", payload: memoryview | None) -> None:
        """Send a result."""
        link.send(header, payload)


def worker() -> Direct:
    """The part in a worker."""
    return Direct()


def server() -> Direct:
    """The part in a server."""
    return Direct()
