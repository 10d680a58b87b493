"""SGD as PyTorch computes it."""

import numpy as np

from geomx_cli.ps.arrays import Array
from geomx_cli.ps.optim.hyper_parameters import Field, fields_of, rate_field
from geomx_cli.ps.optim.kernels import add_decay, average, clip
from geomx_cli.ps.optim.optimizer import Call, Optimizer

__all__ = ["TorchSgd"]


class TorchSgd(Optimizer):
    """SGD as `torch.optim.SGD` computes it: the momentum has no learning rate in it, so a new rate applies at once.

    h = clip(g) + wd w; m <- momentum m + (1 - dampening) h, in the first update m <- h; with `nesterov` h <- h +
    momentum m, else h <- m; w <- w - lr h. Without momentum w <- w - lr h.
    """

    name = "torch-sgd"
    fields = fields_of(0.01, momentum=rate_field(0.0), dampening=Field(0.0), nesterov=Field(False))
    occasional = ("momentum",)

    def _wanted(self) -> tuple[str, ...]:
        return ("momentum",) if self._params["momentum"] else ()

    def _step(self, call: Call, old: Array, g: Array, temp: Array, new: Array, *arrays: Array) -> None:
        clip(g, call.clip)
        add_decay(g, old, call.wd, temp)
        if arrays:
            (momentum,), rate = arrays, self._params["momentum"]
            average(momentum, rate, 1.0 if call.step == 1 else 1.0 - self._params["dampening"], g, temp)
            if self._params["nesterov"]:
                np.multiply(momentum, rate, out=temp)
                np.add(g, temp, out=g)
            else:
                np.copyto(g, momentum)
        np.multiply(g, call.lr, out=g)
        np.subtract(old, g, out=new)
