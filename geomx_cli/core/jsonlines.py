"""A stream of bytes as lines, none of which may be so long that it fills our memory."""

from collections.abc import Callable, Iterator

from geomx_cli.core.errors import CheckFailed

__all__ = ["lines"]

_LIMIT = 16 << 20  # bytes


def lines(receive: Callable[[], bytes], what: str) -> Iterator[bytes]:
    """The whole lines that `receive` gives, without their ends, until it gives b"". A last one without an end is left
    out.

    Raises CheckFailed, which calls the sender `what`, for a line longer than 16 MiB.
    """
    rest = bytearray()
    while data := receive():
        *whole, end = data.split(b"\n")
        if whole:
            yield bytes(rest + whole[0])
            yield from whole[1:]
            rest.clear()
        rest += end
        if len(rest) > _LIMIT:
            raise CheckFailed(f"{what} sent a line of more than {_LIMIT >> 20} MiB", "see what runs there")
