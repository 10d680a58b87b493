"""The networks of the bundled job. The parameters of cnn, cnn-bn and gpt are known without PyTorch, because a master
worker that does not train need not have it.
"""

from functools import partial
from typing import TYPE_CHECKING

from geomx_cli.runtime.frontends.torch.load import load_torch
from geomx_cli.runtime.training.architecture import Shape, cnn, gpt
from geomx_cli.runtime.training.model import Network

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from geomx_cli.runtime.frontends.torch.models.torch_model import TorchModel

__all__ = ["network"]


def network(name: str, shape: Shape, classes: int, sizes: tuple[int, int]) -> Network:
    """See Frontend.network. All but cnn, cnn-bn and gpt import PyTorch.

    MODULE:FUNCTION is called with the number of classes. It returns a Module that maps images of this shape to logits.
    """
    if name == "gpt":
        found = gpt(shape, classes, *sizes)
    elif name in ("cnn", "cnn-bn"):
        found = cnn(shape, classes, normalised=name == "cnn-bn")
    else:
        load_torch()
        from geomx_cli.runtime.frontends.torch.models import modules

        return modules.network(name, shape, classes)
    build = partial(_build, name)
    return Network(shape, classes, found.parameters, found.statistics, found.resized, build, _session)


def _session(device: str, seed: int) -> "AbstractContextManager[None]":
    load_torch()
    from geomx_cli.runtime.frontends.torch.models import torch_model

    return torch_model.session(device, seed)


def _build(name: str, network: Network) -> "TorchModel":
    load_torch()
    from geomx_cli.runtime.frontends.torch.models import modules
    from geomx_cli.runtime.frontends.torch.models.torch_model import TorchModel

    return TorchModel(network, modules.gpt(network) if name == "gpt" else modules.cnn(network))
