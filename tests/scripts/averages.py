"""A worker without MXNet that takes its own steps, exchanges weights or differences, and saves every result.

Environment: OUT (a .npz file; {rank} is the global rank): for each tensor its results by round, and `versions`, the
lowest and highest of each round; ROUNDS ("3,5": by rank in the party); STEPS (between two rounds); PUSH ("weights",
divided by kv.num_workers as a script for HFA does, "differences", or "ranks": 1 + its global rank); WEIGHTS ("1,3": by
global rank, the contributions' weights); OPTIMIZER (JSON: for the roots); SIZES, DTYPE; OPENS ("3=GATE": create the
file GATE when its third round has begun), WAITS (for this file, before its first round), MEET (all, before the rounds);
GATES and SEGMENT (as in rounds.py).
"""

import json
import os
import time
from pathlib import Path

import numpy as np

from geomx_cli.contract.settings import Settings
from geomx_cli.core import deliveries, plugins
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.client import Client
from geomx_cli.ps.cluster.partition import Tensor


def own_steps(weight, rank, number, index):
    """Steps towards a target that depends on the worker and round."""
    goal = np.random.default_rng([rank, number, index]).standard_normal(weight.size).astype(weight.dtype)
    for _ in range(int(os.environ.get("STEPS", "2"))):
        weight = weight - weight.dtype.type(0.25) * (weight - goal)
    return weight


def contribution(client, weight, number, index, counted):
    if os.environ["PUSH"] == "ranks":
        return np.full_like(weight, 1 + client.global_rank)
    own = own_steps(weight, client.global_rank, number, index)
    if os.environ["PUSH"] == "weights":
        return own * own.dtype.type(counted / client.num_workers)
    return (weight - own) * own.dtype.type(counted)


def wait_for_segment(number):
    segment = int(os.environ.get("SEGMENT", "0"))
    if segment and number % segment == 0:
        print(f"at part{number // segment}", flush=True)
        while not Path(os.environ["GATES"], f"part{number // segment}").exists():
            time.sleep(0.02)


def main():
    settings = Settings.from_environment(plugins.table())
    client = Client(settings, EventLog(None), plugins.deliveries()[deliveries.chosen(settings.options)].worker())
    sizes = [int(size) for size in os.environ.get("SIZES", "5000,10,3").split(",")]
    tensors = [Tensor(f"t{index}", size, os.environ.get("DTYPE", "float32")) for index, size in enumerate(sizes)]
    client.declare(tensors)
    if client.is_master and "OPTIMIZER" in os.environ:
        client.control.set_optimizer(*json.loads(os.environ["OPTIMIZER"]))
    initial = {}
    for index, tensor in enumerate(tensors):
        start = np.random.default_rng(1000 + index).standard_normal(tensor.size).astype(tensor.dtype)
        initial[tensor.name] = start if client.is_master else start * 0 + 5
    client.init(initial)
    if client.trains:
        train(client, tensors)
        client.leave()
        client.control.barrier("all")
    else:
        client.leave()
    client.close()


def train(client, tensors):
    weights = [np.zeros(tensor.size, tensor.dtype) for tensor in tensors]
    for tensor, weight in zip(tensors, weights, strict=True):
        client.pull(tensor.name, weight).result()
    rounds = [int(count) for count in os.environ.get("ROUNDS", "4").split(",")]
    counts = [float(count) for count in os.environ.get("WEIGHTS", "1").split(",")]
    counted = counts[client.global_rank % len(counts)]
    if "MEET" in os.environ:
        client.control.barrier("all")
    history, versions = [[weight.copy()] for weight in weights], []
    opening, _, gate = os.environ.get("OPENS", "").partition("=")
    while "WAITS" in os.environ and not Path(os.environ["WAITS"]).exists():
        time.sleep(0.02)
    for number in range(rounds[client.rank % len(rounds)]):
        wait_for_segment(number)
        given = [contribution(client, weight, number, index, counted) for index, weight in enumerate(weights)]
        exchanges = [
            client.exchange(tensor.name, *pair, priority=-index, weight=counted)
            for index, (tensor, *pair) in enumerate(zip(tensors, given, weights, strict=True))
        ]
        if opening == str(number + 1):
            Path(gate).touch()
        for exchange, weight, past in zip(exchanges, weights, history, strict=True):
            exchange.done.result()
            past.append(weight.copy())
        versions.append([client.versions(tensor.name) for tensor in tensors])
    arrays = {tensor.name: np.array(past) for tensor, past in zip(tensors, history, strict=True)}
    np.savez(os.environ["OUT"].format(rank=client.global_rank), versions=np.array(versions), **arrays)


main()
