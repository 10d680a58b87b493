"""Optimizers that a root server runs on slices.

An optimizer is sent as its name and a flat mapping of hyper-parameters. Names, defaults and formulas are those of
`mxnet.optimizer` 1.9.1 on dense arrays, down to the order of operations. So a script trains identically whether servers
or workers update. `adamw` and `torch-sgd` follow `torch.optim`. In the formulas w is the weight, and g is the gradient
times `rescale_grad`. lr and wd are the learning rate and weight decay times the multipliers. t counts the updates of
the slice. clip(x) limits x to ±`clip_gradient`; `None`, 0 or less means no limit.
"""

import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.option import nearest
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.optim.optimizer import (
    Call,
    Optimizer,
    add_decay,
    average,
    average_of_square,
    average_square,
    clip,
    product,
    rest,
)
from geomx_cli.ps.optim.schedules import Field, Schedule, Value, fields_of, rate_field

__all__ = ["Dcasgd", "DcasgdAdaptive", "DcasgdMxnet", "Optimizer", "SUPPORTED", "TorchSgd", "create"]

# Optimizers that compensate for delayed gradients: DC-ASGD (Zheng et al., ICML 2017, arXiv:1609.08326). A gradient
# computed at older weights b is corrected for the present ones, w, by the first term of its Taylor series, whose
# Hessian is approximated by the gradient's own square: g(w) ~ g(b) + lamda g(b)² (w - b), element by element. In the
# formulas g is already limited to ±`clip_gradient`; the other letters have the meaning above.

_EPSILON = 1e-7


class _Compensated(Optimizer):
    """The rule of the subclasses: m <- momentum m - lr (g + wd w + lamda g² d), and m is added to w.

    As for `sgd`, the slice has one m, whichever member contributes.
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

    That is the weight after the member's previous update, or a newer one that it has pulled since (see `given`). If a
    member pulled only before the slice's first update, it is the weight before that update. So a server keeps one copy
    of the weights for each member, plus one. With a single member and no codec, d is 0 and this is `sgd`. If a codec
    changes a weight on the way, b differs too.
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

    Each member has its own s, as in the authors' code. b is the same as in `dcasgd`. The defaults of lamda and decay
    are the authors' values for CIFAR-10.
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
    """MXNet's DCASGD: d is the change made by the slice's last update, whichever member contributed; 0 at the first.

    It is a poor measure of a contribution's delay. MXNet's own DCASGD raises an error for a momentum other than 0,
    because it takes the truth value of an array. Here momentum works.
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


# SGD as PyTorch computes it.


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


_Average = Callable[[Array, float, float, Array, Array], None]


class Sgd(Optimizer):
    """Stochastic gradient descent with momentum (Polyak, 1964).

    m <- momentum m - lr (clip(g) + wd w); w <- w + m. With `lazy_update` a row-sparse gradient changes only its own
    rows of w and m.
    """

    name = "sgd"
    fields = fields_of(0.01, momentum=rate_field(0.0), lazy_update=Field(True))
    occasional = ("momentum",)

    def _wanted(self) -> tuple[str, ...]:
        return ("momentum",) if self._params["momentum"] else ()

    def _step(self, call: Call, old: Array, g: Array, temp: Array, new: Array, *arrays: Array) -> None:
        decay = product(call.lr, call.wd, g)
        clip(g, call.clip)
        np.multiply(g, call.lr, out=g)
        if not arrays:
            add_decay(g, old, decay, temp)
            np.subtract(old, g, out=new)
            return
        (momentum,) = arrays
        np.multiply(momentum, self._params["momentum"], out=momentum)
        if decay:
            np.multiply(old, decay, out=temp)
            np.subtract(momentum, temp, out=momentum)
        np.subtract(momentum, g, out=momentum)
        np.add(old, momentum, out=new)

    def _step_of_rows(self, call: Call, old: Array, g: Array, temp: Array, new: Array, *arrays: Array) -> None:
        if arrays:
            self._step(call, old, g, temp, new, *arrays)
        else:
            clip(g, call.clip)
            descend(call, old, g, temp, new)


def descend(call: Call, old: Array, g: Array, temp: Array, new: Array) -> None:
    """w <- (1 - lr wd) w - lr g, as in `mxnet.nd.sgd_update`."""
    np.multiply(g, call.lr, out=g)
    np.multiply(old, rest(product(call.lr, call.wd, g), g), out=temp)
    np.subtract(temp, g, out=new)


class Nag(Optimizer):
    """Nesterov's accelerated gradient (Nesterov, 1983, as in Sutskever et al., 2013).

    h = momentum m - lr (clip(g) + wd w); w' = w - momentum m + (1 + momentum) h; m <- h; w <- w'. With weight
    decay, m is computed again from the new weight: m <- momentum m - lr (clip(g) + wd w'). MXNet's manual
    does not say so, but its operators do it, and differ from the textbook by lr wd (w' - w) in m.
    Without momentum a row-sparse gradient changes only its own rows, as MXNet's does.
    """

    name = "nag"
    fields = fields_of(0.01, momentum=rate_field(0.0))
    occasional = ("momentum",)

    def _wanted(self) -> tuple[str, ...]:
        return ("momentum",) if self._params["momentum"] else ()

    def _step(self, call: Call, old: Array, g: Array, temp: Array, new: Array, *arrays: Array) -> None:
        clip(g, call.clip)
        if not arrays:
            descend(call, old, g, temp, new)
            return
        (momentum,), rate = arrays, self._params["momentum"]
        np.multiply(momentum, rate, out=momentum)
        np.multiply(old, call.wd, out=temp)
        np.add(temp, g, out=temp)
        np.multiply(temp, call.lr, out=temp)
        np.subtract(momentum, temp, out=temp)
        np.multiply(temp, 1.0 + rate, out=temp)
        np.subtract(old, momentum, out=new)
        np.add(new, temp, out=new)
        add_decay(g, new, call.wd, temp)
        np.multiply(g, call.lr, out=g)
        np.subtract(momentum, g, out=momentum)

    @property
    def _lazy(self) -> bool:
        return not self._params["momentum"]


class Adam(Optimizer):
    """Adam (Kingma and Ba, arXiv:1412.6980), with the epsilon that its section 2 calls epsilon-hat.

    h = clip(g + wd w); m <- beta1 m + (1 - beta1) h; v <- beta2 v + (1 - beta2) h²;
    w <- w - lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + epsilon).
    With `lazy_update` a row-sparse gradient changes only its own rows of w, m and v; t counts all updates.
    """

    name = "adam"
    fields = fields_of(
        0.001,
        beta1=rate_field(0.9),
        beta2=rate_field(0.999),
        epsilon=Field(1e-8, low=0.0),
        lazy_update=Field(True),
    )
    required = ("mean", "variance")

    def _step(self, call: Call, old: Array, g: Array, temp: Array, new: Array, *arrays: Array) -> None:
        self._descend(average_square, call, old, g, temp, new, *arrays)

    def _step_of_rows(self, call: Call, old: Array, g: Array, temp: Array, new: Array, *arrays: Array) -> None:
        of_product = call.clip > 0.0 or not self._lazy
        self._descend(average_of_square if of_product else average_square, call, old, g, temp, new, *arrays)

    def _descend(
        self, average_square: _Average, call: Call, old: Array, g: Array, temp: Array, new: Array, *arrays: Array
    ) -> None:
        mean, variance = arrays
        beta1, beta2 = self._params["beta1"], self._params["beta2"]
        lr = call.lr * math.sqrt(1.0 - beta2**call.step) / (1.0 - beta1**call.step)
        add_decay(g, old, call.wd, temp)
        clip(g, call.clip)
        average(mean, beta1, rest(beta1, g), g, temp)
        average_square(variance, beta2, rest(beta2, g), g, temp)
        np.sqrt(variance, out=temp)
        np.add(temp, self._params["epsilon"], out=temp)
        np.multiply(mean, lr, out=g)
        np.divide(g, temp, out=g)
        np.subtract(old, g, out=new)


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101), as in `torch.optim.AdamW`.

    m <- beta1 m + (1 - beta1) clip(g); v <- beta2 v + (1 - beta2) clip(g)²; with c1 = 1 - beta1^t and
    c2 = 1 - beta2^t (1 without `correct_bias`), w <- (1 - lr wd) w - lr / c1 m / (sqrt(v / c2) + epsilon).
    """

    name = "adamw"
    fields = fields_of(
        0.001,
        wd=0.01,
        beta1=rate_field(0.9),
        beta2=rate_field(0.999),
        epsilon=Field(1e-8, low=0.0),
        correct_bias=Field(True),
    )
    required = ("mean", "variance")

    def _step(self, call: Call, old: Array, g: Array, temp: Array, new: Array, *arrays: Array) -> None:
        mean, variance = arrays
        beta1, beta2 = self._params["beta1"], self._params["beta2"]
        correct = self._params["correct_bias"]
        c1, c2 = (1.0 - beta1**call.step, 1.0 - beta2**call.step) if correct else (1.0, 1.0)
        clip(g, call.clip)
        average(mean, beta1, 1.0 - beta1, g, temp)
        average_square(variance, beta2, 1.0 - beta2, g, temp)
        np.sqrt(variance, out=temp)
        np.divide(temp, math.sqrt(c2), out=temp)
        np.add(temp, self._params["epsilon"], out=temp)
        np.multiply(mean, call.lr / c1, out=g)
        np.divide(g, temp, out=g)
        np.multiply(old, 1.0 - call.lr * call.wd, out=temp)
        np.subtract(temp, g, out=new)


class AdaGrad(Optimizer):
    """AdaGrad (Duchi, Hazan and Singer, JMLR 12, 2011).

    s <- s + clip(g)²; w <- w - lr (clip(g) / sqrt(s + eps) + wd w).
    A row-sparse gradient changes only its own rows of w and s. (MXNet's then refuses weight decay.)
    """

    name = "adagrad"
    fields = fields_of(0.01, eps=Field(1e-7, low=0.0))
    required = ("history",)

    @property
    def _lazy(self) -> bool:
        return True

    def _step(self, call: Call, old: Array, g: Array, temp: Array, new: Array, *arrays: Array) -> None:
        (history,) = arrays
        clip(g, call.clip)
        np.multiply(g, g, out=temp)
        np.add(history, temp, out=history)
        np.add(history, self._params["eps"], out=temp)
        np.sqrt(temp, out=temp)
        np.divide(g, temp, out=g)
        add_decay(g, old, call.wd, temp)
        np.multiply(g, call.lr, out=g)
        np.subtract(old, g, out=new)


class RmsProp(Optimizer):
    """RMSProp (Tieleman and Hinton, lecture 6.5, 2012); `centered`: the variant of Graves (arXiv:1308.0850, 38-45).

    h = clip(g + wd w); n <- gamma1 n + (1 - gamma1) h². Plain: w <- w - lr h / sqrt(n + epsilon). Centered:
    a <- gamma1 a + (1 - gamma1) h; d <- gamma2 d - lr h / sqrt(n - a² + epsilon); w <- w + d.
    `clip_weights` above 0 then limits w to ± that.
    """

    name = "rmsprop"
    fields = fields_of(
        0.001,
        gamma1=rate_field(0.9),
        gamma2=rate_field(0.9),
        epsilon=Field(1e-8, low=0.0),
        centered=Field(False),
        clip_weights=Field(0.0, optional=True),
    )
    required = ("square",)
    occasional = ("mean", "delta")

    def _wanted(self) -> tuple[str, ...]:
        return ("square", "mean", "delta") if self._params["centered"] else ("square",)

    def _step(self, call: Call, old: Array, g: Array, temp: Array, new: Array, *arrays: Array) -> None:
        square, *centre = arrays
        add_decay(g, old, call.wd, temp)
        clip(g, call.clip)
        if centre:
            self._step_centered(call, old, g, temp, new, *arrays)
        else:
            gamma1 = self._params["gamma1"]
            np.multiply(g, g, out=temp)
            average(square, gamma1, rest(gamma1, g), temp, temp)
            np.add(square, self._params["epsilon"], out=temp)
            np.sqrt(temp, out=temp)
            np.divide(g, temp, out=g)
            np.multiply(g, call.lr, out=g)
            np.subtract(old, g, out=new)
        clip(new, self._params["clip_weights"])

    def _step_centered(
        self, call: Call, old: Array, g: Array, temp: Array, new: Array, *arrays: Array
    ) -> None:
        square, mean, delta = arrays
        gamma1, gamma2 = self._params["gamma1"], self._params["gamma2"]
        average_square(square, gamma1, rest(gamma1, g), g, temp)
        average(mean, gamma1, rest(gamma1, g), g, temp)
        np.multiply(mean, mean, out=temp)
        np.subtract(square, temp, out=temp)
        # Under a constant gradient rounding can make this variance less than -epsilon, and the weight NaN.
        np.maximum(temp, 0.0, out=temp)
        np.add(temp, self._params["epsilon"], out=temp)
        np.sqrt(temp, out=temp)
        np.multiply(g, call.lr, out=g)
        np.divide(g, temp, out=g)
        np.multiply(delta, gamma2, out=delta)
        np.subtract(delta, g, out=delta)
        np.add(old, delta, out=new)


_KINDS = (Sgd, TorchSgd, Nag, Adam, AdamW, AdaGrad, RmsProp, Dcasgd, DcasgdAdaptive, DcasgdMxnet)
_CLASSES: dict[str, type[Optimizer]] = {kind.name: kind for kind in _KINDS}
SUPPORTED: tuple[str, ...] = tuple(_CLASSES)


def create(name: str, params: Mapping[str, Value | None], schedule: Schedule | None = None) -> Optimizer:
    """The optimizer called `name`; omitted hyper-parameters have MXNet's defaults (`adamw`: PyTorch's, `dcasgd-a`: its
    authors'). A `schedule` overrides the learning rate that is set (see schedules.py).

    Raises InvalidSettings for an unknown name and an unknown, badly typed, non-finite or out-of-range hyper-parameter;
    the hint lists the valid ones.
    """
    if name not in _CLASSES:
        raise InvalidSettings(f"no server optimizer is called {name!r}", nearest(name, SUPPORTED))
    return _CLASSES[name](params, schedule)
