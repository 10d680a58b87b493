"""Lets all workers end in the same round, though each knows only its own data, and only global rank 0 the time."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from concurrent.futures import Future

    from geomx_cli.ps.client import Client
    from geomx_cli.ps.operation_queue import PendingExchange

__all__ = ["ELECTION", "STOP", "StopVote", "Vote", "elect"]

STOP = "geomx.stop"
"""Name of the key for the vote: one float32, initially 0."""
ELECTION = "geomx.elect"
"""Name of the key for `elect`: one float32, initially 0. Not that of the vote, whose rounds are the training's."""
_DIGITS, _BITS = 16, 32
"""Of a number in an election: values of a digit, and binary places of a weight for the workers that have the same."""


@dataclass(frozen=True)
class Vote:
    """The result of a round.

    stop: a worker votes to stop.
    unfinished: workers that will still contribute; if the roots average, it is only sure to be 0 if there is none.
    voters: the parties that have voted, or the workers in a flat cluster.
    """

    stop: bool
    unfinished: int
    voters: tuple[int, ...] = ()


class StopVote:
    """A tiny tensor exchanged with every round, which adds no round trip.

    A worker that votes to stop contributes infinity, an unfinished one 0, the others abstain. So the value is not
    finite once a worker votes to stop, whatever sum, mean, optimizer or codec computes it, and the weight of the round
    is the number of unfinished workers. For the training thread only.
    """

    def __init__(self, client: "Client", priority: int, key: str = STOP) -> None:
        self._client = client
        self._key = key
        self._priority = priority
        self._value = np.zeros(1, np.float32)
        self._exchange: PendingExchange | None = None

    def begin(self, *, stop: bool, unfinished: bool, weight: float = 1.0) -> None:
        """Vote in the round that has begun, for `weight` workers; returns at once."""
        source = np.full(1, np.inf if stop else 0, np.float32) if stop or unfinished else None
        self._exchange = self._client.exchange(
            self._key, source, self._value, priority=self._priority, weight=weight
        )

    @property
    def pending(self) -> "Future[None]":
        """Done when `result` returns at once."""
        assert self._exchange is not None
        return self._exchange.done

    def result(self) -> Vote:
        """Wait for the round's result. Raises the client's error after the job has failed."""
        self.pending.result()
        assert self._exchange is not None
        stops = not np.isfinite(self._value[0])
        return Vote(stops, round(self._exchange.weight), self._exchange.contributors)


def elect(client: "Client", key: str, candidate: int | None, count: int) -> int | None:
    """Return the highest of the workers' candidates, each below `count`, None without any; blocks. All workers call it,
    between rounds. Raises the client's error after the job has failed.

    The weight of a round is the sum of 2^(32 digit), from which the highest digit is read.
    """
    found, unit, value = 0, 1, np.zeros(1, np.float32)
    while unit * _DIGITS < count:
        unit *= _DIGITS
    while True:
        stands = candidate is not None and candidate // (unit * _DIGITS) * unit * _DIGITS == found
        weight = 2.0 ** (_BITS * (candidate // unit % _DIGITS)) if stands and candidate is not None else 0.0
        exchange = client.exchange(key, np.zeros(1, np.float32) if weight else None, value, weight=weight or 1.0)
        exchange.done.result()
        if not exchange.weight:  # in the first round, as later ones have candidates
            return None
        found += int(math.log2(exchange.weight) // _BITS) * unit
        if unit == 1:
            return found
        unit //= _DIGITS
