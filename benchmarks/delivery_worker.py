"""One worker of delivery.py: trains a model whose layers sleep instead of computing; prints when steps ended.

argv: FRONT_END MODEL MEGABYTES WARM_UP ITERATIONS FORWARD:BACKWARD ..., with the passes' seconds; for each such pair it
prints when (time.monotonic) the last step of the warm-up and the last iteration ended. FRONT_END: "torch", a script
with geomx_cli.torch and SGD; "mxnet", one with MXNet's KVStore, its own or ours, which pushes each layer's gradients
after its backward pass, pulls at once, and waits for each layer before its forward pass.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
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


class Layers:
    """sizes: of each layer's tensors. The seconds of a layer's passes follow from those of the model's."""

    def __init__(self, name: str, megabytes: float) -> None:
        layers = MODELS[name].scaled(megabytes).layers
        work = sum(layer.work for layer in layers)
        self.sizes = [layer.sizes for layer in layers]
        self._shares = [layer.work / work for layer in layers]
        self._forward = self._backward = 0.0

    def set(self, forward: float, backward: float) -> None:
        """Of the whole model, from the next step on."""
        self._forward, self._backward = forward, backward

    def forward(self, index: int) -> float:
        return self._forward * self._shares[index]

    def backward(self, index: int) -> float:
        return self._backward * self._shares[index]


@dataclass(frozen=True)
class Run:
    """The passes' seconds to measure one after the other, each with so many steps."""

    passes: list[tuple[float, float]]
    warm_up: int
    iterations: int

    @property
    def steps(self) -> int:
        return len(self.passes) * (self.warm_up + self.iterations)

    def measure(self, layers: Layers, step: Callable[[], None], wait: Callable[[], None]) -> None:
        """The end of a step is that of its backward pass: what is left of its exchange is part of the next step."""
        for forward, backward in self.passes:
            layers.set(forward, backward)
            for _ in range(self.warm_up):
                step()
            start = time.monotonic()
            for _ in range(self.iterations):
                step()
            print(json.dumps({"start": start, "end": time.monotonic()}), flush=True)
            wait()


def with_torch(layers: Layers, run: Run) -> None:
    import torch

    import geomx_cli.torch as geomx

    device = Device()

    class Pass(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
        @staticmethod
        def forward(ctx: Any, layer: Any, values: Any, *parameters: Any) -> Any:
            ctx.layer = layer
            device.forward(layers.forward(layer.index))
            return values.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            device.backward(layers.backward(ctx.layer.index))
            return None, gradient, *ctx.layer.gradients

    class Layer(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self, index: int, sizes: tuple[int, ...]) -> None:
            super().__init__()
            self.index = index
            for number, size in enumerate(sizes):
                self.register_parameter(f"p{number}", torch.nn.Parameter(torch.zeros(size)))
            self.gradients = [torch.full((size,), 1e-3) for size in sizes]

        def forward(self, values: Any) -> Any:
            return Pass.apply(self, values, *self.parameters())

    torch.set_num_threads(1)
    geomx.init()
    model = torch.nn.Sequential(*(Layer(index, sizes) for index, sizes in enumerate(layers.sizes)))
    optimizer = geomx.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    values = torch.zeros(1, requires_grad=True)

    def step() -> None:
        optimizer.zero_grad()
        model(values).sum().backward()
        optimizer.step()

    run.measure(layers, step, lambda: optimizer.state_dict() and None)
    geomx.finish()
    assert all(torch.allclose(item, torch.tensor(-1e-4 * run.steps)) for item in model.parameters())


def with_mxnet(layers: Layers, run: Run) -> None:
    if "GEOMX_JOB" not in os.environ:  # MXNet's own, which needs names that numpy has removed
        import numpy

        for kind in (bool, int, float, object, complex):
            setattr(numpy, kind.__name__, kind)
    import mxnet as mx

    device, kv = Device(), mx.kv.create("dist_sync")
    tensors: list[list[tuple[int, Any, Any]]] = []
    for sizes in layers.sizes:
        start = sum(map(len, tensors))
        tensors.append([(start + i, mx.nd.ones((size,)), mx.nd.zeros((size,))) for i, size in enumerate(sizes)])
    for key, gradient, _ in (entry for entries in tensors for entry in entries):
        kv.init(key, gradient)

    def step() -> None:
        for index, entries in enumerate(tensors):
            for _, _, weight in entries:
                weight.wait_to_read()
            device.forward(layers.forward(index))
        for index, entries in reversed(list(enumerate(tensors))):
            device.backward(layers.backward(index))
            for key, gradient, weight in entries:
                kv.push(key, gradient, priority=-key)
                kv.pull(key, weight, priority=-key)

    run.measure(layers, step, mx.nd.waitall)


if __name__ == "__main__":
    front_end, name, megabytes, warm_up, iterations, *pairs = sys.argv[1:]
    times = [(float(forward), float(backward)) for forward, backward in (pair.split(":") for pair in pairs)]
    train = with_torch if front_end == "torch" else with_mxnet
    train(Layers(name, float(megabytes)), Run(times, int(warm_up), int(iterations)))
