"""What scripts of tests share: data, models, and saving what the test compares."""

from typing import Any

import numpy as np
import torch

import geomx_cli.torch as geomx

FEATURES, CLASSES, BATCH = 12, 5, 8


def batches(rank: int, steps: int, size: int = BATCH) -> list[tuple[Any, Any]]:
    """This worker's batches: float32 features of shape (size, FEATURES), and labels."""
    random = np.random.RandomState(100 + rank)
    return [
        (
            torch.from_numpy(random.normal(size=(size, FEATURES)).astype(np.float32)),
            torch.from_numpy(random.randint(0, CLASSES, size)),
        )
        for _ in range(steps)
    ]


def linear(seed: int = 0) -> Any:
    """One dense layer; different weights for different seeds."""
    torch.manual_seed(seed)
    return torch.nn.Linear(FEATURES, CLASSES)


def divide(model: Any) -> None:
    """By fully_shard, over 2 workers of the party; with more there are copies of the shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = (torch.distributed.get_world_size() // 2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))


def save(model: Any, **values: Any) -> None:
    """Save the model's tensors and other values as RANK.npz in the working directory."""
    state = {name: tensor.detach().float().cpu().numpy() for name, tensor in model.state_dict().items()}
    np.savez(f"{geomx.global_rank()}.npz", **state, **values)
