"""The model of language_model.py in parties that each train as one worker: `--reduce torch` adds a party's gradients.

A job's script. Reports the global model's validation loss, and at the end of each worker the seconds of training
(`seconds`), those of forward and backward passes and of its optimizer's steps (`computing`), and those in which a
backward pass waits for the party's mean, which are not in `computing` (`waiting`).
"""

import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from language_model_data import Arguments, text
from torch.nn.functional import cross_entropy

import geomx_cli.torch as geomx
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.optim import schedules
from geomx_cli.runtime.data.samples import CHARACTERS, Batch, TextSamples, text_shard
from geomx_cli.runtime.frontends.torch.models.modules import Gpt
from geomx_cli.runtime.training.architecture import Architecture, gpt
from geomx_cli.runtime.training.train_config import cosine


class Times:
    """Seconds by what a step does. `begin` and `end` are also hooks of PyTorch."""

    def __init__(self) -> None:
        self.computing = self.waiting = 0.0
        self._begun = 0.0

    def begin(self, *_: Any) -> None:
        """Before the forward pass, and before the optimizer's step."""
        self._begun = time.perf_counter()

    def end(self, *_: Any) -> None:
        """When the last gradient is computed, and after the optimizer's step."""
        now = time.perf_counter()
        self.computing += now - self._begun
        self._begun = now

    def averaged(self) -> None:
        """After the backward pass, which has waited for the party's mean."""
        self.waiting += time.perf_counter() - self._begun


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


def loss_of(model: Gpt, images: Array, labels: Array) -> Any:
    """The mean loss of a character."""
    return cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels).long())


def main() -> None:
    layers, width, context, batch, steps, rate = Arguments.given()
    geomx.init()
    rank, seed = geomx.global_rank(), int(os.environ["GEOMX_SEED"])
    own = samples("train", context, rank, geomx.num_all_workers())
    model = initialised(gpt((1, 1, context), CHARACTERS, layers, width), layers, seed)
    loss_of(model, *own.take(slice(0, batch))).backward()  # PyTorch chooses its kernels at first use
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    optimizer.zero_grad()
    times = Times()
    # The embedding's gradient is the last to be complete: its weights also make the scores.
    next(model.parameters()).register_post_accumulate_grad_hook(times.end)
    optimizer.register_step_post_hook(times.end)  # before wrap, so that the exchange is not in it
    optimizer = geomx.wrap(model, optimizer)
    optimizer.register_step_pre_hook(times.begin)
    schedule = schedules.create(*cosine(rate, steps, steps // 20))
    begun = time.perf_counter()
    for step, taken in enumerate(itertools.islice(batches(own, batch, seed, rank), steps), 1):
        optimizer.param_groups[0]["lr"] = schedule.rate(step)
        optimizer.zero_grad()
        times.begin()
        loss = loss_of(model, *taken)
        loss.backward()
        times.averaged()
        optimizer.step()
        if step % 100 == 0:
            geomx.report(step=step, samples=100 * batch, loss=loss.item())
    geomx.finish()
    seconds = time.perf_counter() - begun
    geomx.report(seconds=seconds, computing=times.computing, waiting=times.waiting)
    if rank == 0:
        with torch.no_grad():
            held_out = samples("test", context).evaluated()
            geomx.report(validation_loss=loss_of(model, *held_out.take(slice(None))).item())


if __name__ == "__main__":
    main()
