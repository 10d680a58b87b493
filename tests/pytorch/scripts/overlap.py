"""Notes which exchanges begin before all gradients of a backward pass are computed: overlap.py cpu|cuda.

begun: whether each one did, in the order of the layers from the last on, for each of 5 steps.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import save
from torch import nn

import geomx_cli.torch as geomx
from geomx_cli.ps.client import Client

LAYERS, STEPS = 8, 5
device = sys.argv[1]
width, batch = (64, 4) if device == "cpu" else (4096, 8192)

geomx.init()
model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS))).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
images = torch.randn(batch, width, device=device)
ends: list[Any] = []


def ended(gradient: Any) -> None:
    """Hook of the tensor whose gradient is computed last."""
    event = torch.cuda.Event() if device == "cuda" else None
    if event is not None:
        event.record()
    ends.append(event)


def is_computing() -> bool:
    """Whether the last gradient is still to come, or on a GPU is being computed."""
    return not ends or (ends[-1] is not None and not ends[-1].query())


def step() -> None:
    optimizer.zero_grad()
    ends.clear()
    model(images).square().mean().backward()
    optimizer.step()


def seconds(take: Callable[[], None]) -> float:
    """The median time of a step."""
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        take()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


step()
alone = seconds(step)
exchange, begun = Client.exchange, {}


def noted(client: Client, name: str, *arguments: Any, **options: Any) -> Any:
    if name.endswith(".weight"):
        begun.setdefault(name, []).append(is_computing())
    return exchange(client, name, *arguments, **options)


Client.exchange = noted
model[0].weight.register_hook(ended)
geomx.wrap(model, optimizer)
together = seconds(step)
print(f"a step takes {1000 * together:.2f} ms with geomx, {1000 * alone:.2f} ms without", flush=True)
Client.exchange = exchange
geomx.finish()
save(nn.Module(), begun=np.array([begun[f"{layer}.weight"] for layer in reversed(range(LAYERS))]).T)
