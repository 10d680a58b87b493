"""Warns if workers train on the same batches, as scripts do that do not divide their data."""

from collections.abc import Callable
from concurrent.futures import Future
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from geomx_cli.core.futures import after
from geomx_cli.ps.cluster.partition import Tensor

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.frontends import ScriptSession

__all__ = ["BatchCheck", "DIGEST", "to_first_worker"]

# Brings a few bytes of each worker to that of global rank 0, beside any algorithm's rounds.


def to_first_worker(client: "Client", name: str, data: "Array") -> "Future[Array] | None":
    """Give `data` (1-D, uint8, a multiple of 4, as many in all workers), once for each name; return all workers' by
    rank in the worker of global rank 0.

    They are initial values of keys, which servers neither sum nor encode. Blocks until the servers have this worker's.
    """
    names = [f"{name}/{rank}" for rank in range(client.num_all_workers)]
    client.declare([Tensor(each, data.size // 4, "float32") for each in names])
    client.init({names[client.global_rank]: data.view(np.float32)}, source=client.global_rank)
    if client.global_rank:
        return None
    table = np.zeros((len(names), data.size), np.uint8)
    pulls = [client.pull(each, row.view(np.float32)) for each, row in zip(names, table, strict=True)]
    return after(pulls, lambda: table)


DIGEST = 16
"""Bytes that workers compare."""
_LARGEST = 1 << 20


class BatchCheck:
    """Compares digests of what workers bring to their first rounds: of gradients, or of weights after local steps.

    All start from the same weights, so equal values come from equal batches, if some are of a matrix: the gradient of a
    bias may be a constant. The opposite need not hold: dropout and different hardware make values differ.

    rounds: how many are compared. gather: takes a digest (1-D, uint8) of each worker once, and returns those of all by
    rank, of shape (workers, DIGEST); None in a worker that does not get them. advice: how to divide the data.
    """

    def __init__(
        self, session: "ScriptSession", rounds: int, advice: str, gather: "Callable[[Array], Future[Array] | None]"
    ) -> None:
        self._session = session
        self._left = rounds
        self._advice = advice
        self._gather = gather
        self._digest = blake2b(digest_size=DIGEST)
        self._counts, self._has_any = True, False

    @property
    def compares(self) -> bool:
        """Whether `observe` still has an effect."""
        return self._left > 0

    def observe(self, *values: "Array") -> None:
        """Note all that is compared of a round."""
        for each in values:
            self.note(each)
        self.end_round()

    def note(self, values: "Array") -> None:
        """Note a part of what this worker alone has computed for a round."""
        if self._left:
            self._has_any = self._has_any or bool(values.any())
            self._digest.update(values[:_LARGEST].data)

    def end_round(self) -> None:
        """All parts of a round are noted. None, or all zeros, is no evidence."""
        if not self._left:
            return
        self._left -= 1
        self._counts, self._has_any = self._counts and self._has_any, False
        if not self._left:
            self._share(self._digest.digest() if self._counts else bytes(DIGEST))

    def finish(self) -> None:
        """This worker has no further rounds: the others need not wait for its digest."""
        if self._left:
            self._left = 0
            self._share(bytes(DIGEST))

    def _share(self, digest: bytes) -> None:
        gathered = self._gather(np.frombuffer(digest, np.uint8))
        if gathered is not None:
            gathered.add_done_callback(self._compare)

    def _compare(self, gathered: "Future[Array]") -> None:
        if gathered.exception() is not None:
            return  # the job has failed, which is reported elsewhere
        ranks: dict[bytes, list[str]] = {}
        for rank, row in enumerate(gathered.result()):
            ranks.setdefault(row.tobytes(), []).append(str(rank))
        ranks.pop(bytes(DIGEST), None)
        same = max(ranks.values(), key=len, default=[])
        if len(same) > 1:
            who = " and ".join(same) if len(same) < 3 else f"{', '.join(same[:8])}{', ...' if len(same) > 8 else ''}"
            why = "what they computed in their first steps is equal bit for bit"
            message = f"workers {who} train on the same batches: {why}; {self._advice}"
            self._session.warn(message, affects_result=True)
