"""A worker of DiLoCo on three small tensors: the bundled job's own part, with MXNet's arrays, on gradients made here.

Environment: OUT (a .npz file; {rank}): the tensors' weights after each step and at the very end; STEPS ("11,9": by
rank), and the options of the algorithm.
"""

import os

import numpy as np

from geomx_cli import plugins
from geomx_cli.events import EventLog
from geomx_cli.ps.client import Client
from geomx_cli.runtime import mxnet_store
from geomx_cli.runtime.algorithms import diloco
from geomx_cli.runtime.settings import Settings
from geomx_cli.runtime.training.recipe import Recipe
from geomx_cli.runtime.training.replica import Replica
from geomx_cli.runtime.training.stopwatch import Stopwatch

SIZES = (6, 3, 4)


class Vectors(Replica):
    """A replica without a network: the gradient leads to a point of this worker's and step's own."""

    def __init__(self, mx):
        self.names = tuple(f"t{index}" for index in range(len(SIZES)))
        self._mx = mx
        self.weights = [mx.nd.zeros((size,)) for size in SIZES]
        self.gradients = [mx.nd.zeros((size,)) for size in SIZES]
        self.statistics = {}

    def forward_backward(self, rank, number):
        for index, (weight, gradient) in enumerate(zip(self.weights, self.gradients, strict=True)):
            goal = np.random.default_rng([rank, number, index]).standard_normal(SIZES[index])
            gradient[:] = self._mx.nd.array(weight.asnumpy() - goal)

    def now(self):
        return np.concatenate([weight.asnumpy() for weight in self.weights])


def main():
    settings = Settings.from_environment(plugins.table())
    mx = mxnet_store.load_mxnet()
    client = Client(settings, EventLog(None), plugins.deliveries()["direct"].worker())
    mxnet_store.register(mx, lambda: client)
    store, replica = mx.kv.create("dist_sync"), Vectors(mx)
    recipe = Recipe.from_options(settings.options)
    if client.is_master:
        client.set_optimizer(*diloco.server_optimizer(recipe))
    store.init(list(replica.names), [mx.nd.ones((size,)) for size in SIZES])
    part = diloco.worker(client, store, replica, recipe)
    part.start()
    steps = [int(count) for count in os.environ["STEPS"].split(",")]
    history, begun, watch = [], False, Stopwatch()
    for number in range(steps[client.global_rank]):
        replica.forward_backward(client.global_rank, number)
        begun = part.after_step(recipe.batch_size, watch) or begun
        if begun and part.due:
            part.synchronise()
            begun = False
        history.append(replica.now())
    while begun or part.unfinished(0):
        if not begun:
            part.drain()
        part.synchronise()
        begun = False
    part.end()
    np.savez(os.environ["OUT"].format(rank=client.global_rank), history=np.array(history), final=replica.now())
    client.leave()
    client.close()


main()
