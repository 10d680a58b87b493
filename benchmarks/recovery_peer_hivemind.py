"""A peer of hivemind in recovery_peers.py, with local updates. argv: RANK.

A peer that comes back downloads parameters, optimizer and schedule from the others by itself. hivemind has no place in
the data; it advises to shuffle differently in each peer, so a new life begins another order.
"""

import sys

import hivemind
import torch
from peer_hivemind import joined
from recovery_task import BATCH, MOMENTUM, RATE, ROUND, WORKERS, Worker, decay, network
from torch.nn import functional


def main(rank: int) -> None:
    worker, model = Worker(rank), network()
    dht = joined(rank, worker.folder / "dht.json")
    optimizer = hivemind.Optimizer(
        dht=dht, run_id="recovery", batch_size_per_step=BATCH, target_batch_size=WORKERS * ROUND * BATCH,
        params=model.parameters(), optimizer=lambda items: torch.optim.SGD(items, lr=RATE, momentum=MOMENTUM),
        scheduler=lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lambda epoch: decay(epoch * ROUND)),
        use_local_updates=True, matchmaking_time=1.0, averaging_timeout=10.0, load_state_timeout=30.0,
    )  # fmt: skip
    worker.meet()
    place = step = 0
    while (before := optimizer.local_epoch) < worker.steps // ROUND:
        chosen, images, labels = worker.batch(place)
        optimizer.zero_grad()
        functional.cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels)).backward()
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        place += 1
        step = 0 if optimizer.local_epoch > before else step + 1
        worker.done(before * ROUND + min(step, ROUND - 1), rate, chosen)
        if optimizer.local_epoch == before + 1:
            worker.keep()
    worker.end([item.detach().numpy() for item in model.parameters()])
    optimizer.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
