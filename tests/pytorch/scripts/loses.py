"""Constant gradients, of the worker's rank plus 1. One worker dies in step 5: loses.py HOW RANK [STEPS].

HOW: "before" the step, or "within": while it sends its gradient of `late`, before that of `early` is computed; or it
"raises" an exception. STEPS: of the others.
"""

import os
import signal
import sys

import torch

import geomx_cli.torch as geomx

STEPS, AT = 12, 5
how, lost = sys.argv[1], int(sys.argv[2])
geomx.init()
rank, step = geomx.global_rank(), 0
count = STEPS if rank == lost or len(sys.argv) < 4 else int(sys.argv[3])
net = torch.nn.Module()
net.early = torch.nn.Parameter(torch.zeros(10))
net.late = torch.nn.Parameter(torch.zeros(1_500_000 if how == "within" else 10))
descent = geomx.wrap(net, torch.optim.SGD(net.parameters(), lr=0.5))


def die(where: str) -> None:
    if (step, rank, how) == (AT, lost, where):
        os.kill(os.getpid(), signal.SIGKILL)


net.late.register_post_accumulate_grad_hook(lambda _: die("within"))
for step in range(count):
    descent.zero_grad()
    die("before")
    if (step, rank, how) == (AT, lost, "raises"):
        raise ValueError("a batch is damaged")
    losses = [(weight * float(rank + 1)).sum() for weight in (net.early, net.late)]
    sum(losses).backward()  # from the last term on
    descent.step()
    geomx.report(loss=sum(losses))
geomx.finish()
torch.save(net.state_dict(), f"{os.environ['GEOMX_OUTPUT_DIR']}/model.pt")
