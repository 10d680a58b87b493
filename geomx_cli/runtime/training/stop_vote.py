"""How all workers end in the same round, though each knows only its own data, and global rank 0 alone the time."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.pending_exchange import PendingExchange

__all__ = ["STOP", "StopVote", "Vote"]

STOP = "geomx.stop"
"""Name of the key that the workers agree by: one float32, 0 at first."""


@dataclass(frozen=True)
class Vote:
    """The result of a round. stop: somebody wishes to stop. unfinished: how many workers will still contribute; where
    the roots make a mean, it is only 0 if there is none.
    """

    stop: bool
    unfinished: int


class StopVote:
    """One tiny tensor that is exchanged with every round, and so costs no round trip of its own.

    Whoever wishes to stop contributes 1, who is unfinished 0, the others abstain. So the value is no longer 0 once
    somebody wishes to stop, whatever sum, mean or optimizer has made it, and the weight of the round is that of the
    unfinished. For the training thread only.
    """

    def __init__(self, client: "Client", priority: int) -> None:
        self._client = client
        self._priority = priority
        self._value = np.zeros(1, np.float32)
        self._exchange: PendingExchange | None = None

    def begin(self, *, stop: bool, unfinished: bool) -> None:
        """Take part in the round that has begun; returns at once."""
        source = np.full(1, stop, np.float32) if stop or unfinished else None
        self._exchange = self._client.exchange(STOP, source, self._value, priority=self._priority)

    def result(self) -> Vote:
        """Wait for the round's result. Raises what the client does when the job has failed."""
        assert self._exchange is not None
        self._exchange.done.result()
        return Vote(bool(self._value[0] != 0), round(self._exchange.weight))
