"""A PyTorch module as a model of the bundled training job, and PyTorch's part of a training session."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy as np
import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Floats
from geomx_cli.runtime.data.samples import Batch
from geomx_cli.runtime.frontends.torch.tensor_exchanges import become_late, no_longer_late, scripted
from geomx_cli.runtime.frontends.torch.tensors import read, write
from geomx_cli.runtime.training.model import ModelAdapter, Network, seed_of

if TYPE_CHECKING:
    from geomx_cli.ps.operation_queue import PendingExchange

__all__ = ["TorchModel", "running_statistics", "session"]


@contextlib.contextmanager
def session(device: str, seed: int) -> Iterator[None]:
    """See Network.session."""
    if device and not torch.cuda.is_available():
        what = f"this worker is to train on {device}, and torch {torch.__version__} finds no GPU"
        raise InvalidSettings(what, "install a build of torch for its CUDA, or see what nvidia-smi says there")
    torch.manual_seed(seed)
    with torch.device("cuda:0" if device else "cpu"):  # the default device of this thread
        yield


def running_statistics(module: Any) -> dict[str, Any]:
    """Return the running means and variances of a module's batch normalization, by name."""
    return {name: tensor for name, tensor in module.named_buffers() if name.endswith(("running_mean", "running_var"))}


class TorchModel(ModelAdapter):
    """A module on the session's device, with parameters and statistics in the order of the network.

    All weights are parts of one vector, and all gradients of another, so each is copied in one piece. A parameter that
    is written late waits for its weights when it is used.
    """

    def __init__(self, network: Network, module: Any) -> None:
        super().__init__(network)
        self._module = module
        self._weights, self._gradient = torch.zeros(self.size), torch.zeros(self.size)
        self._device = self._weights.device
        self._parameters = list(module.parameters())
        self._late: dict[int, PendingExchange] = {}
        self._scripted = scripted(module)
        parts = zip(self._weights.split(self.sizes), self._gradient.split(self.sizes), strict=True)
        for parameter, (weights, gradient) in zip(self._parameters, parts, strict=True):
            parameter.data, parameter.grad = weights.view(parameter.shape), gradient.view(parameter.shape)
        names = [item.name for item in network.statistics]
        self._statistics = dict(zip(names, running_statistics(module).values(), strict=True))

    def warm_up(self, samples: int) -> None:
        """Run both passes once on a batch of zeros: PyTorch chooses its kernels at first use."""
        before = self.read_statistics()
        scores = self._module(torch.zeros(samples, *self.network.shape, device=self._device))
        labels = torch.zeros(samples, *scores.shape[2:], dtype=torch.long, device=self._device)
        torch.nn.functional.cross_entropy(scores, labels).backward()
        self.write_statistics(before)

    def reseed(self, numbers: Sequence[int]) -> None:
        """See ModelAdapter."""
        torch.manual_seed(seed_of(numbers))

    def forward_backward(self, batch: Batch, scale: float) -> SupportsFloat:
        """See ModelAdapter."""
        images, labels = self._tensors(batch)
        self._gradient.zero_()
        loss = torch.nn.functional.cross_entropy(self._module(images), labels)
        self._arrive()
        (loss * scale).backward()
        found: SupportsFloat = loss.detach()
        return found

    def _tensors(self, batch: Batch) -> tuple[Any, Any]:
        images, labels = (torch.from_numpy(array).to(self._device) for array in batch)
        return images, labels.long()

    def wait_for_gradients(self) -> None:
        """See ModelAdapter."""
        if self._gradient.is_cuda:
            torch.cuda.synchronize()

    def read_gradient(self, index: int, out: Floats) -> None:
        """See ModelAdapter."""
        start = sum(self.sizes[:index])
        read(self._gradient[start : start + self.sizes[index]], out)

    def read_weights(self, out: Floats) -> None:
        """See ModelAdapter."""
        self._arrive()
        read(self._weights, out)

    def write_weights(self, vector: Floats) -> None:
        """See ModelAdapter."""
        self._arrive()
        write(self._weights, vector)

    def write_weight(self, index: int, value: Floats) -> None:
        """See ModelAdapter."""
        start = sum(self.sizes[:index])
        write(self._weights[start : start + self.sizes[index]], value)

    def write_late(self, index: int, result: "PendingExchange") -> None:
        """See ModelWeights."""
        self._late[index], parameter = result, self._parameters[index]
        must_wait = result.done.done() or id(parameter) in self._scripted
        if must_wait or not become_late(parameter, partial(self._receive, index)):
            self._receive(index)

    def _receive(self, index: int) -> None:
        result = self._late[index]
        result.done.result()
        no_longer_late(self._parameters[index])
        super().write_late(index, self._late.pop(index))

    def _arrive(self) -> None:
        for index in list(self._late):
            self._receive(index)

    def read_statistics(self) -> dict[str, Floats]:
        """See ModelAdapter."""
        found = {name: np.empty(tuple(tensor.shape), np.float32) for name, tensor in self._statistics.items()}
        for name, array in found.items():
            read(self._statistics[name], array.reshape(-1))
        return found

    def write_statistics(self, values: Mapping[str, Floats]) -> None:
        """See ModelAdapter."""
        for name, value in values.items():
            write(self._statistics[name], np.ascontiguousarray(value).reshape(-1))

    def count_correct(self, batch: Batch) -> int:
        """See ModelAdapter."""
        scores, labels = self._evaluate(batch)
        return int((scores.argmax(dim=1) == labels).sum())

    def mean_loss(self, batch: Batch) -> float:
        """See ModelAdapter."""
        return float(torch.nn.functional.cross_entropy(*self._evaluate(batch)))

    def _evaluate(self, batch: Batch) -> tuple[Any, Any]:
        images, labels = self._tensors(batch)
        self._module.eval()
        with torch.no_grad():
            scores = self._module(images)
        self._module.train()
        return scores, labels
