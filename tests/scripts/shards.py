"""A worker that exchanges seeded values of a key that all workers contribute, and of one for each rank of a party.

Prints what it is told for the declarations and contributions that are refused, and saves its results. Environment: OUT
(a .npz file; {rank} is the global rank).
"""

import os

import numpy as np

from geomx_cli.contract.settings import Settings
from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.client import Client
from geomx_cli.ps.cluster.partition import Tensor

settings = Settings.from_environment(plugins.table())
client = Client(settings, EventLog(None), plugins.deliveries()["direct"].worker())
SIZES = {"all": 70_000, "shard0": 50_000, "shard1": 30_000}
shards = {"all": -1, "shard0": 0, "shard1": 1}
for tensor in (Tensor("far", 8, "float32", shard=2), Tensor("shard0", 50_000, "float32", shard=1)):
    if tensor.name == "shard0":
        client.declare([Tensor(name, size, "float32", shard=shards[name]) for name, size in SIZES.items()])
        client.tensors.pop("shard0")  # so that the servers are asked again
    try:
        client.declare([tensor])
    except InvalidSettings as error:
        print(f"refused: {error.message}", flush=True)
client.declare([Tensor("shard0", 50_000, "float32", shard=0)])
client.control.barrier("all")
own = f"shard{client.rank}"
try:
    client.exchange(f"shard{1 - client.rank}", np.zeros(1, np.float32), None)
except InvalidSettings as error:
    print(f"refused: {error.message}", flush=True)
found = {}
for number in range(4):
    begun = []
    for name in ("all", own) if (number + client.rank) % 2 else (own, "all"):
        seed = [client.global_rank, number, list(SIZES).index(name)]
        given = np.random.default_rng(seed).standard_normal(SIZES[name]).astype(np.float32)
        found[f"{name}/{number}"] = np.zeros_like(given)
        begun.append(client.exchange(name, given, found[f"{name}/{number}"]))
    for exchange in begun:
        exchange.done.result()
np.savez(os.environ["OUT"].format(rank=client.global_rank), **found)
client.leave()
client.control.barrier("all")
client.close()
