"""One worker of pushpull.py: exchanges a list of tensors repeatedly, and prints when each iteration ended.

Started with the environment of its role; argv: SYSTEM LIST WARM_UP ITERATIONS, where SYSTEM is "client" (the parameter
server's client with numpy arrays), "store" (our MXNet store) or "mxnet" (MXNet's own dist_sync). All workers push ones;
with a codec each pushes normal gradients of its own.
"""

import json
import os
import sys
import time
from typing import Any

import msgspec
import numpy as np
from tensors import LISTS


def main(system: str, name: str, warm_up: int, iterations: int) -> None:
    sizes = LISTS[name]
    exchange: Client | Store = Client(sizes) if system == "client" else Store(sizes, system == "mxnet")
    if exchange.trains:
        for _ in range(warm_up):
            exchange.iterate()
        exchange.check(warm_up)
        exchange.barrier()
        start, bytes_before = time.monotonic(), exchange.bytes()
        print(json.dumps({"start": start, "pid": os.getpid()}), flush=True)
        for _ in range(iterations):
            exchange.iterate()
        end = time.monotonic()
        print(json.dumps({"end": end, "before": bytes_before, "after": exchange.bytes()}), flush=True)
        exchange.check(warm_up + iterations)
    exchange.close()


def gradients(rank: int, sizes: list[int]) -> list[Any]:
    """Normal gradients of a worker, with a scale for each tensor."""
    random = np.random.default_rng(rank)
    scales = np.exp(np.random.default_rng(0).normal(-5, 2, len(sizes))).astype(np.float32)
    return [scale * random.standard_normal(size, np.float32) for scale, size in zip(scales, sizes, strict=True)]


def resembles(found: Any, ranks: int, index: int, sizes: list[int]) -> bool:
    """Whether the result of a tensor points in the direction of the exact sum."""
    exact = sum(gradients(rank, sizes)[index] for rank in range(ranks))
    return bool(np.isfinite(found).all() and np.dot(found, exact) > 0)


class Client:
    """The parameter server's client. Without a codec each result is the number of workers; where blocks may be late or
    lost, that of those that have come.
    """

    def __init__(self, sizes: list[int]) -> None:
        from geomx_cli.contract.settings import Settings
        from geomx_cli.core import plugins
        from geomx_cli.ps.client import Client as PsClient
        from geomx_cli.ps.cluster.partition import Tensor
        from geomx_cli.runtime.plugin_factory import event_log, part

        settings = Settings.from_environment(plugins.table())
        self._client = PsClient(settings, event_log(settings), part(settings, "delivery", "worker")())
        self.trains = self._client.trains
        self._names = [str(index) for index in range(len(sizes))]
        tensors = [Tensor(name, size, "float32") for name, size in zip(self._names, sizes, strict=True)]
        self._client.declare(tensors)
        self._sizes, self._encoded = sizes, settings.text("compress") not in ("", "none")
        self._may_lose = settings.options["dgt"] == 1
        self._src = [np.ones(size, np.float32) for size in sizes]
        self._out = [np.empty(size, np.float32) for size in sizes]
        self._client.init(dict(zip(self._names, self._src, strict=True)))
        if self._encoded and self.trains:
            self._src = gradients(self._client.global_rank, sizes)

    def iterate(self) -> None:
        exchanges = [
            self._client.exchange(name, src, out, priority=-index)
            for index, (name, src, out) in enumerate(zip(self._names, self._src, self._out, strict=True))
        ]
        for exchange in exchanges:
            exchange.done.result(600)

    def barrier(self) -> None:
        self._client.control.barrier("all")

    def check(self, rounds: int) -> None:
        if self._encoded:
            assert resembles(self._out[0], self._client.num_all_workers, 0, self._sizes), "a wrong result"
            return
        for out in self._out:
            right = out == np.rint(out) if self._may_lose else out == self._client.num_all_workers
            assert right.all(), "a wrong result"

    def bytes(self) -> Any:
        return msgspec.to_builtins(self._client.traffic())

    def close(self) -> None:
        self._client.leave()
        self._client.close()


class Store:
    """MXNet's KVStore, its own or ours under the same name. Keys are pushed and pulled in order."""

    def __init__(self, sizes: list[int], native: bool) -> None:
        if native:
            for name, kind in {"bool": bool, "int": int, "float": float, "object": object, "complex": complex}.items():
                setattr(np, name, kind)
        import mxnet as mx

        self._mx = mx
        self._kv = mx.kv.create("dist_sync")
        self._native = native
        self.trains = native or self._kv.global_rank >= 0
        self._src = [mx.nd.ones((size,)) for size in sizes]
        self._out = [mx.nd.zeros((size,)) for size in sizes]
        self._workers = self._kv.num_workers if native else self._kv.num_all_workers
        self._sizes, self._encoded = sizes, os.environ.get("GEOMX_COMPRESS", "none") not in ("", "none")
        for key, src in enumerate(self._src):
            self._kv.init(key, src)
        if self._encoded and self.trains:
            self._src = [mx.nd.array(array) for array in gradients(self._kv.global_rank, sizes)]

    def iterate(self) -> None:
        for key, (src, out) in enumerate(zip(self._src, self._out, strict=True)):
            self._kv.push(key, src, priority=-key)
            self._kv.pull(key, out, priority=-key)
        self._mx.nd.waitall()

    def barrier(self) -> None:
        if self._native:
            self._kv._barrier()
        else:
            self._kv.barrier("all")

    def check(self, rounds: int) -> None:
        """MXNet's own store writes pulled values into the pushed arrays too, so its results grow; ours are exact."""
        if self._encoded:
            assert resembles(self._out[0].asnumpy(), self._workers, 0, self._sizes), "a wrong result"
            return
        for out in self._out:
            assert self._native or (out.asnumpy() == self._workers).all(), "a wrong result"

    def bytes(self) -> None:
        return None

    def close(self) -> None:
        return None


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
