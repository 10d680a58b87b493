"""The model of language_model.py in parties that each train as one worker: `--reduce torch` adds a party's gradients.

Started as a job's script: LAYERS WIDTH CONTEXT BATCH STEPS LR. Reports the global model's validation loss, and at the
end of each worker the seconds of all steps (`seconds`), of forward, backward and update (`computing`), and of waiting
for the party's sum of gradients, which is not in `computing` (`reducing`).
"""

import itertools
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from language_model_data import text
from torch.nn.functional import cross_entropy

import geomx_cli.torch as geomx
from geomx_cli.ps.optim.schedules import create
from geomx_cli.runtime.frontends.torch.gpt_module import Gpt
from geomx_cli.runtime.training.architecture import Architecture
from geomx_cli.runtime.training.gpt import gpt
from geomx_cli.runtime.training.samples import Batch
from geomx_cli.runtime.training.text import CHARACTERS, TextSamples, text_shard


class Times:
    """Seconds since `begin`, by what a step does. The hooks are those of PyTorch."""

    def __init__(self) -> None:
        self.computing = self.reducing = 0.0
        self._begun = 0.0

    def begin(self, *_: Any) -> None:
        """Forward begins, or the update of weights after the sum of gradients has come."""
        self._begun = time.perf_counter()

    def end(self, *_: Any) -> None:
        """The last gradient is there, or the weights are updated."""
        now = time.perf_counter()
        self.computing += now - self._begun
        self._begun = now

    def reduced(self) -> None:
        """The backward pass has returned: `p.grad` is the party's mean."""
        self.reducing += time.perf_counter() - self._begun


def samples(split: str, context: int, rank: int = 0, workers: int = 1) -> TextSamples:
    """The windows of this worker's part of the text."""
    return text_shard(TextSamples.of(np.frombuffer(text(split, ""), np.uint8), context), rank, workers)


def batches(own: TextSamples, size: int, seed: int, rank: int) -> Iterator[Batch]:
    """Batches of one epoch after another, as in the bundled job."""
    for epoch in itertools.count():
        yield from own.batches(size, seed=seed, epoch=epoch, rank=rank)


def initialised(network: Architecture, layers: int, seed: int) -> Gpt:
    """The network with the bundled job's initial weights."""
    model = Gpt(CHARACTERS, network.shape[2], layers, network.parameters[0].shape[1])
    with torch.no_grad():
        for parameter, weights in zip(model.parameters(), network.initial_weights(seed).values(), strict=True):
            parameter.copy_(torch.from_numpy(weights))
    return model


def validation_loss(model: Gpt, held_out: TextSamples) -> float:
    """The mean loss of a character, on the windows that the bundled job evaluates."""
    images, labels = held_out.evaluated().take(slice(None))
    with torch.no_grad():
        loss = cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels).long())
    return float(loss)


def main() -> None:
    *sizes, rate = sys.argv[1:]
    layers, width, context, batch, steps = map(int, sizes)
    geomx.init()
    rank, workers, seed = geomx.global_rank(), int(os.environ["WORLD_SIZE"]), int(os.environ["GEOMX_SEED"])
    model = initialised(gpt((1, 1, context), CHARACTERS, layers, width), layers, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    times = Times()
    next(model.parameters()).register_post_accumulate_grad_hook(times.end)
    optimizer.register_step_post_hook(times.end)  # before wrap, so that the exchange is not in it
    optimizer = geomx.wrap(model, optimizer)
    optimizer.register_step_pre_hook(times.begin)
    schedule = create("cosine", {
        "base_lr": float(rate), "base_lr_orig": float(rate), "final_lr": float(rate) / 10, "warmup_constant": False,
        "warmup_begin_lr": 0.0, "warmup_final_lr": float(rate), "warmup_steps": steps // 20, "max_update": steps,
    })  # fmt: skip
    begun = time.perf_counter()
    for step, (images, labels) in enumerate(batches(samples("train", context, rank, workers), batch, seed, rank), 1):
        optimizer.param_groups[0]["lr"] = schedule.rate(step)
        optimizer.zero_grad()
        times.begin()
        loss = cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels).long())
        loss.backward()
        times.reduced()
        optimizer.step()
        if step % 100 == 0:
            geomx.report(step=step, samples=100 * batch, loss=loss.item())
        if step == steps:
            break
    seconds = time.perf_counter() - begun
    geomx.finish()
    geomx.report(seconds=seconds, computing=times.computing, reducing=times.reducing)
    if rank == 0:
        geomx.report(validation_loss=validation_loss(model, samples("test", context)))


if __name__ == "__main__":
    main()
