"""Two workers of a party that would deadlock without the servers' requests: rank 0 pushes `a`, waits for its result and
pushes `b`; rank 1 pushes `b`, which fills its window, and then `a`.
"""

import numpy as np

from geomx_cli.contract.settings import Settings
from geomx_cli.core import plugins
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.client import Client
from geomx_cli.ps.cluster.partition import Tensor

client = Client(Settings.from_environment(plugins.table()), EventLog(None), plugins.deliveries()["direct"].worker())
client.declare([Tensor("a", 40_000, "float32"), Tensor("b", 40_000, "float32")])
results = {name: np.zeros(40_000, np.float32) for name in "ab"}
client.init(results)
if client.trains:
    ones = np.full(40_000, client.global_rank + 1, np.float32)
    exchanges = []
    for name in "ab" if client.rank == 0 else "ba":
        exchanges.append(client.exchange(name, ones, results[name]))
        if client.rank == 0:
            exchanges[-1].done.result(20)
    for exchange in exchanges:
        exchange.done.result(20)
    assert all((result == 10).all() for result in results.values()), results
client.leave()
client.control.barrier("all")
client.close()
