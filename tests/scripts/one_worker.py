"""The bundled job with one worker, once for each way to train it, and MXNet's own SGD on the same batches.

Arguments: the data folder, the result folder, and ways as "NAME:VARIABLE=VALUE,VARIABLE=VALUE...". Writes the final
weights to NAME.npz, those of MXNet to mxnet.npz.
"""

import os
import sys
from pathlib import Path

import numpy as np

from geomx_cli.contract.settings import Settings
from geomx_cli.core import plugins
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.client import Client
from geomx_cli.runtime import standalone
from geomx_cli.runtime.bundled import job, networks
from geomx_cli.runtime.bundled.checkpoint import Checkpoint
from geomx_cli.runtime.data import reader
from geomx_cli.runtime.frontends.mxnet.load import load_mxnet

BATCH, EPOCHS, RATE, MOMENTUM = 24, 2, 0.05, 0.9


def by_mxnet(mx, folder):
    """Train with MXNet's optimizer and no kvstore."""
    update = mx.optimizer.get_updater(mx.optimizer.SGD(learning_rate=RATE, momentum=MOMENTUM))
    model, samples = networks.find("cnn").build(), reader.load("fashion-mnist", "train", folder)
    for index, value in enumerate(model.network.initial_weights(1).values()):
        model.write_weight(index, value.reshape(-1))
    for epoch in range(EPOCHS):
        for batch in samples.batches(BATCH, seed=1, epoch=epoch, rank=0):
            model.forward_backward(batch, 1.0)
            for index, (weight, gradient) in enumerate(zip(model.weights, model.gradients, strict=True)):
                update(index, gradient, weight)
    return model.named_weights()


def by_geomx(folder, variables):
    before = dict(os.environ)
    os.environ |= variables
    standalone.begin()
    settings = Settings.from_environment(plugins.table())
    client = Client(settings, EventLog(None), plugins.deliveries()["direct"].worker())
    job.main(client)
    client.leave()
    client.close()
    os.environ.clear()
    os.environ |= before
    (last,) = Path(folder, "checkpoints").iterdir()
    return Checkpoint.read(last).weights


def main():
    source, results, *ways = sys.argv[1:]
    np.savez(Path(results, "mxnet.npz"), **by_mxnet(load_mxnet(), Path(source)))
    for way in ways:
        name, _, more = way.partition(":")
        folder = Path(results, name)
        variables = {
            "GEOMX_DATA_DIR": source, "GEOMX_BATCH_SIZE": str(BATCH), "GEOMX_EPOCHS": str(EPOCHS),
            "GEOMX_LR": str(RATE), "GEOMX_MOMENTUM": str(MOMENTUM), "GEOMX_JOB_DIR": str(folder),
            "GEOMX_SAVE_EVERY": "1000", "GEOMX_EVAL_EVERY": "0",
        }  # fmt: skip
        variables |= dict(item.split("=") for item in more.split(","))
        np.savez(Path(results, f"{name}.npz"), **by_geomx(folder, variables))


main()
