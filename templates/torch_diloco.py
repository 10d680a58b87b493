"""Train with PyTorch, 50 steps for one exchange: geomx launch --algo diloco --inner-steps 50 -- python torch_diloco.py

Every worker runs this file with its own optimizer, here AdamW. After --inner-steps of its steps geomx exchanges how far
the weights have moved, and all workers continue from the result of the outer step (--outer-lr, --outer-momentum).
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
    """Two convolutional layers with batch normalization and a dense layer, for images of 28 x 28."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def accuracy(net: Any, loader: Any, device: Any) -> float:
    """The fraction of the images that the network classifies correctly."""
    net.eval()
    with torch.no_grad():
        right = sum(int((net(images.to(device)).argmax(1).cpu() == labels).sum()) for images, labels in loader)
    return right / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="samples in the batch of each worker")
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--data-dir", default="", help="where Fashion-MNIST lies, if not where geomx looks for it")
    given = parser.parse_args()

    geomx.init()
    torch.manual_seed(int(os.environ.get("GEOMX_SEED", "1")) + geomx.global_rank())  # another order in each worker
    # With devices = ["gpu0"] in the inventory each worker sees only its own GPU.
    device = torch.device("cuda" if os.environ.get("GEOMX_DEVICE") else "cpu")
    data = geomx.shard(geomx.load_data("fashion-mnist", "train", given.data_dir))  # each worker's own part
    loader = DataLoader(data, batch_size=given.batch_size, shuffle=True)
    net, loss_of = network().to(device), nn.CrossEntropyLoss()
    optimizer = geomx.wrap(net, torch.optim.AdamW(net.parameters(), lr=given.lr))
    for _ in range(given.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(net(images.to(device)), labels.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()  # exchanges the weights when a round is due
            geomx.report(samples=len(labels), loss=loss)  # shown by geomx launch, status, dashboard and draw
    geomx.finish()  # exchanges the last steps; all workers have one model now
    if geomx.global_rank() == 0:
        test = DataLoader(geomx.load_data("fashion-mnist", "test", given.data_dir), batch_size=500)
        geomx.report(accuracy=accuracy(net, test, device))
        torch.save(net.state_dict(), Path(os.environ.get("GEOMX_OUTPUT_DIR", "."), "model.pt"))  # geomx fetch


if __name__ == "__main__":
    main()
