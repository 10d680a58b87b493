"""The optimizer of the global servers, as one worker sets, changes, saves and loads it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geomx_cli.runtime import state_file, state_transfer
from geomx_cli.runtime.keys import Key, plain
from geomx_cli.runtime.pushed_hyper import Hyper, Params, PushedHyper

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["ServerOptimizer"]


class ServerOptimizer:
    """For the training thread. Methods raise what the client does when the job has failed.

    training: whether this worker has begun to push.
    """

    def __init__(self, client: "Client") -> None:
        self.training = False
        self._client = client
        self._hyper = PushedHyper()
        self._is_set = False

    def set(
        self,
        name: str,
        params: Params,
        schedule: tuple[str, Mapping[str, Any]] | None = None,
        multipliers: Mapping[str, Hyper] | None = None,
    ) -> None:
        """Have the global servers update the values with this optimizer (see ps/optim/optimizers.py); blocks.

        Set anew, it begins afresh, as MXNet's does, in each key with the next push. Rank 0 alone may set it, or every
        worker the same. schedule, multipliers: see Client.set_optimizer.
        """
        serial = self._next_serial()
        self._client.set_optimizer(name, params, schedule=schedule, multipliers=multipliers, serial=serial)
        self._hyper.begin(params, serial)
        self._is_set = True

    def leave_to_workers(self, kind: str) -> None:
        """Have the servers sum alone, as every worker that trains runs an optimizer of this class itself; blocks."""
        serial = self._next_serial()
        self._client.leave_optimizer_to_workers(kind, serial)
        self._hyper.begin({}, serial)
        self._is_set = True

    def _next_serial(self) -> int:
        """Of the first optimizer 0, which counts at once; of each later one the next: contributions name it, so it does
        not matter which worker is first to set it.
        """
        return self._hyper.serial + 1 if self.training or self._is_set or not self._client.trains else 0

    def change(self, params: Params) -> None:
        """Hyper-parameters that hold from the next push of each key on."""
        self._hyper.change(params)

    def news(self, name: str, own: Mapping[str, float] | None = None) -> Hyper:
        """See PushedHyper.news."""
        return self._hyper.news(name, own)

    def save(self, path: Path, counts: Mapping[Key, int] | None = None) -> None:
        """Write what the optimizer keeps, not the weights, to a file; blocks. `counts`: see SavedState."""
        state = state_transfer.fetch(self._client)
        state.counts = None if counts is None else {plain(key): number for key, number in counts.items()}
        state_file.write(path, state)

    def load(self, path: Path) -> state_file.SavedState:
        """Have the optimizer go on from a file; blocks. For one worker, or for all between the same rounds."""
        state = state_file.read(path)
        state_transfer.restore(self._client, state)
        if state.counts is not None:
            self.change(state.params)
        return state
