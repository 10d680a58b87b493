"""The state that a worker's KVStore keeps between rounds, so that a script's state can save it."""

import sys
from typing import TYPE_CHECKING

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.events import WarningRaised
from geomx_cli.runtime.frontends.mxnet.arrays import Arrays, Engine
from geomx_cli.runtime.frontends.mxnet.exchanges import Exchanges
from geomx_cli.runtime.frontends.mxnet.script_optimizer import ScriptOptimizer
from geomx_cli.runtime.script.store import Store
from geomx_cli.runtime.training.worker_algorithm import State
from geomx_cli.runtime.training.worker_state import WorkerState

if TYPE_CHECKING:
    from geomx_cli.runtime.script.esync import SavedEsyncClient

__all__ = ["StoreState"]


class StoreState:
    """For the training thread. A script that has a state calls `begin` to save. Other scripts never call anything here.

    recovery: the state that an earlier life of this worker has saved.
    is_saved: whether the script has a state.
    """

    def __init__(
        self, recovery: WorkerState, store: Store, engine: Engine, arrays: Arrays, exchanges: Exchanges,
        optimizer: ScriptOptimizer,
    ) -> None:  # fmt: skip
        self.client = store.client
        self.recovery = recovery
        self._store = store
        self._engine = engine
        self._arrays = arrays
        self._exchanges = exchanges
        self._optimizer = optimizer
        self._esync: SavedEsyncClient | None = None
        self._of_esync: State | None = None  # found in a saved state, and not loaded yet
        self._unsaved: set[str] = set()  # keys with a round since the last save
        self._is_told = False
        self.is_saved = False

    @property
    def rounds(self) -> int:
        """Pushes of all keys so far."""
        return self._exchanges.rounds

    def begin(self) -> None:
        """The script saves from now on. Raises InvalidSettings before it has initialised a key, and at a second call.
        """
        if self.is_saved:
            what = "a second geomx.state or geomx.fit in one script, of which a killed worker could not tell the place"
            raise InvalidSettings(what, "call it once, with all that the script trains")
        if not self.client.tensors:
            raise InvalidSettings("geomx.state before kv.init", "initialise all keys before it")
        self.is_saved = True
        self._exchanges.before_round = self._before_round
        self._exchanges.on_older = self._warn_of_newer

    def check_rows(self) -> None:
        """Raise InvalidSettings for a script that saves and pulls single rows: an earlier life may have pulled other
        rows.
        """
        if self.is_saved:
            what = "row_sparse_pull in a script that calls geomx.state: a killed worker could not get these rows again"
            raise InvalidSettings(what, "pull whole arrays, or leave geomx.state out")

    def complete(self) -> None:
        """Wait for all operations that the script has begun. Raises their failure."""
        self._engine.wait_for_operations()
        if self._engine.error is not None:
            raise self._engine.error

    def state(self) -> State:
        """Return the values and arrays to save. Call `complete` before. The next save is due when a key has a round."""
        state = State()
        state.add("exchanges", self._exchanges.state())
        state.add("optimizer", self._optimizer.state())
        if (esync := self._esync.state() if self._esync is not None else self._of_esync) is not None:
            state.add("steps", esync)
        self._unsaved.clear()
        return state

    def load(self, state: State) -> None:
        """Continue from a `state`, when the client has its own."""
        for key, shape, dtype in self._optimizer.unknown_keys(state.part("optimizer")):
            self._store.adopt(key)
            self._arrays.add(str(key), shape, dtype)
            self._optimizer.add(key, shape, dtype, self._exchanges.fill)
        self._exchanges.go_on(state.part("exchanges"))
        self._optimizer.go_on(state.part("optimizer"))
        if "steps" in state.values:
            self._of_esync = state.part("steps")
        if self._esync is not None:
            self._load_esync(self._esync)

    def esync_client(self) -> "SavedEsyncClient":
        """Return this worker's client of ESync's state server, the same each time."""
        from geomx_cli.runtime.script.esync import SavedEsyncClient

        if self._esync is None:
            self._esync = SavedEsyncClient(self.client, self.recovery)
            self._load_esync(self._esync)
        return self._esync

    def _load_esync(self, esync: "SavedEsyncClient") -> None:
        if self._of_esync is not None:
            esync.load(self._of_esync)
            self._of_esync = None

    def _before_round(self, name: str) -> None:
        """Two rounds of a key between saves cannot be repeated, because the servers keep one result."""
        if name in self._unsaved and self.recovery.saves:
            self.recovery.give_up(
                f"this worker has pushed key {name} twice without a save between: call state.save() between two pushes"
                " of a key"
            )
        self._unsaved.add(name)

    def _warn_of_newer(self, name: str) -> None:
        if not self._is_told:
            self._is_told = True
            message = (
                f"key {name} was pulled again after this worker was killed: its value may be one round newer than"
                " without the kill; pull each key once after a push"
            )
            print(f"warning: {message}", file=sys.stderr, flush=True)
            self.client.events.write(WarningRaised(message=message, affects_result=True))
