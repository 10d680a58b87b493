"""Checks of the values that workers are about to contribute: gradients of equal batches, elements that are not finite,
and weights that an optimizer keeps besides the model's weights.
"""

import types
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.futures import after
from geomx_cli.ps.cluster.partition import Tensor
from geomx_cli.runtime.frontends.torch.tensors import local
from geomx_cli.runtime.training.worker_algorithm import State

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.frontends import ScriptSession

__all__ = ["BatchCheck", "DIGEST", "FEW", "GradientCheck", "HeldWeights", "is_finite", "not_finite", "to_first_worker"]


def to_first_worker(client: "Client", name: str, data: "Array") -> "Future[Array] | None":
    """Send a few bytes of each worker to the worker of global rank 0, outside any algorithm's rounds.

    data: 1-D, uint8, with a length that is a multiple of 4 and equal in all workers. Called once for each name.
    Returns the bytes of all workers, by rank, in the worker of global rank 0.

    The bytes are initial values of keys, which servers neither sum nor encode. Blocks until the servers have this
    worker's bytes.
    """
    names = [f"{name}/{rank}" for rank in range(client.num_all_workers)]
    client.declare([Tensor(each, data.size // 4, "float32") for each in names])
    client.init({names[client.global_rank]: data.view(np.float32)}, source=client.global_rank)
    if client.global_rank:
        return None
    table = np.zeros((len(names), data.size), np.uint8)
    pulls = [client.pull(each, row.view(np.float32)) for each, row in zip(names, table, strict=True)]
    return after(pulls, lambda: table)


DIGEST = 16
"""Number of bytes that workers compare."""
_LARGEST = 1 << 20


class BatchCheck:
    """Warns if workers train on the same batches, because the script does not divide its data.

    Compares digests of the values that workers bring to their first rounds: of gradients, or of weights after local
    steps.

    All workers start from the same weights. So equal values come from equal batches if they include a matrix; the
    gradient of a bias may be a constant. The opposite need not hold, because dropout and different hardware make values
    differ.

    rounds: how many rounds are compared.
    gather: takes a digest (1-D, uint8) of each worker once, and returns the digests of all workers by rank, of shape
        (workers, DIGEST). In a worker that does not get them, it returns None.
    advice: how to divide the data.
    """

    def __init__(
        self, session: "ScriptSession", rounds: int, advice: str, gather: "Callable[[Array], Future[Array] | None]"
    ) -> None:
        self._session = session
        self._left = rounds
        self._advice = advice
        self._gather = gather
        self._digest = blake2b(digest_size=DIGEST)
        self._before = b""  # the digest of the earlier rounds
        self._counts, self._has_any = True, False

    @property
    def compares(self) -> bool:
        """Whether `observe` still has an effect."""
        return self._left > 0

    def observe(self, *values: "Array") -> None:
        """Note all compared values of a round."""
        for each in values:
            self.note(each)
        self.end_round()

    def note(self, values: "Array") -> None:
        """Note a part of the values that this worker alone has computed for a round."""
        if self._left:
            self._has_any = self._has_any or bool(values.any())
            self._digest.update(values[:_LARGEST].data)

    def end_round(self) -> None:
        """All parts of a round are noted. If there are none, or all are zeros, they are no evidence."""
        if not self._left:
            return
        self._left -= 1
        self._counts, self._has_any = self._counts and self._has_any, False
        self._begin_after(self._digest.digest())
        if not self._left:
            self._share(self._before if self._counts else bytes(DIGEST))

    def _begin_after(self, before: bytes) -> None:
        self._before, self._digest = before, blake2b(before, digest_size=DIGEST)

    def state(self) -> State:
        """Return the state between rounds."""
        return State({"left": self._left, "counts": self._counts, "before": self._before.hex()})

    def load(self, state: State) -> None:
        """Continue from a `state`."""
        self._left, self._counts = state.values["left"], state.values["counts"]
        self._begin_after(bytes.fromhex(state.values["before"]))

    def finish(self) -> None:
        """This worker has no further rounds, so the others need not wait for its digest."""
        if self._left:
            self._left = 0
            self._share(bytes(DIGEST))

    def _share(self, digest: bytes) -> None:
        gathered = self._gather(np.frombuffer(digest, np.uint8))
        if gathered is not None:
            gathered.add_done_callback(self._compare)

    def _compare(self, gathered: "Future[Array]") -> None:
        if gathered.exception() is not None:
            return  # the job has failed, which is reported elsewhere
        ranks: dict[bytes, list[str]] = {}
        for rank, row in enumerate(gathered.result()):
            ranks.setdefault(row.tobytes(), []).append(str(rank))
        ranks.pop(bytes(DIGEST), None)
        same = max(ranks.values(), key=len, default=[])
        if len(same) > 1:
            who = " and ".join(same) if len(same) < 3 else f"{', '.join(same[:8])}{', ...' if len(same) > 8 else ''}"
            why = "what they computed in their first steps is equal bit for bit"
            message = f"workers {who} train on the same batches: {why}; {self._advice}"
            self._session.warn(message, affects_result=True)


FEW = 65_536
"""The most elements of a tensor that is checked in each step."""


def is_finite(tensor: Any) -> bool:
    """Whether all elements of a detached tensor are finite."""
    # A sum takes one pass and no memory, but it may overflow although all elements are finite.
    return bool(tensor.sum().isfinite() or tensor.isfinite().all())


def not_finite(where: str, what: str) -> str:
    """The warning that elements `where` spoil `what` all workers train with."""
    return f"{where}, so {what} have them from now on; is the learning rate too high, or a sample damaged?"


class GradientCheck:
    """Warns, once, in the worker that brings nan or infinity to the weights of all workers, by its gradients or by its
    own weights. For the training thread.

    It checks the first small tensor, because a backward pass carries nan and infinity from where they begin to the
    input. If a GradScaler skips the step, the weights stay finite, and there is no warning.

    trained: if there is none yet, it checks gradients of no parameter (None), as in DistributedDataParallel's buckets.
    where: whose the gradients are.
    """

    def __init__(self, warn: Callable[[str], None], trained: Mapping[str, Any], where: str = "here") -> None:
        self._warn = warn
        self._where = where
        self._trained = trained
        self._name = next((name for name, tensor in trained.items() if local(tensor).numel() <= FEW), "")
        self._parameter = trained.get(self._name)
        self._suspected = 0  # the round in which gradients here were not finite, while the weights were
        self._received_sound = True  # whether the last means were finite: then later bad elements began here
        self._looks = True

    def contributes(self, parameter: Any, gradient: Any, round_: int) -> None:
        """The elements of a parameter's gradient, detached, before it becomes the mean."""
        if parameter is not self._parameter or not self._looks or is_finite(gradient):
            return
        if not (spoiled := self._spoiled()):
            if self._received_sound:  # otherwise they may be from an earlier pass, to which this one adds
                self._suspected = round_
        elif self._received_sound:
            self._say(f"parameter {spoiled} has elements that are not finite {self._where} in step {round_}")

    def received(self, parameter: Any, mean: Any) -> None:
        """The elements of a parameter's mean gradient, detached."""
        if parameter is self._parameter and self._looks:
            self._received_sound = is_finite(mean)

    def stepped(self) -> None:
        """The optimizer has taken the step with the means. Or GradScaler has skipped it."""
        suspected, self._suspected = self._suspected, 0
        if not suspected and self._received_sound:
            return
        if not self._spoiled():
            self._received_sound = True
        elif suspected:
            which = f"the gradient of {self._name}" if self._name else "a gradient"
            where = f"{which} has elements that are not finite {self._where}"
            self._say(f"{where} in step {suspected}")

    def begin_pass(self) -> None:
        """Another backward pass begins, before a step or after it. Until the step, its gradients add to the means."""
        if (self._suspected or not self._received_sound) and (self._spoiled() or not self._accumulates()):
            self.stepped()

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _accumulates(self) -> bool:
        """Whether means that are not finite wait for a step."""
        gradients = (tensor.grad for tensor in self._trained.values() if tensor.grad is not None)
        return not all(is_finite(local(gradient)) for gradient in gradients)

    def _say(self, where: str) -> None:
        self._looks = False
        self._warn(not_finite(where, "all workers' weights"))

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _spoiled(self) -> str:
        """The first tensor whose weights are not finite; "" for none."""
        return next((name for name, tensor in self._trained.items() if not is_finite(local(tensor))), "")


_NEAR = 0.5
"""Limit on the distance of a tensor from the weights that it follows, relative to their distance from their mean."""
_SAMPLES, _QUICK = 4, 1 << 20
"""How many parameters' states are checked, and how many elements: all of a model's parameters have equal kinds of
state.
"""
_DEPTH = 3
"""Depth of objects within an optimizer."""
_OPAQUE = (torch.nn.Module, types.ModuleType, types.FunctionType, types.MethodType, type)


class HeldWeights:
    """Refuses optimizers that keep weights in their state, because algorithms that change the model's weights would
    miss these.

    It looks for tensors besides the model that equal or follow its weights: copies of a higher precision, averages,
    slow or second weights. The optimizer would continue from these, and no worker gets them from the others.

    It recognises them by their values, in any optimizer. PyTorch's own optimizers are known to keep none, except ASGD,
    whose average is at first a copy. A tensor that never changes, such as initial weights, is the same in all workers.
    A tensor that is set to the weights before each step holds no state. For the training thread.
    """

    def __init__(self, optimizer: Any, trained: Mapping[str, Any], algorithm: str) -> None:
        self._optimizer = optimizer
        self._algorithm = algorithm
        self._steps = 0
        self._own = {id(parameter) for parameter in trained.values()}
        self._sampled = dict(sorted(trained.items(), key=_preference)[:_SAMPLES])
        self._before: dict[str, Any] = {}
        self._seen: dict[tuple[str, str], Any] = {}  # tensors that followed weights when they were checked
        known = type(optimizer).__module__.partition(".")[0] == "torch"
        if not known or isinstance(optimizer, torch.optim.ASGD):
            optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        """Optimizer hook."""
        self._steps += 1
        if self._steps & (self._steps - 1) == 0:  # at growing intervals; state may appear after some steps
            self._before = {name: _flat(parameter, copy=True) for name, parameter in self._sampled.items()}

    def check(self) -> None:
        """Check after a step. Raises InvalidSettings that names the optimizer and the tensor."""
        before, self._before = self._before, {}
        for where, tensor in self._held() if before else ():
            for name, weights in before.items():
                if self._is_held(where, name, tensor, weights):
                    kind = type(self._optimizer).__name__
                    what = f"{kind} keeps weights besides the model's, as {where} of {name}"
                    hint = "train with --algo fsa, where all workers take equal steps, or use another optimizer"
                    raise InvalidSettings(f"{what}, and --algo {self._algorithm} exchanges only the model's", hint)

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _is_held(self, where: str, name: str, tensor: Any, before: Any) -> bool:
        if tensor.is_meta or not tensor.is_floating_point() or local(tensor).numel() != before.numel():
            return False
        held, after = _flat(tensor, copy=True), _flat(self._sampled[name])
        weights = after.float()
        if (held.float() - weights).norm() >= _NEAR * (weights - weights.mean()).norm():
            return False
        earlier, self._seen[where, name] = self._seen.get((where, name)), held
        mere = after if isinstance(self._optimizer, torch.optim.ASGD) else before
        is_copy = held.dtype == mere.dtype and torch.equal(held, mere)
        return earlier is not None and not is_copy and not torch.equal(held, earlier)

    def _held(self) -> Iterator[tuple[str, Any]]:
        """The optimizer's tensors, except the model's parameters, with the names under which it keeps them."""
        seen = set(self._own)

        def walk(item: Any, where: str, depth: int) -> Iterator[tuple[str, Any]]:
            if id(item) in seen or isinstance(item, _OPAQUE):
                return
            seen.add(id(item))
            if isinstance(item, torch.Tensor):
                yield where, item
            elif isinstance(item, Mapping):
                for key, value in list(item.items()):
                    yield from walk(value, key if isinstance(key, str) else where, depth)
            elif isinstance(item, list | tuple):
                for value in item:
                    yield from walk(value, where, depth)
            elif depth:
                for key, value in list(getattr(item, "__dict__", {}).items()):
                    yield from walk(value, key, depth - 1)

        return walk(self._optimizer, "", _DEPTH)


def _preference(item: tuple[str, Any]) -> tuple[bool, bool, int]:
    """A sorting key: matrices first, then tensors that are compared quickly, the larger ones first."""
    size = local(item[1]).numel()
    return item[1].ndim < 2, size > _QUICK, -size


def _flat(tensor: Any, *, copy: bool = False) -> Any:
    return local(tensor).to("cpu", copy=copy).reshape(-1)
