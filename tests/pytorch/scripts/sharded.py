"""Trains a model that fully_shard divides over the workers of the party: sharded.py STEPS,STEPS [WORD...], by party.

Words: resume, continues from checkpoint.pt after as many steps as party A takes, with clipped gradients; replicas, two
copies of each shard; mesh, divides otherwise than the job says; stop, worker 1 waits at the third step. Every other
step has two backward passes.
"""

import sys
import time
from pathlib import Path

import torch
from common import batches, save
from deep import Deep
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import geomx_cli.torch as geomx

counts, words = [int(count) for count in sys.argv[1].split(",")], sys.argv[2:]

geomx.init()
workers = distributed.get_world_size()
party = geomx.global_rank() // workers
model = Deep(seed=party)
shape = (2, workers // 2) if {"replicas", "mesh"} & {*words} else (workers,)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
for part in (model.first, model.last, model):
    fully_shard(part, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
if "resume" in words:
    weights, state = torch.load("checkpoint.pt", weights_only=False)
    whole = StateDictOptions(full_state_dict=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=whole)
geomx.wrap(model, optimizer)
loss_of = torch.nn.CrossEntropyLoss()
given = batches(geomx.global_rank(), 2 * counts[0])[counts[0] if "resume" in words else 0 :]
for step, (images, labels) in enumerate(given[: counts[party % len(counts)]], 1):
    if "stop" in words and step == 3:
        Path(f"ready-{geomx.global_rank()}").touch()
        time.sleep(300 if geomx.global_rank() == 1 else 0)
    optimizer.zero_grad()
    if step % 2:
        loss_of(model(images), labels).backward()
    else:
        with geomx.no_sync():
            (loss_of(model(images[:4]), labels[:4]) / 2).backward()
        (loss_of(model(images[4:]), labels[4:]) / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5 if "resume" in words else 1e9)
    optimizer.step()
geomx.finish()
weights, _ = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if distributed.get_rank() == 0:
    found = Deep()
    found.load_state_dict(weights)
    save(found)
