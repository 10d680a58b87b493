"""A replica of torchft in recovery_peers.py. argv: "local-sgd" or "diloco", RANK, and the lighthouse's URL.

As in torchft's examples: a replica that comes back takes its state from another one. Each replica saves its place in
the data itself, after each step, as their comments advise.
"""

import sys
from datetime import timedelta
from typing import Any

import torch
from recovery_task import MOMENTUM, RATE, ROUND, Worker, decay, network
from torch.distributed import TCPStore
from torch.nn import functional
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

LIMIT = timedelta(seconds=10)


def main(mode: str, rank: int, lighthouse: str) -> None:
    worker, model = Worker(rank), network()
    inner = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, decay)
    healed = False
    place = 0

    # recovery: begin
    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "inner": inner.state_dict(), "schedule": schedule.state_dict()}

    def load_state_dict(found: dict[str, Any]) -> None:
        # recovery: end
        nonlocal healed
        healed = True
        # recovery: begin
        model.load_state_dict(found["model"])
        inner.load_state_dict(found["inner"])
        schedule.load_state_dict(found["schedule"])

    file = worker.folder / f"place{rank}"
    if file.exists():
        place = int(file.read_text())
    # recovery: end
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT), load_state_dict=load_state_dict, state_dict=state_dict,
        min_replica_size=1, use_async_quorum=False, init_sync=False, rank=0, world_size=1, timeout=LIMIT,
        quorum_timeout=6 * LIMIT, connect_timeout=LIMIT, store_addr="127.0.0.1", store_port=store.port,
        hostname="127.0.0.1", lighthouse_addr=lighthouse, replica_id=f"replica{rank}",
    )  # fmt: skip
    worker.meet()
    algorithm = (
        DiLoCo(manager, [model], inner, outer, sync_every=ROUND)
        if mode == "diloco" else LocalSGD(manager, model, inner, sync_every=ROUND)
    )  # fmt: skip
    step = 0
    with algorithm:
        while (before := manager.current_step()) < worker.steps // ROUND:
            chosen, images, labels = worker.batch(place)
            inner.zero_grad()
            functional.cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels)).backward()
            rate, healed = schedule.get_last_lr()[0], False
            inner.step()  # after ROUND of them torchft exchanges, in here
            schedule.step()
            place, step = place + 1, step + 1
            # recovery: begin
            half = file.with_suffix(".new")
            half.write_text(str(place))
            half.replace(file)
            # recovery: end
            worker.done(before * ROUND + step % ROUND, rate, chosen)
            if manager.current_step() > before and not healed:
                worker.keep()
    worker.end([item.detach().numpy() for item in model.parameters()])
    manager.shutdown(wait=False)
    del store


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
