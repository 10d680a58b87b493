"""A loop with Accelerate: accumulation, clipping, bfloat16, a schedule, gathered metrics. With `line` it is wrapped."""

import sys
from typing import Any

import common
import numpy as np
import torch
from accelerate import Accelerator


def train(*, line: bool, clip: float = 1.0, ends: bool = False) -> dict[str, Any]:
    """Return the weights, and the losses of all workers. ends: which also ends the process group."""
    own: dict[str, Any] = {}
    if line:
        import geomx_cli.torch as geomx

        own = {"log_with": geomx.hf.Tracker(batch=4)}
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16", cpu=True, **own)
    accelerator.init_trackers("run")
    torch.manual_seed(5)
    model = common.mlp()
    common.slow(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = torch.utils.data.DataLoader(common.points(36), batch_size=4, shuffle=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 20)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if line:
        optimizer = geomx.wrap(model, optimizer)
    losses = []
    for _ in range(2):
        for step, (inputs, labels) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            accelerator.log({"loss": losses[-1]}, step=step)
    if line:
        geomx.finish()
    if ends:
        accelerator.end_training()
    return {"weights": common.vector(model), "losses": np.array(losses)}


if __name__ == "__main__":
    common.keep(train(line="line" in sys.argv, clip=0.0 if "noclip" in sys.argv else 1.0, ends=True))
