"""A worker with several rounds of each key in flight, which saves the result of every round, also if the job fails.

Environment: OUT (a .npz file; {rank} is the global rank), ROUNDS, AHEAD (maximum of rounds of a key in flight), SIZES,
SERVER_OPTIMIZER (1: the master sets one), PAUSE (seconds, maximum before each round: random), ROW (elements in a row:
push only every third row, starting with that of the rank and round, and pull the result), BY_KEY (1: begin all rounds
of one key before the next key's, each worker with a different first key), EVENTS (1: write an event log).
"""

import os
import random
import time
from collections import deque

import numpy as np

from geomx_cli.contract.settings import Settings
from geomx_cli.core import deliveries, plugins
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.client import Client
from geomx_cli.ps.cluster.partition import Tensor
from geomx_cli.ps.net.payload import Rows
from geomx_cli.runtime.plugin_factory import event_log

LIMIT = 200  # seconds: cuts, which last 50 s at most, leave a loaded machine no time for rounds
sizes = [int(size) for size in os.environ["SIZES"].split(",")]
settings = Settings.from_environment(plugins.table())
events = event_log(settings) if "EVENTS" in os.environ else EventLog(None)
client = Client(settings, events, plugins.deliveries()[deliveries.chosen(settings.options)].worker())
row = int(os.environ.get("ROW", "0"))
tensors = [Tensor(f"t{index}", size, "float32", row or 1) for index, size in enumerate(sizes)]
client.declare(tensors)
if client.is_master and os.environ.get("SERVER_OPTIMIZER"):
    client.control.set_optimizer("sgd", {"learning_rate": 0.1, "momentum": 0.9, "rescale_grad": 0.25})
for index, tensor in enumerate(tensors):
    client.init({tensor.name: np.random.default_rng(1000 + index).standard_normal(tensor.size).astype(np.float32)})
if client.trains:
    for tensor in tensors:
        client.pull(tensor.name, np.empty(tensor.size, np.float32)).result(240)
    by_key = bool(os.environ.get("BY_KEY"))
    pauses, under_way, began = random.Random(client.global_rank), deque(), {}
    count, ahead = int(os.environ["ROUNDS"]), int(os.environ["AHEAD"])
    results = {
        f"{number}-{index}": np.zeros(size, np.float32) for number in range(count) for index, size in enumerate(sizes)
    }
    order = [[(number, index) for index in range(len(sizes))] for number in range(count)]
    if by_key:
        first = client.global_rank % len(sizes)
        keys = [*range(first, len(sizes)), *range(first)]
        order = [[(number, index) for number in range(count)] for index in keys]
    try:
        for together in order:
            time.sleep(pauses.random() * float(os.environ.get("PAUSE", "0")))
            for number, index in together:
                size, priority = sizes[index], 0 if by_key else -index
                source = np.random.default_rng([client.global_rank, number, index]).standard_normal(size)
                out = results[f"{number}-{index}"]
                if row:
                    numbers = np.arange((client.global_rank + number) % 3, size // row, 3)
                    rows = Rows.of(source.astype(np.float32), row, numbers)
                    client.exchange(f"t{index}", rows, None, priority=priority)
                    done = client.pull_rows(f"t{index}", np.arange(size // row), out, priority=priority)
                else:
                    done = client.exchange(f"t{index}", source.astype(np.float32), out, priority=priority).done
                began[f"{number}-{index}"] = done
                under_way.append(done)
            while len(under_way) > ahead * len(sizes):
                under_way.popleft().result(LIMIT)
        for done in under_way:
            done.result(LIMIT)
    finally:
        has_ended = {name for name, done in began.items() if done.done() and not done.exception()}
        np.savez(os.environ["OUT"].format(rank=client.global_rank), **{name: results[name] for name in has_ended})
client.leave()
client.close()
