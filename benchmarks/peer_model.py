"""The payload of peers.py as a PyTorch module: the tensors of a list, with a backward pass that computes nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Parts", "Payload", "check_all", "passes"]

Parts = tuple[Callable[[], None], Callable[[int], None], Callable[[], None]]
"""The arguments of peer_measure.follow."""


class _Pass(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Passes `chain` on. The gradient of `parameter` is `value` everywhere."""

    @staticmethod
    def forward(ctx: Any, chain: Any, parameter: Any, value: float) -> Any:
        ctx.shape, ctx.value = parameter.shape, value
        return chain.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], torch.full(ctx.shape, ctx.value), None


class Payload(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Parameters of zeros of the given sizes. A backward pass of its output reaches the last one first, as in a chain
    of layers, and gives all of them the gradient `value`.
    """

    def __init__(self, sizes: Sequence[int], value: float) -> None:
        super().__init__()
        self.value = value
        self.tensors = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(size)) for size in sizes])
        self.start = torch.ones(1, requires_grad=True)

    def forward(self) -> Any:
        chain = self.start
        for parameter in self.tensors:
            chain = _Pass.apply(chain, parameter, self.value)
        return chain.sum()

    def set_gradients(self) -> None:
        """Give all parameters the gradient `value` without a backward pass."""
        for parameter in self.tensors:
            parameter.grad = torch.full_like(parameter, self.value)


def check_all(tensors: Sequence[Any], expected: float, tolerance: float = 0.0) -> None:
    """Raise an error unless all elements are `expected`."""
    for tensor in tensors:
        error = float((tensor.detach() - expected).abs().max())
        if not error <= tolerance:
            raise AssertionError(f"a wrong result: {expected:g} is off by {error:g}")


def passes(payload: Payload, model: Any, expected: float) -> Parts:
    """Backward passes of `model`, which is the payload or has it, each of which leaves the gradient `expected`."""
    loss: list[Any] = []

    def prepare() -> None:
        payload.zero_grad()
        loss.append(model())

    def backward() -> None:
        loss.pop().backward()

    def check(done: int) -> None:
        check_all([item.grad for item in payload.tensors], expected)

    return backward, check, prepare
