"""Worker 0 takes a few steps, and waits in `finish` for worker 1, which takes ten times as many: KILL, 0 or 1.

With KILL, the first life of worker 0 ends by SIGKILL while it waits.
"""

import hashlib
import os
import signal
import sys
import threading
import time

import torch

import geomx_cli.torch as geomx

torch.manual_seed(0)
geomx.init()
model = torch.nn.Linear(4, 1)
optimizer = geomx.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
state = geomx.state(model=model, optimizer=optimizer)
first = geomx.global_rank() == 0
for _ in state.epochs(1):
    for batch in state.batches([torch.full((2, 4), index / 100) for index in range(4 if first else 40)]):
        optimizer.zero_grad()
        (model(batch) - 1).square().mean().backward()
        optimizer.step()
        time.sleep(0.05)
if first and sys.argv[1] == "1" and os.environ["GEOMX_INCARNATION"] == "0":
    threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGKILL)).start()
geomx.finish()
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
print("FOUND", hashlib.sha256(weights).hexdigest(), state.resumed)
