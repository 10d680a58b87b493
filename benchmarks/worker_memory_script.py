"""The worker of worker_memory.py: a Gluon script as in MXNet's tutorials, which never waits for its steps.

Started with the environment of its role; argv: NETWORK IMAGE_SIZE BATCH STEPS. Prints one JSON object: seconds of all
steps after the first, peak resident memory in bytes, and the sum of the absolute weights.
"""

import json
import resource
import sys
import time

import numpy as np

for name, kind in {"bool": bool, "int": int, "float": float, "object": object, "complex": complex, "str": str}.items():
    if name not in vars(np):
        setattr(np, name, kind)  # removed from numpy, but MXNet 1.9.1 needs them


def main(network: str, size: int, batch: int, steps: int) -> None:
    import mxnet as mx
    from mxnet import autograd, gluon

    mx.random.seed(1)
    net = gluon.model_zoo.vision.get_model(network, classes=10)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.001}, kvstore="dist_sync")
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    images, labels = mx.nd.random.uniform(shape=(batch, 3, size, size)), mx.nd.zeros((batch,))
    start = 0.0
    for step in range(steps):
        with autograd.record():
            loss = loss_of(net(images), labels)
        loss.backward()
        trainer.step(batch)
        if step == 0:
            mx.nd.waitall()
            start = time.monotonic()
    mx.nd.waitall()
    seconds = time.monotonic() - start
    weights = sum(float(item.data().abs().sum().asscalar()) for item in net.collect_params().values())
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds, "peak": peak, "weights": weights}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
