"""The front end for PyTorch: a script's optimizer made distributed, and models for the bundled job."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends import ScriptSession
    from geomx_cli.runtime.frontends.torch.model_watch import ModelWatch
    from geomx_cli.runtime.training.architecture import Shape
    from geomx_cli.runtime.training.model import Network

__all__ = ["attach", "framework", "network", "networks", "prepare_import"]

framework = "torch"
networks = ("cnn", "cnn-bn", "resnet18-v1", "gpt")


def network(name: str, shape: "Shape", classes: int, sizes: tuple[int, int]) -> "Network":
    """See Frontend.network. All but cnn, cnn-bn and gpt import PyTorch.

    MODULE:FUNCTION is called with the number of classes and returns a Module that maps such images to logits.
    """
    if name in ("cnn", "cnn-bn"):
        from geomx_cli.runtime.frontends.torch import cnn

        return cnn.network(shape, classes, normalised=name == "cnn-bn")
    if name == "gpt":
        from geomx_cli.runtime.frontends.torch import gpt

        return gpt.network(shape, classes, *sizes)
    from geomx_cli.runtime.frontends.torch.load import load_torch

    load_torch()
    from geomx_cli.runtime.frontends.torch import module_networks

    return module_networks.network(name, shape, classes)


def prepare_import() -> None:
    """See ScriptFrontend.prepare_import; there is nothing to prepare."""


def attach(module: Any, session: "ScriptSession") -> None:
    """Make torch.distributed use the job's servers, and watch optimizers; see ScriptFrontend.attach."""
    if module.__name__ == "torch.optim.optimizer":
        from geomx_cli.runtime.frontends.torch import step_watch

        step_watch.watch(module, session)
        module.register_optimizer_step_pre_hook(_Comparison(session).before_step)
        return
    from geomx_cli.runtime.frontends.torch import distributed

    if module.__name__ == "torch.distributed.checkpoint.state_dict_saver":
        distributed.register_saving(module, session)
        return
    distributed.register(module, session)


class _Comparison:
    """Hooks a ModelWatch, which needs PyTorch, into all optimizers of this process; this is called while PyTorch is
    being imported.
    """

    def __init__(self, session: "ScriptSession") -> None:
        self._session = session
        self._process = os.getpid()
        self._watch: ModelWatch | None = None

    def before_step(self, optimizer: Any, *_: Any) -> None:
        """Hook of all optimizers."""
        store = self._session.store
        if store is None or self._session.num_all_workers == 1 or os.getpid() != self._process:
            return
        from geomx_cli.runtime.frontends.torch.model_watch import ModelWatch, Watchable

        if isinstance(store, Watchable):
            self._watch = self._watch or ModelWatch()
            self._watch.before_step(store, optimizer)
