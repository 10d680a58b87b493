"""A worker of geomx in recovery_peers.py, whose training geomx.state saves."""

import time

import torch
from recovery_task import BATCH, MOMENTUM, RATE, Worker, decay, network
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import geomx_cli.torch as geomx


def main() -> None:
    geomx.init()
    worker, model = Worker(geomx.global_rank()), network()
    optimizer = geomx.wrap(model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    images, labels = torch.from_numpy(worker.images), torch.from_numpy(worker.labels)
    data = TensorDataset(torch.arange(len(images)), images, labels)
    loader = DataLoader(geomx.shard(data), BATCH, shuffle=True)
    step = 0
    # recovery: begin
    state = geomx.state(model=model, optimizer=optimizer, schedule=schedule)
    for _ in state.epochs(worker.steps // worker.epoch):
        for chosen, pixels, wanted in state.batches(loader):
            # recovery: end
            time.sleep(worker.pause)
            optimizer.zero_grad()
            functional.cross_entropy(model(pixels), wanted).backward()
            optimizer.step()
            step, (rate,) = schedule.last_epoch, schedule.get_last_lr()
            schedule.step()
            worker.done(step, rate, chosen)
    geomx.finish()
    worker.end([item.detach().numpy() for item in model.parameters()])


if __name__ == "__main__":
    main()
