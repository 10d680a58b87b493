"""A worker that exchanges seeded gradients for some rounds and saves its final weights.

Environment: OUT (a .npz file; {rank} is the global rank), ROUNDS ("10" or "10,13": by rank in the party),
SERVER_OPTIMIZER (1: the master sets one; plain: without momentum), PULL (1: save the weights after all workers' last
rounds), SHUFFLE (a seed: random delays before each push), SLOW (seconds before each push of this worker), SIZES, DTYPE,
FILL (push this number instead of seeded gradients), GATES (a directory: wait at each gate until it has a file of that
name; LOOK: how often, in s), SEGMENT (a gate "part0", "part1" ... before every SEGMENT rounds), FAIL (1: fail instead
of saying goodbye), EVENTS (1: write an event log, not to the output), LOSS (1: report a loss that falls from 1 to 0.1
in the first round), FAULT (executed by B/worker:0 after 21 rounds).
"""

import os
import random
import time
from pathlib import Path

import msgspec
import numpy as np

from geomx_cli.contract.settings import Settings
from geomx_cli.core import deliveries, plugins
from geomx_cli.core.errors import TrainingFailed
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.client import Client
from geomx_cli.ps.cluster.partition import Tensor
from geomx_cli.runtime.plugin_factory import event_log


def gate(name: str) -> None:
    """Report this gate, and wait until the test opens it."""
    if "GATES" in os.environ:
        print("at", name, flush=True)
        while not Path(os.environ["GATES"], name).exists():
            time.sleep(float(os.environ.get("LOOK", "0.02")))


sizes = [int(size) for size in os.environ.get("SIZES", "70000,10,3").split(",")]
dtype = os.environ.get("DTYPE", "float32")
settings = Settings.from_environment(plugins.table())
events = event_log(settings) if "EVENTS" in os.environ else EventLog(None)
client = Client(settings, events, plugins.deliveries()[deliveries.chosen(settings.options)].worker())
print(client.rank, client.global_rank, client.num_workers, client.num_all_workers, client.party_index, flush=True)
tensors = [Tensor(f"t{index}", size, dtype) for index, size in enumerate(sizes)]
gate("declare")
client.declare(tensors)
if client.is_master and os.environ.get("SERVER_OPTIMIZER"):
    momentum = 0.0 if os.environ["SERVER_OPTIMIZER"] == "plain" else 0.9
    client.control.set_optimizer("sgd", {"learning_rate": 0.1, "momentum": momentum, "rescale_grad": 0.25})
for index, tensor in enumerate(tensors):
    initial = np.random.default_rng(1000 + index).standard_normal(tensor.size).astype(dtype)
    client.init({tensor.name: initial if client.is_master else initial * 0 + 5})
if not client.trains:
    gate("leave")
    client.leave()
    client.close()
    raise SystemExit
results = [np.zeros(tensor.size, dtype) for tensor in tensors]
for tensor, result in zip(tensors, results, strict=True):
    client.pull(tensor.name, result).result()
rounds = [int(count) for count in os.environ.get("ROUNDS", "5").split(",")]
delays = random.Random(int(os.environ.get("SHUFFLE", "0")) * 1000 + client.global_rank)
segment = int(os.environ.get("SEGMENT", "0"))
for number in range(rounds[client.rank % len(rounds)]):
    if "LOSS" in os.environ:
        client.report(loss=0.1 if number else 1.0)
    if segment and number % segment == 0:
        gate(f"part{number // segment}")
    gradients = [
        np.full(size, float(os.environ["FILL"]), dtype)
        if "FILL" in os.environ
        else np.random.default_rng([client.global_rank, number, index]).standard_normal(size).astype(dtype)
        for index, size in enumerate(sizes)
    ]
    order = list(range(len(sizes)))
    if os.environ.get("SHUFFLE"):
        delays.shuffle(order)
    exchanges = []
    for index in order:
        if os.environ.get("SHUFFLE"):
            time.sleep(delays.random() * 0.01)
        time.sleep(float(os.environ.get("SLOW", "0")))
        exchanges.append(client.exchange(tensors[index].name, gradients[index], results[index], priority=-index))
    for exchange in exchanges:
        exchange.done.result()
    if number == 20 and os.environ.get("GEOMX_PROCESS") == "B/worker:0":
        exec(os.environ.get("FAULT", ""))
if "PULL" in os.environ:
    client.control.barrier("all")
    for tensor, result in zip(tensors, results, strict=True):
        client.pull(tensor.name, result).result()
np.savez(os.environ["OUT"].format(rank=client.global_rank), *results)
if "GATES" in os.environ:
    gate("barrier")
    client.control.barrier("all")
gate("leave")
client.leave()
client.control.barrier("all")
gate("close")
client.close(TrainingFailed("it was told to fail") if "FAIL" in os.environ else None)
print("bytes", msgspec.to_builtins(client.traffic()), flush=True)
