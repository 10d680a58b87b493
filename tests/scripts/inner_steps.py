"""A worker of DiLoCo on three small tensors: the bundled job's worker part, on synthetic gradients.

Environment: OUT (a .npz file; {rank}): the tensors' weights after each step and at the end; STEPS ("11,9": by rank),
and the options of the algorithm.
"""

import os

import numpy as np

from geomx_cli.contract.settings import Settings
from geomx_cli.core import plugins
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.client import Client
from geomx_cli.runtime.algorithms import diloco
from geomx_cli.runtime.script.store import Store
from geomx_cli.runtime.training.architecture import Parameter
from geomx_cli.runtime.training.model import ModelAdapter, Network, flat_views
from geomx_cli.runtime.training.train_config import TrainConfig
from geomx_cli.runtime.training.worker_algorithm import Stopwatch

SIZES = (6, 3, 4)


class Vectors(ModelAdapter):
    """A model without data: the gradient points to a target that depends on the worker and step."""

    def __init__(self):
        parameters = tuple(Parameter(f"t{index}", (size,)) for index, size in enumerate(SIZES))
        super().__init__(Network((1, 1, 1), 1, parameters, (), (1, 1), None, None))
        self.now, self._gradient = np.zeros(self.size, np.float32), np.zeros(self.size, np.float32)

    def forward_backward(self, batch, scale):
        rank, number = batch
        goals = [np.random.default_rng([rank, number, index]).standard_normal(size) for index, size in enumerate(SIZES)]
        self._gradient[:] = self.now - np.concatenate(goals)

    def wait_for_gradients(self):
        pass

    def read_gradient(self, index, out):
        out[:] = flat_views(self._gradient, SIZES)[index]

    def read_weights(self, out):
        out[:] = self.now

    def write_weights(self, vector):
        self.now[:] = vector

    def write_weight(self, index, value):
        flat_views(self.now, SIZES)[index][:] = value

    def count_correct(self, batch):
        return 0  # there are no classes


def main():
    settings = Settings.from_environment(plugins.table())
    client = Client(settings, EventLog(None), plugins.deliveries()["direct"].worker())
    model, recipe = Vectors(), TrainConfig.from_options(settings.options)
    if client.is_master:
        client.control.set_optimizer(*diloco.server_optimizer(recipe))
    Store(client).init(list(model.names), [np.ones(size, np.float32) for size in SIZES])
    part = diloco.worker(client, model, recipe)
    part.start()
    steps = [int(count) for count in os.environ["STEPS"].split(",")]
    history, begun, watch = [], False, Stopwatch()
    for number in range(steps[client.global_rank]):
        model.forward_backward((client.global_rank, number), 1.0)
        begun = part.after_step(recipe.batch_size, watch) or begun
        if begun and part.must_wait:
            part.synchronise()
            begun = False
        history.append(model.now.copy())
    while begun or part.unfinished(0):
        if not begun:
            part.drain()
        part.synchronise()
        begun = False
    part.end()
    np.savez(os.environ["OUT"].format(rank=client.global_rank), history=np.array(history), final=model.now)
    client.leave()
    client.close()


main()
