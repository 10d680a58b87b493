"""A script of recovery_scripts.py: a small model in PyTorch, whose training geomx.state saves.

    MODEL EPOCHS PAUSE     cnn, lm (a language model) or gan; seconds that each step sleeps

In the end each worker writes what has to be as in a job without kills to found.json in its output folder.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import geomx_cli.torch as geomx

SAMPLES, BATCH, PRIME = 320, 8, (1 << 31) - 1
CHARACTERS, CONTEXT, WIDTH = 32, 16, 16
OPTIMIZER = "optimizer"


class Cnn:
    """A classifier of images with dropout and running statistics. The loader shuffles this worker's part."""

    def __init__(self, random: np.random.Generator) -> None:
        images = torch.from_numpy(random.normal(size=(SAMPLES, 1, 12, 12)).astype(np.float32))
        data = TensorDataset(torch.arange(SAMPLES), images, torch.from_numpy(random.integers(0, 4, SAMPLES)))
        self.loader = DataLoader(geomx.shard(data), BATCH, shuffle=True)
        net = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3), nn.Flatten(),
            nn.Linear(200, 4),
        )  # fmt: skip
        optimizer = geomx.wrap(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)
        self.objects = {"net": net, OPTIMIZER: optimizer, "schedule": schedule}

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        net, optimizer, schedule = self.objects.values()
        optimizer.zero_grad()
        functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
        schedule.step()


class LanguageModel:
    """A transformer that predicts characters, with AdamW, warm-up and clipping. geomx.sampler divides the data."""

    def __init__(self, random: np.random.Generator) -> None:
        steps, starts = random.integers(1, 4, SAMPLES), random.integers(0, CHARACTERS, SAMPLES)
        text = torch.from_numpy((steps[:, None] * np.arange(CONTEXT + 1) + starts[:, None]) % CHARACTERS)
        data = TensorDataset(torch.arange(SAMPLES), text)
        self.loader = DataLoader(data, BATCH, sampler=geomx.sampler(data))
        parts = {
            "embedding": nn.Embedding(CHARACTERS, WIDTH), "positions": nn.Embedding(CONTEXT, WIDTH),
            "block": nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.1, batch_first=True),
            "scores": nn.Linear(WIDTH, CHARACTERS),
        }  # fmt: skip
        net = nn.ModuleDict(parts)
        optimizer = geomx.wrap(net, torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=100_000)
        self.objects = {"net": net, OPTIMIZER: optimizer, "schedule": schedule}

    def step(self, text: torch.Tensor) -> None:
        net, optimizer, schedule = self.objects.values()
        optimizer.zero_grad()
        state = net["embedding"](text[:, :-1]) + net["positions"].weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        scores = net["scores"](net["block"](state, src_mask=mask, is_causal=True))
        functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()


class Gan:
    """Two models with an optimizer each. The generator draws noise in each step."""

    def __init__(self, random: np.random.Generator) -> None:
        points = torch.from_numpy(random.normal(size=(SAMPLES, 16)).astype(np.float32))
        self.loader = DataLoader(geomx.shard(TensorDataset(torch.arange(SAMPLES), points)), BATCH, shuffle=True)
        judge = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 1))
        forger = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 16))
        self._models = judge, forger
        self._optimizers = tuple(
            geomx.wrap(model, torch.optim.Adam(model.parameters(), lr=1e-3)) for model in self._models
        )
        schedule = torch.optim.lr_scheduler.StepLR(self._optimizers[0], step_size=7, gamma=0.9)
        named = {f"{OPTIMIZER}{at}": each for at, each in enumerate(self._optimizers)}
        self.objects = {"judge": judge, "forger": forger, **named, "schedule": schedule}

    def step(self, real: torch.Tensor) -> None:
        (judge, forger), (of_judge, of_forger) = self._models, self._optimizers
        forged, loss_of = forger(torch.randn(len(real), 4)), functional.binary_cross_entropy_with_logits
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        of_judge.zero_grad()
        (loss_of(judge(real), ones) + loss_of(judge(forged.detach()), zeros)).backward()
        of_judge.step()
        of_forger.zero_grad()
        judge.requires_grad_(False)  # else its gradients would be exchanged too
        loss_of(judge(forged), ones).backward()
        judge.requires_grad_(True)
        of_forger.step()
        self.objects["schedule"].step()


def digest(value: Any) -> str:
    """Of a tree of tensors, numbers and texts."""
    found = hashlib.sha256()

    def add(each: Any) -> None:
        if isinstance(each, Mapping):
            add(list(each.items()))
        elif isinstance(each, (list, tuple)):
            found.update(b"[")
            for item in each:
                add(item)
            found.update(b"]")
        else:
            found.update(each.numpy().tobytes() if isinstance(each, torch.Tensor) else repr(each).encode())

    add(value)
    return found.hexdigest()


def main() -> None:
    """Train, and write what came of it."""
    kind, epochs, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    geomx.init()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    made: Any = {"cnn": Cnn, "lm": LanguageModel, "gan": Gan}[kind](np.random.default_rng(3))
    torch.manual_seed(100 + geomx.global_rank())
    state = geomx.state(**made.objects, steps=0, samples=0)
    for _ in state.epochs(epochs):
        for indices, *batch in state.batches(made.loader):
            time.sleep(pause)
            made.step(*batch)
            state.steps += 1
            for index in indices.tolist():  # the same only for the same samples in the same order
                state.samples = (state.samples * 1_000_003 + index + 1) % PRIME
            geomx.report(samples=len(indices))
    geomx.finish()
    found = {name: digest(each.state_dict()) for name, each in made.objects.items()}
    found |= {"steps": state.steps, "samples": state.samples, "rate": made.objects["schedule"].get_last_lr()}
    Path(os.environ["GEOMX_OUTPUT_DIR"], "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
