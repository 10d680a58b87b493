"""Synchronous SGD on a parameter server, with PyTorch: geomx launch --algo sync -- python torch_sync.py

Every worker computes the gradients of its own batch. The server waits for all of them, and each worker continues with
their mean, as one worker with a batch of all: N workers with B samples each are one with N x B.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import geomx_cli.torch as geomx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="samples in the batch of each worker")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--data-dir", default="", help="where Fashion-MNIST lies, if not where geomx looks for it")
    given = parser.parse_args()

    geomx.init()
    torch.manual_seed(int(os.environ.get("GEOMX_SEED", "1")) + geomx.global_rank())  # another order in each worker
    data = geomx.shard(geomx.load_data("fashion-mnist", "train", given.data_dir))  # each worker's own part
    loader = DataLoader(data, batch_size=given.batch_size, shuffle=True)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=given.lr)
    geomx.wrap(net, optimizer)  # all workers have the parameters of global rank 0 now

    for _ in range(given.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images), labels)
            loss.backward()  # p.grad is the mean over all workers now, the same in each
            optimizer.step()  # so is the step
            geomx.report(samples=len(labels), loss=loss)  # shown by geomx launch, status, dashboard and draw
    geomx.finish()

    if geomx.global_rank() == 0:
        images, labels = geomx.load_data("fashion-mnist", "test", given.data_dir)[:]
        with torch.no_grad():
            geomx.report(accuracy=float((net(images).argmax(1) == labels).float().mean()))
        torch.save(net.state_dict(), Path(os.environ.get("GEOMX_OUTPUT_DIR", "."), "model.pt"))  # geomx fetch


if __name__ == "__main__":
    main()
