"""An optimizer of the script's own, and one of MXNet's that no server of ours has. Argument: "own" or a name."""

import sys

import mxnet as mx
import numpy as np


@mx.optimizer.register
class Own(mx.optimizer.Optimizer):
    """Steps of one size, by the sign of the gradient, with a decay of the step."""

    def create_state(self, index, weight):
        return mx.nd.zeros(weight.shape)

    def update(self, index, weight, grad, state):
        self._update_count(index)
        state += 1
        weight -= self._get_lr(index) * mx.nd.sign(grad * self.rescale_grad) / state


kv = mx.kv.create("dist_sync")
name = sys.argv[1]
kv.set_optimizer(mx.optimizer.create(name, rescale_grad=0.5, **({} if name == "test" else {"learning_rate": 0.05})))
weights = [mx.nd.array(np.random.RandomState(key).randn(7, 5)) for key in range(3)]
for key, weight in enumerate(weights):
    kv.init(key, weight)
for number in range(4):
    for key, weight in enumerate(weights):
        source = np.random.RandomState(100 * number + 10 * key + kv.rank)
        kv.push(key, mx.nd.array(source.randn(7, 5)))
        kv.pull(key, out=weight)
np.savez(f"weights-{kv.rank}.npz", *[weight.asnumpy() for weight in weights])
