"""A worker of DistributedDataParallel in recovery_peers.py. argv: SECONDS between two snapshots, or 0 for none."""

import sys
import time

import torch
import torch.distributed as dist
from recovery_task import MOMENTUM, RATE, Worker, decay, network
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def main(every: float) -> None:
    dist.init_process_group("gloo")
    worker, model = Worker(dist.get_rank()), DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    first, saved = 0, time.monotonic()
    # recovery: begin
    snapshot = worker.folder / "snapshot.pt"
    if snapshot.exists():
        found = torch.load(snapshot)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        schedule.load_state_dict(found["schedule"])
        first = found["step"]
    # recovery: end
    for step in range(first, worker.steps):
        # recovery: begin
        if every and worker.rank == 0 and time.monotonic() - saved >= every:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            half = snapshot.with_suffix(".new")
            torch.save({**states, "schedule": schedule.state_dict(), "step": step}, half)
            half.replace(snapshot)
            saved = time.monotonic()
        # recovery: end
        chosen, images, labels = worker.batch(step)
        optimizer.zero_grad()
        functional.cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels)).backward()
        optimizer.step()
        worker.done(step, schedule.get_last_lr()[0], chosen)
        schedule.step()
    worker.end([item.detach().numpy() for item in model.parameters()])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(float(sys.argv[1]))
