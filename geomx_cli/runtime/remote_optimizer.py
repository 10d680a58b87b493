"""The global servers' optimizer, as one worker sets, changes, saves and loads it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geomx_cli.runtime import optimizer_state_file, state_transfer
from geomx_cli.runtime.keys import Key, plain
from geomx_cli.runtime.pushed_hyper import Hyper, Params, PushedHyper

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["RemoteOptimizer"]


class RemoteOptimizer:
    """For the training thread. After the job has failed, methods raise the client's error.

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

        A new optimizer starts without state, as in MXNet, with each key's next push. Set it on rank 0 alone, or the
        same one on every worker. schedule, multipliers: see ControlClient.set_optimizer.
        """
        serial = self._next_serial()
        self._client.control.set_optimizer(name, params, schedule=schedule, multipliers=multipliers, serial=serial)
        self._hyper.begin(params, serial)
        self._is_set = True

    def leave_to_workers(self, kind: str) -> None:
        """Have the servers only sum, because every training worker runs an optimizer of this class itself; blocks."""
        serial = self._next_serial()
        self._client.control.leave_optimizer_to_workers(kind, serial)
        self._hyper.begin({}, serial)
        self._is_set = True

    def _next_serial(self) -> int:
        """Return 0 for the first optimizer, which takes effect at once, and increasing numbers for later ones.
        Contributions name the serial, so it does not matter which worker sets the optimizer first.
        """
        return self._hyper.serial + 1 if self.training or self._is_set or not self._client.trains else 0

    def change(self, params: Params) -> None:
        """Set hyper-parameters that apply from each key's next push on."""
        self._hyper.change(params)

    def news(self, name: str, own: Mapping[str, float] | None = None) -> Hyper:
        """See PushedHyper.news."""
        return self._hyper.news(name, own)

    def save(self, path: Path, counts: Mapping[Key, int] | None = None) -> None:
        """Write the optimizer's state, without the weights, to a file; blocks. `counts`: see SavedState."""
        state = state_transfer.fetch(self._client)
        state.counts = None if counts is None else {plain(key): number for key, number in counts.items()}
        optimizer_state_file.write(path, state)

    def load(self, path: Path) -> optimizer_state_file.SavedState:
        """Restore the optimizer's state from a file; blocks. Call on one worker, or on all between the same rounds."""
        state = optimizer_state_file.read(path)
        state_transfer.restore(self._client, state)
        if state.counts is not None:
            self.change(state.params)
        return state
