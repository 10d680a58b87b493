"""A worker of a flat cluster of four that checks a Store: sums, dtypes, keys, optimizer. No MXNet."""

import numpy as np

from geomx_cli.contract.settings import Settings
from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.client import Client
from geomx_cli.runtime.script.store import Store


def refused(words, call, *args):
    try:
        call(*args)
    except InvalidSettings as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


def push(store, key, value):
    """Begin the next round of a key with a copy of `value`."""
    name = store.lookup(key, value.size, str(value.dtype))
    store.begin_training()
    return store.start(name, value.flatten(), None, 0, store.optimizer.hyper.news(name))


def pull(store, key, out):
    store.fetch(store.lookup(key, out.size, str(out.dtype)), out.reshape(-1), 0).result(20)


def check_keys(store, value):
    refused("initialised already", store.init, "w", value)
    refused("stands twice", store.init, ["x", "x"], [value, value])
    refused("int or str", store.init, 3, value)
    refused("int8", store.init, "x", value.astype(np.int8))
    refused("no elements", store.init, "x", value[:0])
    refused("is no key", store.init, 1.5, value)
    refused("2 keys come with 1", store.init, ["x", "y"], [value])
    refused("has not been initialised", push, store, "x", value)
    refused("elements of float32", push, store, "w", value[:1])
    refused("elements of float32", push, store, "w", value.astype(np.float64))


def check_sums(store, rank):
    """The first worker pushes 2048, the others 1; in fp16 alone these would add up to 2048."""
    for dtype, wanted in (("float16", np.float16(2051)), ("float64", 2051.0 + 4e-13), ("float32", 2051.0)):
        key = f"sum {dtype}"
        store.init(key, np.zeros((3, 5), dtype))
        extra = 1e-13 if dtype == "float64" else 0.0
        value = np.full((3, 5), (2048 if rank == 0 else 1) + extra, dtype)
        out = np.empty_like(value)
        for _ in range(3):
            pushed = push(store, key, value)
            pull(store, key, out)
            pushed.done.result(20)
            assert abs(float(out[1, 1]) - float(wanted)) < 1e-12 and (out == out[0, 0]).all(), (dtype, out)


def check_optimizer(store, weight, rank):
    store.optimizer.set("sgd", {"learning_rate": 0.5, "rescale_grad": 0.25})
    expected = weight.astype(np.float64)
    for step in range(4):
        if step == 2:
            store.optimizer.hyper.change({"learning_rate": 0.125, "rescale_grad": 0.5})
        rate = 0.5 * 0.25 if step < 2 else 0.125 * 0.5
        out = np.empty_like(weight)
        push(store, "w", np.full_like(weight, rank + step))
        pull(store, "w", out)
        expected -= rate * sum(other + step for other in range(4))
        assert np.array_equal(out, expected.astype(np.float32)), (step, out, expected)


def check_many_rounds(store, client):
    """More rounds than may be open; one worker begins the first when all others have begun the last."""
    store.init("many", np.zeros(3, np.float64))
    last = store.num_all_workers - 1
    if store.rank == last:
        client.control.barrier()
    for number in range(200):
        push(store, "many", np.full(3, number * 10.0 + store.rank))
    if store.rank != last:
        client.control.barrier()
    out = np.empty(3)
    pull(store, "many", out)
    assert (out == 4 * 1990 + 6).all(), out


def main():
    settings = Settings.from_environment(plugins.table())
    client = Client(settings, EventLog(None), plugins.deliveries()["direct"].worker())
    store = Store(client)
    assert (store.num_workers, store.num_all_workers, store.type) == (4, 4, "dist_sync")
    assert store.rank == store.global_rank == settings.rank
    weight = np.full((7, 3), 100.0 + store.rank, np.float32)
    out = np.zeros_like(weight)
    store.init(["w", "v"], [weight, weight * 2])
    pull(store, "w", out)
    assert (out == 100).all(), out
    check_keys(store, weight)
    check_sums(store, store.rank)
    check_many_rounds(store, client)
    check_optimizer(store, out, store.rank)
    store.barrier("all")
    client.leave()
    client.close()


if __name__ == "__main__":
    main()
