"""The front end for PyTorch: distributes a script's optimizer, and has models for the bundled job."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends import ScriptSession
    from geomx_cli.runtime.training.architecture import Shape
    from geomx_cli.runtime.training.model import Network

__all__ = ["attach", "network", "prepare_import"]


def network(name: str, shape: "Shape", classes: int, sizes: tuple[int, int]) -> "Network":
    """See models.network."""
    from geomx_cli.runtime.frontends.torch import models

    return models.network(name, shape, classes, sizes)


def prepare_import() -> None:
    """See ScriptFrontend.prepare_import; there is nothing to prepare."""


def attach(module: Any, session: "ScriptSession") -> None:
    """Make torch.distributed use the job's servers, and watch optimizers; see ScriptFrontend.attach."""
    if module.__name__ == "torch.optim.optimizer":
        from geomx_cli.runtime.frontends.torch.ddp import script_watch

        script_watch.watch(module, session)
        return
    from geomx_cli.runtime.frontends.torch.ddp import distributed

    if module.__name__ == "torch.distributed.checkpoint.state_dict_saver":
        distributed.register_saving(module, session)
        return
    distributed.register(module, session)
