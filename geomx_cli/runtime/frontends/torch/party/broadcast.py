"""Copies bytes and tensors from one worker to all others, through the servers between parties, and within each party
by its process group.
"""

from typing import TYPE_CHECKING

import torch

from geomx_cli.runtime.frontends.torch.broadcast import Broadcast

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.runtime.frontends.torch.party.group import PartyGroup

__all__ = ["PartyBroadcast"]


class PartyBroadcast(Broadcast):
    """See Broadcast. between: that of the parties' leaders, None in other workers. origin: the source's rank in its
    party.
    """

    def __init__(self, group: "PartyGroup", between: Broadcast | None, origin: int = 0) -> None:
        self._group = group
        self._between = between
        self._own = bool(group.share(int(between is not None and between.is_source)))
        self._origin = origin if self._own else 0
        self.is_source = self._own and group.rank == self._origin

    def arrays(self, values: "dict[str, Array]") -> None:
        """See Broadcast; the source leads its party."""
        if self._between is not None:
            self._between.arrays(values)
        for value in values.values():
            if value.size:
                self._group.wait(self._group.send(torch.from_numpy(value)))

    def data(self, name: str, content: bytes) -> bytes:
        """See Broadcast."""
        if self._own and self._origin:
            content = self._group.share_bytes(content, self._origin)
        if self._between is not None:
            content = self._between.data(name, content)
        return self._group.share_bytes(content)
