"""Reservation of free ports of this machine, for a job that runs on it alone."""

import random
import secrets
from collections.abc import Iterable

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.probe.ports import Reservations, free

__all__ = ["free_ports", "release"]

_HERE = "127.0.0.1"
_reserved = Reservations("chosen")  # kept, as a job binds its ports later


def free_ports(count: int) -> list[int]:
    """Return `count` TCP ports of 127.0.0.1 that are not in use.

    They are below Linux's default ephemeral range, so outgoing connections do not take them, and reserved against
    other calls of this function until `release`, or the end of this process. Another program may still take one before
    the job does; the later bind() then fails with a message. Raises InvalidSettings if there are too few.
    """
    found: list[int] = []
    owner = secrets.token_hex(8)
    candidates = range(10_000, 32_768)
    for port in random.sample(candidates, len(candidates)):
        if len(found) == count:
            return found
        if free(_HERE, [port])[0] and _reserved.hold(_HERE, port, owner):
            found.append(port)
    raise InvalidSettings(f"there are not {count} free ports on this machine", "use fewer parties or servers")


def release(ports: Iterable[int]) -> None:
    """End the reservation of these ports by `free_ports`, after their job; a no-op for others."""
    _reserved.release(ports)
