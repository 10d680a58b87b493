"""Tiny models and data, made from a configuration; what a script has trained is kept in a file of each worker."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCABULARY, LENGTH = 32, 16


def language_model(**changes: Any) -> Any:
    """A GPT-2 of 4 thousand parameters, the same in all workers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **rates, **ends, **changes}))


def texts(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Sequences in which each token tells the next one, but for some noise."""
    draw = np.random.default_rng(seed)
    steps = draw.integers(1, 4, count)[:, None] * np.arange(LENGTH) + draw.integers(0, VOCABULARY, count)[:, None]
    tokens = torch.from_numpy((steps + (draw.random((count, LENGTH)) < 0.1)) % VOCABULARY)
    return [{"input_ids": row, "labels": row} for row in tokens]


def slow(model: torch.nn.Module) -> None:
    """With the word `slow` the worker of rank 1 takes longer for each pass."""
    if "slow" in sys.argv and os.environ["RANK"] == "1":
        model.register_forward_pre_hook(lambda *_: time.sleep(0.03))


def mlp() -> torch.nn.Module:
    """The same in all workers."""
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def points(count: int) -> torch.utils.data.TensorDataset:
    """Inputs of shape (8,) and their classes, of 4."""
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, 8, generator=draw)
    return torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))


def vector(model: torch.nn.Module) -> np.ndarray[Any, Any]:
    """All parameters."""
    with torch.no_grad():
        return torch.cat([item.detach().reshape(-1).float() for item in model.parameters()]).numpy().copy()


def keep(values: dict[str, Any]) -> None:
    """Write this worker's results to FOLDER/RANK.npz; the folder is the script's first argument."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{os.environ['RANK']}.npz", **values)
