"""Workers that train a key asynchronously, and pull it once the first worker has given another key its initial value.

Environment: OUT (a .npz file; {rank} is the global rank).
"""

import os

import numpy as np

from geomx_cli.contract.settings import Settings
from geomx_cli.core import plugins
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.client import Client
from geomx_cli.ps.cluster.partition import Tensor

client = Client(Settings.from_environment(plugins.table()), EventLog(None), plugins.deliveries()["direct"].worker())
client.declare([Tensor("first", 5, "float32")])
if client.is_master:
    client.control.set_optimizer("sgd", {"learning_rate": 1.0, "momentum": 0.0, "rescale_grad": 1.0})
value = np.zeros(5, np.float32)
client.init({"first": value})
client.control.barrier("all")
if client.trains:
    for _ in range(1 + client.global_rank):
        client.exchange("first", np.ones(5, np.float32), value).done.result()
client.control.barrier("all")
client.declare([Tensor("late", 3, "float32")])
client.init({"late": np.zeros(3, np.float32)}, source=0)
if client.trains:
    client.pull("first", value).result()
    np.savez(os.environ["OUT"].format(rank=client.global_rank), first=value)
    client.leave()
client.close()
