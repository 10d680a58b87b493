"""How all workers stop in the same round, though only global rank 0 knows the accuracy and the time."""

from typing import Any

__all__ = ["STOP", "Agreement"]

STOP = "geomx.stop"
"""Name of the key that the workers agree by: one float32, 0 at first."""


class Agreement:
    """One tiny tensor that is exchanged with every round, and so costs no round trip of its own.

    Whoever wants to stop contributes 1, the others 0, and all stop when a round's result is no longer 0,
    whatever sum, mean or optimizer has made it. `store` is an MXNet KVStore. For the training thread only.
    """

    def __init__(self, mx: Any, store: Any, priority: int) -> None:
        self._store = store
        self._priority = priority
        self._wish, self._result = mx.nd.zeros((1,)), mx.nd.zeros((1,))

    def begin(self, wish: bool) -> None:
        """Take part in the round that has begun, with a wish to stop or none; returns at once."""
        if wish:
            self._wish[:] = 1.0
        self._store.push(STOP, self._wish, priority=self._priority)
        self._store.pull(STOP, out=self._result, priority=self._priority)

    def reached(self) -> bool:
        """Wait for the round's result: whether all workers stop now."""
        return float(self._result.asnumpy()[0]) != 0.0
