"""One of two workers of a flat cluster: exchanges arrays and rows of all kinds through its client, and abstains."""

from functools import partial

import numpy as np

from geomx_cli.contract.settings import Settings
from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.client import Client
from geomx_cli.ps.cluster.partition import Tensor
from geomx_cli.ps.declared_tensor import MAX_OPEN
from geomx_cli.ps.net.payload import Rows


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
client.exchange("t", both[::2], out[::2]).done.result(240)
assert np.array_equal(out[::2], 2 * both[::2]) and not out[1::2].any(), "every second element, up and down"
matrix = np.ones((50, 50), np.float32)
refused("shape (50, 50)", client.exchange, "t", matrix, None)
refused("shape (50, 50)", client.exchange, "t", matrix.reshape(-1), matrix)
refused("shape (50, 50)", client.pull, "t", matrix)
for hyper in ({"learning_rate": float("nan")}, {f"h{number}": 1.0 for number in range(17)}):
    refused("at most 16 finite numbers", partial(client.exchange, "t", matrix.reshape(-1), None, hyper=hyper))

result = np.zeros(2500, np.float32)
client.exchange("t", matrix.reshape(-1) if client.rank == 0 else None, result).done.result(240)
assert (result == 1).all(), "one abstains"
client.exchange("t", None, result).done.result(240)
assert not result.any(), "nobody contributes"

# Rows; those of "long" exceed a slice of 1024 elements.
tables = {"table": (50, 50), "long": (2, 1500), "flat": (9, 1)}
client.declare([Tensor(name, count * row, "float32", row) for name, (count, row) in tables.items()])
assert [client.tensors[name].placement.row for name in tables] == [50, 0, 1]
for name, (count, row) in tables.items():
    client.init({name: np.full(count * row, 7, np.float32)})
    client.control.barrier()
    part, whole = np.zeros(2 * row, np.float32), np.zeros(count * row, np.float32)
    client.pull_rows(name, np.array([0, 1]), part).result(240)
    assert (part == 7).all()
    own = Rows(np.array([0, 1]) if client.rank else np.array([1]), np.ones((1 + client.rank, row), np.float32))
    client.exchange(name, own, None).done.result(240)
    client.pull_rows(name, np.array([0, 1]), part).result(240)
    assert (part[:row] == 1).all() and (part[row:] == 2).all()
    client.pull(name, whole).result(240)
    assert np.array_equal(whole[: 2 * row], part) and not whole[2 * row :].any()
    client.exchange(name, None if client.rank else own, None)
    client.pull_rows(name, np.array([1]), part[:row])
    client.exchange(name, whole, whole)
    client.pull_rows(name, np.array([1]), part[row:]).result(240)
    assert (part[:row] == 1).all() and (part[row:] == 4).all(), "one abstains, then both push arrays"
    client.pull_rows(name, np.array([], np.int64), part[:0]).result(240)
one = np.ones((1, 50), np.float32)
refused("comes to no array", client.exchange, "table", Rows(np.array([1]), one), matrix.reshape(-1))
refused("from 0 to 49", client.exchange, "table", Rows(np.array([50]), one), None)
refused("from 0 to 49", client.exchange, "table", Rows(np.array([-1]), one), None)
refused("do not increase", client.exchange, "table", Rows(np.array([3, 3]), np.ones((2, 50), np.float32)), None)
refused("rows of 50 float32", client.exchange, "table", Rows(np.array([1]), one[:, 1:]), None)
refused("rows of 50 float32", client.exchange, "table", Rows(np.array([1]), one.astype(np.float16)), None)
refused("do not increase", client.pull_rows, "table", np.array([3, 2]), np.empty(100, np.float32))
refused("do not fit", client.pull_rows, "table", np.array([2, 3]), np.empty(99, np.float32))

client.control.barrier()
if client.rank == 1:
    exchanges = [client.exchange("many", np.ones(1), None) for _ in range(MAX_OPEN)]
    refused("no result yet", client.exchange, "many", np.ones(1), None)
    client.control.barrier()
else:
    client.control.barrier()
    exchanges = [client.exchange("many", np.full(1, 10.0 * number), None) for number in range(MAX_OPEN)]
for number, exchange in enumerate(exchanges):
    exchange.done.result(240)
    total = np.zeros(1)
    exchange.copy_to(total)
    assert total[0] == 1 + 10.0 * number, (number, total)
client.leave()
client.close()
