"""One of two workers of a flat cluster that gives its client arrays of all kinds, and abstains."""

import numpy as np

from geomx_cli import plugins
from geomx_cli.errors import InvalidSettings
from geomx_cli.events import EventLog
from geomx_cli.ps.client import MAX_OPEN, Client
from geomx_cli.ps.partition import Tensor
from geomx_cli.runtime.settings import Settings


def refused(words, call, *args):
    try:
        call(*args)
    except InvalidSettings as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


client = Client(Settings.from_environment(plugins.table()), EventLog(None), plugins.deliveries()["direct"].worker())
client.declare([Tensor("t", 2500, "float32"), Tensor("many", 1, "float64")])
both = np.arange(5000, dtype=np.float32)
out = np.zeros(5000, np.float32)
client.exchange("t", both[::2], out[::2]).done.result(30)
assert np.array_equal(out[::2], 2 * both[::2]) and not out[1::2].any(), "every second element, up and down"
matrix = np.ones((50, 50), np.float32)
refused("shape (50, 50)", client.exchange, "t", matrix, None)
refused("shape (50, 50)", client.exchange, "t", matrix.reshape(-1), matrix)
refused("shape (50, 50)", client.pull, "t", matrix)

result = np.zeros(2500, np.float32)
client.exchange("t", matrix.reshape(-1) if client.rank == 0 else None, result).done.result(30)
assert (result == 1).all(), "one abstains"
client.exchange("t", None, result).done.result(30)
assert not result.any(), "nobody contributes"

client.barrier()
if client.rank == 1:
    exchanges = [client.exchange("many", np.ones(1), None) for _ in range(MAX_OPEN)]
    refused("no result yet", client.exchange, "many", np.ones(1), None)
    client.barrier()
else:
    client.barrier()
    exchanges = [client.exchange("many", np.full(1, 10.0 * number), None) for number in range(MAX_OPEN)]
for number, exchange in enumerate(exchanges):
    exchange.done.result(30)
    total = np.zeros(1)
    exchange.copy_to(total)
    assert total[0] == 1 + 10.0 * number, (number, total)
client.leave()
client.close()
