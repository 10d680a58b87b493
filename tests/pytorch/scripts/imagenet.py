"""Image classification on several processes, in the way of public examples for torchrun."""

import argparse
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class DummyImages(Dataset):
    """Random images in ten classes, of which each has a colour."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 10, (count,), generator=generator)
        self.images = torch.randn(count, 3, 12, 12, generator=generator)
        self.images[:, 0] += self.labels[:, None, None] / 3

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, count):
        self.sum += value * count
        self.count += count

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM)
        self.sum, self.count = total.tolist()

    @property
    def average(self):
        return self.sum / self.count


def train(loader, model, criterion, optimizer, scaler, args):
    model.train()
    for images, labels in loader:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.amp):
            loss = criterion(model(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()


@torch.no_grad()
def validate(loader, model, criterion):
    model.eval()
    losses, right = AverageMeter(), AverageMeter()
    for images, labels in loader:
        scores = model(images)
        losses.update(criterion(scores, labels).item(), len(labels))
        right.update((scores.argmax(1) == labels).float().mean().item(), len(labels))
    losses.all_reduce()
    right.all_reduce()
    return losses.average, right.average


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--dist-backend", default="gloo")
    parser.add_argument("--output", default="checkpoint.pt")
    args = parser.parse_args()

    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    dist.init_process_group(args.dist_backend, init_method="env://", world_size=world_size, rank=rank)
    random.seed(1)
    torch.manual_seed(1)

    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 10),
    )  # fmt: skip
    model = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=args.amp)

    train_set, validation_set = DummyImages(640, 1), DummyImages(256, 2)
    sampler = DistributedSampler(train_set, seed=3)
    batch_size = args.batch_size // world_size
    loader = DataLoader(train_set, batch_size, sampler=sampler)
    validation = DataLoader(validation_set, batch_size, sampler=DistributedSampler(validation_set, shuffle=False))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train(loader, model, criterion, optimizer, scaler, args)
        loss, accuracy = validate(validation, model, criterion)
        scheduler.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.6f} accuracy {accuracy:.6f}", flush=True)
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, args.output)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
