"""CPU, memory and GPU use of a host, as its agent measures it (agent/host_usage.py) and this machine checks it."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from geomx_cli.core.events import Count, Seconds, Share

__all__ = ["HostUsage"]

_Name = Annotated[str, Meta(max_length=80)]


class _Gpu(msgspec.Struct):
    """memory: bytes used and installed."""

    name: _Name = ""
    busy: Share | None = None
    memory: tuple[Count, Count] = (0, 0)


class HostUsage(msgspec.Struct):
    """time: see JobClock. machine: its boot id, by which hosts on one machine are recognised. cpu: busy
    fraction of all `cores`. memory: bytes in use, and installed; peak: the most in use since the agent began.
    """

    time: Seconds
    cpu: Share
    cores: Count
    memory: tuple[Count, Count]
    peak: Count = 0
    machine: _Name = ""
    gpus: Annotated[list[_Gpu], Meta(max_length=16)] = []

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON data."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields
