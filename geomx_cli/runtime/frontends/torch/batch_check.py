"""Warns if workers train on the same batches, as scripts do that do not divide their data."""

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from concurrent.futures import Future

    from geomx_cli.ps.arrays import Array
    from geomx_cli.runtime.frontends import ScriptSession
    from geomx_cli.runtime.frontends.torch.group_rounds import GroupRounds

__all__ = ["BatchCheck"]

_PASSES = 3


class BatchCheck:
    """Compares digests of the gradients that workers bring to the first backward passes.

    All have the same weights then, so equal gradients come from equal batches. The opposite need not hold: dropout and
    different hardware make gradients differ.
    """

    def __init__(self, session: "ScriptSession", rounds: "GroupRounds") -> None:
        self._session = session
        self._rounds = rounds
        self._left = _PASSES if rounds.workers > 1 else 0
        self._found = 0
        self._same: set[int] | None = None  # the ranks whose digests were this worker's

    def observe(self, gradients: "Array") -> None:
        """Note the first gradients of a backward pass, of this worker alone; all workers call this."""
        if not self._left:
            return
        self._left -= 1
        sample = gradients[: 1 << 20]
        digest = blake2b(sample.data, digest_size=16).digest() if sample.any() else bytes(16)
        self._rounds.gather(np.frombuffer(digest, np.uint8), "batches").add_done_callback(self._compare)

    def _compare(self, gathered: "Future[Array]") -> None:
        if gathered.exception() is not None:
            return  # the job has failed, which is reported elsewhere
        table = gathered.result()
        own = table[self._rounds.rank]
        same = {rank for rank in range(len(table)) if own.any() and np.array_equal(table[rank], own)}
        self._same = same if self._same is None else self._same & same
        self._found += 1
        if self._found == _PASSES and len(self._same) > 1 and min(self._same) == self._rounds.rank:
            who = " and ".join(str(rank) for rank in sorted(self._same))
            self._session.warn(
                f"workers {who} train on the same batches: their first {_PASSES} gradients are equal bit for bit;"
                " divide the data with torch.utils.data.DistributedSampler, and call its set_epoch in each epoch"
            )
