"""Warns if a script trains without exchanging anything: each worker would train a model of its own."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends import ScriptSession

__all__ = ["watch"]

_STEPS = 50


def watch(optimizer_module: Any, session: "ScriptSession") -> None:
    """Watch all optimizers of torch.optim in the worker's own process."""
    if os.environ.get("GEOMX_SCRIPT_PROCESS", str(os.getpid())) == str(os.getpid()):
        watcher = _StepWatch(session, os.getpid())
        optimizer_module.register_optimizer_step_post_hook(watcher.after_step)


class _StepWatch:
    """Warns once, after so many optimizer steps in a row during which no round was begun, unless steps of wrapped
    optimizers are local on purpose.
    """

    def __init__(self, session: "ScriptSession", process: int) -> None:
        self._session = session
        self._process = process
        self._rounds = 0
        self._steps = 0
        self._ended = False

    def after_step(self, *_: Any) -> None:
        """Hook of all optimizers."""
        if self._ended:
            return
        store = self._session.store
        rounds = 0 if store is None else store.calls
        self._steps = self._steps + 1 if rounds == self._rounds else 0
        self._rounds = rounds
        if self._steps < _STEPS:
            return
        self._ended = True
        if os.getpid() == self._process and self._session.num_all_workers != 1 and not _steps_locally(store):
            self._session.warn(
                f"{_STEPS} optimizer steps, and nothing was exchanged: each worker trains a model of its own;"
                " use torch.distributed.init_process_group and DistributedDataParallel, or geomx_cli.torch.wrap"
            )


def _steps_locally(store: Any) -> bool:
    return bool(getattr(store, "wraps", False))
