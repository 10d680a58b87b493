"""Lets the job notice if workers train different models. Each sends a sketch of its model, and the servers compare
these.
"""

import math
import platform
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch

from geomx_cli.ps.cluster.bodies import MAX_COMPARED, MAX_SETTINGS
from geomx_cli.ps.model_comparison import EPOCH, HALF, LARGEST, LATE, SUMS, TRAINED
from geomx_cli.runtime.frontends.torch.tensors import local

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.cluster.bodies import Body

__all__ = ["CheckTimes", "Compared", "ModelWatch", "comparable", "compare_request", "sketch"]

_FIRST = 3
"""The number of first steps in which the models are always compared."""
_SHARE = 0.005
"""The share of a step's time that comparisons after the first ones may take on average."""
_FREE = 0.5
"""The seconds of a job that the first comparisons may take."""
_PERIOD = 30.0
"""The fewest seconds between two comparisons in a long job."""
_PROGRESS = 8
"""The fewest comparisons while the number of steps doubles, unless they were closer than the period."""
_NAME = 64 - len(LARGEST)
"""Limit on the characters of a hyper-parameter's name."""
_SCHEDULABLE = frozenset({"lr", "weight_decay", "momentum", "betas"})
"""Hyper-parameters that scripts change during training."""
_FEW = 8
"""Limit on the numbers of one hyper-parameter: betas, for example, are several."""
_OPTIMIZERS = 16
"""Limit on a script's optimizers that are watched."""
_MISSES = 100
"""After so many steps in which an optimizer trains nothing to compare, it is no longer checked."""


@dataclass(frozen=True)
class Compared:
    """The values that workers should have alike when an optimizer begins a step: tensors by name, or, if there are
    none, its hyper-parameters.

    send: takes a row of ModelComparison.
    scope: of the names.
    of: how many workers send.
    in_step: whether steps of this number follow equally many batches in all workers.
    scale: the scale with which a GradScaler has begun.
    epoch: the batches in one epoch of this worker, on which schedules depend; 0 if unknown.
    """

    send: "Callable[[Body], None]"
    scope: str
    of: int
    tensors: Mapping[str, Any]
    in_step: bool = False
    scale: float | None = None
    epoch: int = 0


class CheckTimes:
    """The steps in which the models are compared: the first ones, then multiples of a power of two.

    Each worker chooses the power by its own clock. All multiples of a higher power are multiples of a lower power too.
    So workers that choose differently still meet, without a message.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = 0.0
        self._cost = self._spent = 0.0  # seconds of a comparison, and of all so far
        self.step = 0

    def begin_step(self) -> bool:
        """Whether to compare in this step."""
        now = self._clock()
        self.step += 1
        if self.step == 1:
            self._began = now
        if self.step <= _FIRST:
            return True
        taken = max(1e-9, (now - self._began) / (self.step - 1))
        by_progress = math.floor(math.log2(max(1, self.step // _PROGRESS)))
        by_time = math.ceil(math.log2(_PERIOD / taken))
        dear = self._cost / (_SHARE * taken) if self._spent > _FREE else 1.0
        by_cost = math.ceil(math.log2(max(1.0, dear)))
        return self.step % (1 << max(0, by_cost, min(by_progress, by_time))) == 0

    def took(self, seconds: float) -> None:
        """A comparison has taken so many seconds."""
        self._cost = seconds if self.step < _FIRST else (self._cost + seconds) / 2
        self._spent += seconds

    def state(self) -> dict[str, float]:
        """Return the state between steps."""
        elapsed = self._clock() - self._began
        return {"step": self.step, "elapsed": elapsed, "cost": self._cost, "spent": self._spent}

    def load(self, state: Mapping[str, float]) -> None:
        """Continue from a `state`."""
        self.step, self._began = int(state["step"]), self._clock() - state["elapsed"]
        self._cost, self._spent = state["cost"], state["spent"]


@runtime_checkable
class Watchable(Protocol):
    """A script's store, as a ModelWatch sees it.

    passes: backward passes that have exchanged gradients; None if steps are possible only after these.
    watch: the comparison of its models.
    """

    watch: "ModelWatch"

    @property
    def passes(self) -> int | None:
        """See the class."""

    def compared(self, optimizer: Any) -> Sequence[Compared]:
        """The values that are equal in several workers when this optimizer begins a step."""


class ModelWatch:
    """Sends sketches of the tensors that optimizers are about to update. For the training thread.

    In a synchronous job, steps begin with equal models in all workers, whatever the script did to the weights since the
    last step. Steps with only a worker's own gradients are left out, such as steps of local SGD: they differ on
    purpose. For algorithms with local steps, hyper-parameters are compared, even if workers are at different steps. A
    row is compared with another worker's row of the same step number.
    """

    def __init__(self) -> None:
        self._watched: weakref.WeakKeyDictionary[Any, _Watched] = weakref.WeakKeyDictionary()
        self._misses: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._count = 0

    def before_step(self, store: Watchable, optimizer: Any) -> None:
        """The optimizer begins a step. Raises the client's error after the job has failed."""
        watched = self._watched.get(optimizer)
        if watched is None:
            misses = self._misses.get(optimizer, 0)
            if misses == _MISSES or self._count == _OPTIMIZERS:
                return
            if not store.compared(optimizer):
                self._misses[optimizer] = misses + 1
                return
            watched = self._watched[optimizer] = _Watched(self._count)
            self._count += 1
        is_together = (passes := store.passes) is None or passes > watched.passes
        watched.passes = passes or 0
        if not watched.times.begin_step():
            return
        began = time.monotonic()
        for compared in store.compared(optimizer):
            if compared.tensors and is_together:
                compared.send(watched.row(optimizer, compared))
            elif not compared.tensors:
                compared.send(watched.settings(optimizer, compared))
        watched.times.took(time.monotonic() - began)

    def state(self, optimizers: Sequence[Any]) -> list[Any]:
        """Return the state of these optimizers between steps; None for optimizers that have taken none."""
        found = [self._watched.get(each) for each in optimizers]
        return [None if each is None else each.state() for each in found]

    def load(self, state: Sequence[Any], optimizers: Sequence[Any]) -> None:
        """Continue from a `state` of equally many optimizers."""
        for optimizer, saved in zip(optimizers, state, strict=True):
            if saved is not None:
                self._watched[optimizer] = _Watched(saved["number"])
                self._watched[optimizer].load(saved)
                self._count = max(self._count, saved["number"] + 1)


class _Watched:
    """An optimizer. It knows which of its tensors were trained in its first step, the hyper-parameters in that step,
    and the largest value of hyper-parameters that have changed since.
    """

    def __init__(self, number: int) -> None:
        self.times = CheckTimes()
        self.passes = 0
        self._number = number
        self._layout = -1
        self._first: set[str] = set()
        self._original: dict[str, float] = {}
        self._largest: dict[str, float] = {}

    def state(self) -> dict[str, Any]:
        """Return the state between steps."""
        own = {"number": self._number, "passes": self.passes, "layout": self._layout, "first": sorted(self._first)}
        return {**own, "original": self._original, "largest": self._largest, "times": self.times.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state` with the same number."""
        self.passes, self._layout, self._first = state["passes"], state["layout"], set(state["first"])
        self._original, self._largest = dict(state["original"]), dict(state["largest"])
        self.times.load(state["times"])

    def settings(self, optimizer: Any, compared: Compared) -> "Body":
        """The row of an optimizer's hyper-parameters; see ControlClient.compare."""
        known = {*optimizer.defaults, "initial_lr"}  # as schedules name it; other entries are the script's own
        if any("max_momentum" in group for group in optimizer.param_groups):  # a schedule changes it in each step
            known -= {"momentum", "betas"}
        found: list[tuple[str, float]] = []
        scheduled: dict[str, float] = {EPOCH: compared.epoch}
        for key, name, number in _settings(optimizer):
            if key not in known:
                continue
            if f"initial_{key}" in optimizer.param_groups[0] or number != self._original.setdefault(name, number):
                if key not in _SCHEDULABLE or not compared.in_step:  # only the optimizer itself changes other ones
                    continue
                scheduled[LARGEST + name] = self._largest[name] = max(abs(number), self._largest.get(name, 0.0))
            found.append((name, number))
        if compared.in_step and compared.scale is not None and not optimizer.state:
            found.insert(0, ("the scale of its GradScaler", compared.scale))
        return self._row("settings", compared, [*found[: MAX_SETTINGS // 2], *scheduled.items()])

    def row(self, optimizer: Any, compared: Compared) -> "Body":
        """The row of the tensors; see ControlClient.compare."""
        names, tensors = list(compared.tensors), list(compared.tensors.values())
        layout = zlib.crc32("\n".join(names).encode())
        if self._layout == -1:
            self._first = {name for name, tensor in compared.tensors.items() if tensor.requires_grad}
        is_new, self._layout = layout != self._layout, layout
        marks = [
            TRAINED * tensor.requires_grad + LATE * (tensor.requires_grad and name not in self._first)
            + HALF * (tensor.element_size() < 4) for name, tensor in compared.tensors.items()
        ]  # fmt: skip
        names, found, sums = _merged([name[:100] for name in names], np.array(marks, np.uint8), sketch(tensors))
        own = [(name, number) for _, name, number in (*_age(optimizer), *_settings(optimizer))]
        return self._row("model", compared, own) | {
            "layout": layout, "names": names if is_new else [], "marks": found.tobytes(), "sketch": sums.tobytes(),
            "platform": _platform(tensors[0]),
        }  # fmt: skip

    def _row(self, kind: str, compared: Compared, settings: Sequence[tuple[str, float]]) -> "Body":
        scope = f"{compared.scope}{self._number}"
        return compare_request(kind, scope, self.times.step, compared.of, dict(settings[:MAX_SETTINGS]))


def compare_request(kind: str, scope: str, step: int, of: int, settings: Mapping[str, float]) -> "Body":
    """A row without tensors; see bodies._Compare."""
    return {
        "kind": kind, "scope": scope, "step": step, "of": of, "layout": 0, "names": [], "marks": b"", "sketch": b"",
        "settings": settings, "platform": "",
    }  # fmt: skip


def comparable(model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The trained tensors of a model that only optimizers change. An example of others: embeddings that a forward pass
    normalises, in each worker the rows of its own batch.
    """
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    normalised = {
        id(item.weight) for item in model.modules() if isinstance(item, kinds) and item.max_norm is not None
    }
    return {name: tensor for name, tensor in tensors.items() if id(tensor) not in normalised}


@torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
def sketch(tensors: Sequence[Any]) -> "Array":
    """Sums of parts of each tensor's elements, and the tensor's norm: of shape (tensors, SUMS + 1), float32.

    Differences between tensors are about as large in the sums as in the tensors. Only these numbers leave a GPU.
    """
    rows: list[Any] = []
    for tensor in tensors:
        flat = local(tensor).reshape(-1)
        kind = torch.float64 if flat.dtype == torch.float64 else torch.float32
        whole = flat.numel() // SUMS * SUMS
        sums = flat[:whole].view(SUMS, -1).sum(1, dtype=kind)
        rest = flat[whole:].sum(dtype=kind)
        row = torch.cat([sums, torch.linalg.vector_norm(flat, dtype=kind).reshape(1)])
        row[0] += rest
        rows.append(row.to(rows[0]) if rows else row)
    found: Array = torch.stack(rows).to("cpu", torch.float32).numpy()
    return found


def _merged(names: Sequence[str], marks: "Array", sums: "Array") -> tuple[list[str], "Array", "Array"]:
    """As many tensors as are compared. If there are more, neighbours count as one, under the name of the first."""
    every = -(-len(names) // MAX_COMPARED)
    if every == 1:
        return list(names), marks, sums
    starts = np.arange(0, len(names), every)
    norms = np.sqrt(np.add.reduceat(sums[:, SUMS:] ** 2, starts))
    merged = np.concatenate([np.add.reduceat(sums[:, :SUMS], starts), norms], axis=1)
    return list(names[::every]), np.bitwise_or.reduceat(marks, starts), merged


def _age(optimizer: Any) -> Iterator[tuple[str, str, float]]:
    """How many steps its state is old; see `_settings`."""
    state = next((item for item in optimizer.state.values() if isinstance(item, dict)), {})
    if (steps := _number(state.get("step"))) is not None:
        yield "step", "the optimizer's number of steps", steps


def _settings(optimizer: Any) -> Iterator[tuple[str, str, float]]:
    """The numbers among an optimizer's hyper-parameters: key, name and number, the learning rates first."""
    groups = optimizer.param_groups
    keys = dict.fromkeys(key for group in groups for key in group if isinstance(key, str) and key != "params")
    for key in sorted(keys, key=lambda key: key not in ("lr", "initial_lr")):
        for number, group in enumerate(groups):
            value = group.get(key)
            several = isinstance(value, tuple | list) and len(value) <= _FEW
            for index, part in enumerate(value if several else [value]):
                if (numeric := _number(part)) is not None:
                    name = f"{key}[{index}]" if several else key
                    yield key, (f"{name} of group {number}" if len(groups) > 1 else name)[-_NAME:], numeric


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_cuda:
        value = value.item()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _platform(tensor: Any) -> str:
    """The platform, which decides how an optimizer's arithmetic is rounded."""
    device = torch.cuda.get_device_name(tensor.device) if tensor.is_cuda else torch.backends.cpu.get_cpu_capability()
    return f"{torch.__version__} {platform.machine()} {device} {torch.get_num_threads()}"[:200]
