"""Optimizers that compensate for delayed gradients: DC-ASGD (Zheng et al., ICML 2017, arXiv:1609.08326).

A gradient computed at older weights b is corrected for the present ones, w, by the first term of its Taylor series,
whose Hessian is approximated by the gradient's own square: g(w) ~ g(b) + lamda g(b)² (w - b), element by element. In
the formulas g is already limited to ±`clip_gradient`; the other letters are those of `optimizers.py`.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from geomx_cli.ps.arrays import Array
from geomx_cli.ps.optim.optimizer import Call, Optimizer, add_decay, average_square, clip
from geomx_cli.ps.optim.schedules import Field, fields_of, rate_field

__all__ = ["Dcasgd", "DcasgdAdaptive", "DcasgdMxnet"]

_EPSILON = 1e-7


class _Compensated(Optimizer):
    """The rule shared below: m <- momentum m - lr (g + wd w + lamda g² d), and m is added to w.

    As for `sgd`, the slot has one m, whichever member contributes.
    """

    occasional = ("momentum",)

    def _wanted(self) -> tuple[str, ...]:
        return (*self.required, "momentum") if self._params["momentum"] else self.required

    def _change(self, call: Call, old: Array, g: Array, temp: Array, drift: Array, momentum: list[Array]) -> Array:
        """The change to be added to the weight. `drift` is d, and scratch afterwards."""
        np.multiply(g, self._params["lamda"], out=temp)
        np.multiply(temp, g, out=temp)
        np.multiply(temp, drift, out=temp)
        add_decay(g, old, call.wd, drift)
        np.add(g, temp, out=g)
        np.multiply(g, -call.lr, out=g)
        if not momentum:
            return g
        (sum_,) = momentum
        np.multiply(sum_, self._params["momentum"], out=sum_)
        np.add(sum_, g, out=sum_)
        return sum_


class Dcasgd(_Compensated):
    """DC-ASGD with constant lamda ("-c"): d = w - b, where b is the weight last sent to the contributing member.

    That is the weight after the member's previous update, or a newer one that it has pulled since (see `given`), and
    for a member that pulled only before the slot's first update the weight before that. So a server keeps one copy of
    the weights per member plus one. With a single member and no codec, d is 0 and this is `sgd`; a codec that loses
    something of a weight on the way also makes b differ.
    """

    name = "dcasgd"
    fields = fields_of(0.01, momentum=rate_field(0.0), lamda=Field(0.04, low=0.0))
    required = ("initial",)
    by_member: ClassVar[tuple[str, ...]] = ("backup",)
    seen = ("backup",)

    def _fresh(self, what: str, weight: Array, arrays: Mapping[str, Array]) -> Array:
        if what == "initial":
            return weight.copy()
        return arrays["initial"].copy() if what == "backup" else np.zeros_like(weight)

    def _step(self, call: Call, old: Array, g: Array, temp: Array, new: Array, *arrays: Array) -> None:
        _, *momentum, backup = arrays
        clip(g, call.clip)
        np.subtract(old, backup, out=backup)
        np.add(old, self._change(call, old, g, temp, backup, momentum), out=new)
        np.copyto(backup, new)


class DcasgdAdaptive(Dcasgd):
    """DC-ASGD with adaptive lamda ("-a"): d = (w - b) / sqrt(s + 1e-7), where s <- decay s + (1 - decay) g² first.

    Each member has its own s, as in the authors' code, and b is that of `dcasgd`. The defaults of lamda and decay are
    theirs for CIFAR-10.
    """

    name = "dcasgd-a"
    fields = fields_of(0.01, momentum=rate_field(0.0), lamda=Field(2.0, low=0.0), decay=rate_field(0.95))
    by_member = ("backup", "square")

    def _step(self, call: Call, old: Array, g: Array, temp: Array, new: Array, *arrays: Array) -> None:
        _, *momentum, backup, square = arrays
        decay = self._params["decay"]
        clip(g, call.clip)
        average_square(square, decay, 1.0 - decay, g, temp)
        np.add(square, _EPSILON, out=temp)
        np.sqrt(temp, out=temp)
        np.subtract(old, backup, out=backup)
        np.divide(backup, temp, out=backup)
        np.add(old, self._change(call, old, g, temp, backup, momentum), out=new)
        np.copyto(backup, new)


class DcasgdMxnet(_Compensated):
    """MXNet's DCASGD: d is the change made by the slot's last update, whichever member contributed; 0 at the first.

    It is a poor measure of a contribution's delay. MXNet's own raises an error for a momentum other than 0 (it takes
    the truth value of an array); here momentum works.
    """

    name = "dcasgd-mxnet"
    fields = fields_of(0.01, momentum=rate_field(0.0), lamda=Field(0.04, low=0.0))
    required = ("previous",)

    def _fresh(self, what: str, weight: Array, arrays: Mapping[str, Array]) -> Array:
        return weight.copy() if what == "previous" else np.zeros_like(weight)

    def _step(self, call: Call, old: Array, g: Array, temp: Array, new: Array, *arrays: Array) -> None:
        previous, *momentum = arrays
        clip(g, call.clip)
        np.subtract(old, previous, out=previous)
        change = self._change(call, old, g, temp, previous, momentum)
        np.copyto(previous, old)
        np.add(old, change, out=new)
