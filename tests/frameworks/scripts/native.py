"""What PyTorch itself brings, in the default process group: FSDP2, torch.compile, DCP, PowerSGD."""

import sys
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def steps(model: Any, optimizer: Any, count: int = 6) -> list[float]:
    """Train on this worker's part of the batches; the losses."""
    data, losses = common.points(4 * count * dist.get_world_size()), []
    for step in range(count):
        first = 4 * (step * dist.get_world_size() + dist.get_rank())
        inputs, labels = data[first : first + 4]
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def fsdp() -> dict[str, Any]:
    """FSDP2: each layer is divided over all workers."""
    model = common.mlp()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    losses = steps(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    whole = [item.full_tensor().detach().reshape(-1) for item in model.parameters()]
    return {"weights": torch.cat(whole).numpy(), "losses": np.array(losses)}


def compiled() -> dict[str, Any]:
    """torch.compile of the DistributedDataParallel around a model."""
    model = common.mlp()
    parallel = torch.compile(DistributedDataParallel(model), backend="eager")
    losses = steps(parallel, torch.optim.SGD(model.parameters(), lr=0.5))
    return {"weights": common.vector(model), "losses": np.array(losses)}


def checkpoint(folder: Path) -> dict[str, Any]:
    """DCP: FSDP2's shards are saved after some steps, loaded into a new model, and trained further."""
    kept: dict[str, Any] = {}
    for part in range(2):
        model = common.mlp()
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        names = ("model", "optimizer")
        if part:
            state = dict(zip(names, get_state_dict(model, optimizer), strict=True))
            dcp.load(state, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        losses = steps(model, optimizer, 3)
        if not part:
            dcp.save(dict(zip(names, get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
        whole = torch.cat([item.full_tensor().detach().reshape(-1) for item in model.parameters()])
        kept |= {f"weights{part}": whole.numpy(), f"losses{part}": np.array(losses)}
    return kept


def power_sgd() -> dict[str, Any]:
    """PowerSGD: a communication hook that reduces in callbacks of futures."""
    model = common.mlp()
    parallel = DistributedDataParallel(model)
    sizes = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 1}
    state = powerSGD_hook.PowerSGDState(None, **sizes)
    parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    losses = steps(parallel, torch.optim.SGD(model.parameters(), lr=0.5))
    return {"weights": common.vector(model), "losses": np.array(losses)}


def run(folder: Path, *names: str) -> dict[str, Any]:
    """Results of these parts, by PART/NAME."""
    dist.init_process_group("gloo")
    parts = {"fsdp": fsdp, "compiled": compiled, "checkpoint": lambda: checkpoint(folder), "power_sgd": power_sgd}
    found = {name: parts[name]() for name in names}
    return {f"{name}/{key}": value for name, each in found.items() for key, value in each.items()}


if __name__ == "__main__":
    common.keep(run(Path(sys.argv[1]) / "dcp", *sys.argv[2:]))
    dist.destroy_process_group()
