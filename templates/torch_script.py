"""Train a CNN with PyTorch, all workers as one: geomx launch -- python torch_script.py

Every worker runs this file. Three lines make it distributed: geomx.init, geomx.shard and geomx.wrap. A fourth one,
geomx.state, saves training: a killed worker goes on at the same batch. What the workers exchange is chosen with
--algo, as `geomx launch --algo diloco -- python torch_script.py`; sync and async are those of a plain parameter server.
By default they exchange gradients.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import geomx_cli.torch as geomx


def network() -> Any:
    """Two convolutional and two dense layers for images of 28 x 28."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def accuracy(net: Any, loader: Any, device: Any) -> float:
    """The fraction of the images that the network classifies correctly."""
    net.eval()
    with torch.no_grad():
        right = sum(int((net(images.to(device)).argmax(1).cpu() == labels).sum()) for images, labels in loader)
    net.train()
    return right / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="samples in the batch of each worker")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--data-dir", default="", help="where Fashion-MNIST lies, if not where geomx looks for it")
    given = parser.parse_args()

    geomx.init()
    torch.manual_seed(int(os.environ.get("GEOMX_SEED", "1")))  # geomx launch --seed
    # With devices = ["gpu0"] in the inventory each worker sees only its own GPU.
    device = torch.device("cuda" if os.environ.get("GEOMX_DEVICE") else "cpu")
    data = geomx.shard(geomx.load_data("fashion-mnist", "train", given.data_dir))  # each worker's own part
    test = DataLoader(geomx.load_data("fashion-mnist", "test", given.data_dir), batch_size=500)
    loader = DataLoader(data, batch_size=given.batch_size, shuffle=True)
    net, loss_of = network().to(device), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=given.lr, momentum=0.9)
    optimizer = geomx.wrap(net, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    state = geomx.state(net=net, optimizer=optimizer, schedule=schedule)  # saves them between batches
    for _ in state.epochs(given.epochs):
        for images, labels in state.batches(loader):
            optimizer.zero_grad()
            loss = loss_of(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            geomx.report(samples=len(labels), loss=loss)  # shown by geomx launch, status, dashboard and draw
        schedule.step()
        if geomx.global_rank() == 0:
            geomx.report(accuracy=accuracy(net, test, device))
    geomx.finish()  # all workers have one model now
    if geomx.global_rank() == 0:
        geomx.report(accuracy=accuracy(net, test, device))
        torch.save(net.state_dict(), Path(os.environ.get("GEOMX_OUTPUT_DIR", "."), "model.pt"))  # geomx fetch


if __name__ == "__main__":
    main()
