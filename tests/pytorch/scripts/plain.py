"""Image classification as in example collections: one process, argparse, a data loader, and an epoch loop."""

import argparse
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout = nn.Dropout(0.1)
        self.fc1 = nn.Linear(144, 32)
        self.fc2 = nn.Linear(32, 4)

    def forward(self, x: Any) -> Any:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout(torch.flatten(x, 1))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def pictures(count: int, seed: int) -> TensorDataset:
    """Noise with a bright quarter, which is the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=generator)
    images = torch.rand(count, 1, 10, 10, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = 5 * (label // 2), 5 * (label % 2)
        image[0, row : row + 5, column : column + 5] += 1
    return TensorDataset(images, labels)


def train(args: argparse.Namespace, model: Any, loader: Any, optimizer: Any, scaler: Any, epoch: int) -> None:
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=args.amp):
            loss = F.nll_loss(model(data), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if batch_idx % args.log_interval == 0:
            print(f"Train epoch {epoch} [{batch_idx * len(data)}/{len(loader.dataset)}] loss {loss.item():.6f}")


def test(model: Any, loader: Any) -> float:
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in loader:
            correct += int((model(data).argmax(dim=1) == target).sum())
    return correct / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--amp", action="store_true")
    args = parser.parse_args()
    train_data, test_data = pictures(640, seed=1), pictures(200, seed=2)
    model = Net()
    train_loader = DataLoader(train_data, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_data, batch_size=100)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    scaler = torch.amp.GradScaler("cpu", enabled=args.amp)
    for epoch in range(1, args.epochs + 1):
        train(args, model, train_loader, optimizer, scaler, epoch)
        accuracy = test(model, test_loader)
        print(f"accuracy {accuracy:.4f}")
        scheduler.step()
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
