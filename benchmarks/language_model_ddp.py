"""The model of language_model.py with DistributedDataParallel, whose process group goes through the job's servers.

A job's script. Reports a loss for each step.
"""

import torch
import torch.distributed as dist
from language_model_data import Arguments, text
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import geomx_cli.torch as geomx
from geomx_cli.runtime.frontends.torch.models.modules import Gpt


def main() -> None:
    layers, width, context, batch, steps, rate = Arguments.given()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(Gpt(256, context, layers, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    characters = torch.frombuffer(bytearray(text("train", "")), dtype=torch.uint8).long()
    part = characters.tensor_split(dist.get_world_size())[dist.get_rank()]
    for step in range(steps):
        piece = part[step * batch * context :][: batch * context + 1]
        loss = cross_entropy(model(piece[:-1].view(batch, context)), piece[1:].view(batch, context))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        geomx.report(step=step + 1, samples=batch, loss=loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
