"""One worker of delivery.py: trains a model whose layers sleep instead of computing; prints when it began and ended.

argv: FRONT_END MODEL MEGABYTES FORWARD BACKWARD WARM_UP ITERATIONS, with the passes' seconds. FRONT_END: "torch", a
script with geomx_cli.torch and SGD; "mxnet", one with MXNet's KVStore, its own or ours, which pushes each layer's
gradients after its backward pass, pulls at once, and waits for each layer before its forward pass.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from delivery_layers import MODELS


class Device:
    """Computes layers by sleeping, one after the other, as an accelerator: what the processor does between two layers
    of a backward pass delays nothing, nor does a sleep that lasts too long.
    """

    LATENESS = 0.001
    """Seconds by which a layer of a forward pass may begin late without having waited for its weights."""

    def __init__(self) -> None:
        self._free = 0.0

    def forward(self, duration: float) -> None:
        """A layer whose weights are here now."""
        self._free = max(self._free, time.monotonic() - self.LATENESS)
        self.backward(duration)

    def backward(self, duration: float) -> None:
        self._free += duration
        time.sleep(max(0.0, self._free - time.monotonic()))


def seconds(name: str, megabytes: float, forward: float, backward: float) -> list[tuple[tuple[int, ...], float, float]]:
    """The sizes of each layer's tensors, and the seconds of its passes."""
    layers = MODELS[name].scaled(megabytes).layers
    work = sum(layer.work for layer in layers)
    return [(each.sizes, forward * each.work / work, backward * each.work / work) for each in layers]


def run(step: Callable[[], None], settle: Callable[[], None], warm_up: int, iterations: int) -> None:
    for _ in range(warm_up):
        step()
    settle()
    print(json.dumps({"start": time.monotonic()}), flush=True)
    for _ in range(iterations):
        step()
    settle()
    print(json.dumps({"end": time.monotonic()}), flush=True)


def with_torch(layers: list[tuple[tuple[int, ...], float, float]], warm_up: int, iterations: int) -> None:
    import torch

    import geomx_cli.torch as geomx

    device = Device()

    class Pass(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
        @staticmethod
        def forward(ctx: Any, layer: Any, values: Any, *parameters: Any) -> Any:
            ctx.layer = layer
            device.forward(layer.before)
            return values.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            device.backward(ctx.layer.after)
            return None, gradient, *ctx.layer.gradients

    class Layer(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self, sizes: tuple[int, ...], before: float, after: float) -> None:
            super().__init__()
            self.before, self.after = before, after
            for index, size in enumerate(sizes):
                self.register_parameter(f"p{index}", torch.nn.Parameter(torch.zeros(size)))
            self.gradients = [torch.full((size,), 1e-3) for size in sizes]

        def forward(self, values: Any) -> Any:
            return Pass.apply(self, values, *self.parameters())

    torch.set_num_threads(1)
    geomx.init()
    model = torch.nn.Sequential(*(Layer(*layer) for layer in layers))
    optimizer = geomx.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    values = torch.zeros(1, requires_grad=True)

    def step() -> None:
        optimizer.zero_grad()
        model(values).sum().backward()
        optimizer.step()

    run(step, lambda: optimizer.state_dict() and None, warm_up, iterations)
    geomx.finish()
    assert all(torch.allclose(item, torch.tensor(-1e-4 * (warm_up + iterations))) for item in model.parameters())


def with_mxnet(layers: list[tuple[tuple[int, ...], float, float]], warm_up: int, iterations: int) -> None:
    if "GEOMX_JOB" not in os.environ:  # MXNet's own, which needs names that numpy has removed
        import numpy

        for kind in (bool, int, float, object, complex):
            setattr(numpy, kind.__name__, kind)
    import mxnet as mx

    device, kv = Device(), mx.kv.create("dist_sync")
    tensors: list[list[tuple[int, Any, Any]]] = []
    for sizes, _, _ in layers:
        start = sum(map(len, tensors))
        tensors.append([(start + i, mx.nd.ones((size,)), mx.nd.zeros((size,))) for i, size in enumerate(sizes)])
    for key, gradient, _ in (entry for entries in tensors for entry in entries):
        kv.init(key, gradient)

    def step() -> None:
        for entries, (_, before, _) in zip(tensors, layers, strict=True):
            for _, _, weight in entries:
                weight.wait_to_read()
            device.forward(before)
        for entries, (_, _, after) in zip(reversed(tensors), reversed(layers), strict=True):
            device.backward(after)
            for key, gradient, weight in entries:
                kv.push(key, gradient, priority=-key)
                kv.pull(key, weight, priority=-key)

    run(step, mx.nd.waitall, warm_up, iterations)


if __name__ == "__main__":
    front_end, name, *numbers = sys.argv[1:]
    megabytes, forward, backward, *counts = map(float, numbers)
    train = with_torch if front_end == "torch" else with_mxnet
    train(seconds(name, megabytes, forward, backward), *map(int, counts))
