"""DistributedDataParallel with --algo esync. Rank 1 is slow, and rank 0 waits for it in collectives of equal steps.

rounds: for each, the difference that this worker has pushed, zeros where it abstained. taken: the sum of its steps.
"""

import threading
import time

import numpy as np
import torch
import torch.distributed as dist
from common import batches, linear, save
from torch.nn.parallel import DistributedDataParallel

import geomx_cli.torch as geomx
from geomx_cli.runtime.algorithms._pseudo_gradient import PseudoGradient

STEPS, RATE = 12, 0.1
dist.init_process_group("gloo")
rank = dist.get_rank()
rounds, contributed = [], []
push, abstain = PseudoGradient.push, PseudoGradient.abstain


def pushed(self, tensors, *rest, **options):
    rounds.append(np.concatenate([self.origin[index] - self.steps.weights[index] for index in tensors]))
    contributed.append(True)
    push(self, tensors, *rest, **options)


def abstained(self, tensors):
    rounds.append(np.concatenate([np.zeros_like(self.origin[index]) for index in tensors]))
    contributed.append(False)
    abstain(self, tensors)


class Deep(torch.autograd.Function):
    """Computes its gradient by passes within passes. They are more than autograd runs in the thread that called it: the
    innermost has a thread of autograd's, as hooks have on a GPU.
    """

    @staticmethod
    def forward(ctx, value, depth):
        ctx.depth = depth
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.depth:
            with torch.enable_grad():
                Deep.apply(torch.zeros((), requires_grad=True), ctx.depth - 1).backward()
        else:
            assert threading.current_thread() is not threading.main_thread()
            found = [torch.zeros(()) for _ in range(2)]
            dist.all_gather(found, torch.tensor(float(rank)))
            assert found == [0, 1], found
        return gradient, None


def vector(tensors):
    return torch.cat([item.detach().reshape(-1) for item in tensors]).numpy().copy()


PseudoGradient.push, PseudoGradient.abstain = pushed, abstained
try:
    DistributedDataParallel(torch.nn.SyncBatchNorm(3))
except geomx.InvalidSettings as error:
    assert "SyncBatchNorm with --algo esync" in str(error)
else:
    raise AssertionError("it exchanges in each pass")
model = linear(seed=rank)
parallel = DistributedDataParallel(model)
try:
    geomx.wrap(parallel, [torch.optim.SGD([each], lr=RATE) for each in model.parameters()])
except geomx.InvalidSettings as error:
    assert "several optimizers with --algo esync" in str(error)
else:
    raise AssertionError("rounds of two optimizers would end at other steps")
try:
    geomx.wrap(torch.nn.Sequential(model, torch.nn.SyncBatchNorm(10)), torch.optim.SGD(model.parameters(), lr=RATE))
except geomx.InvalidSettings as error:
    assert "layer '1' exchanges in each" in str(error)
else:
    raise AssertionError("it exchanges in each pass")
optimizer = geomx.wrap(parallel, torch.optim.SGD(model.parameters(), lr=RATE))
parallel.require_backward_grad_sync = True  # Lightning sets it with manual optimization
start, taken = vector(model.parameters()), 0.0
for step, (images, labels) in enumerate(batches(rank, STEPS), 1):
    loss = torch.nn.functional.cross_entropy(parallel(images), labels)
    if step % 4 == 0:  # amid a pass, as losses are gathered: a change of the weights would end it
        found = [torch.zeros(()) for _ in range(2)]
        dist.all_gather(found, loss.detach())
        assert found[rank] == loss, found
    if step % 4 == 2:
        loss = Deep.apply(loss, 70)
    optimizer.zero_grad()
    own = vector(torch.autograd.grad(loss, model.parameters(), retain_graph=True))
    loss.backward()
    assert (vector(item.grad for item in model.parameters()) == own).all(), "gradients are left as they are"
    taken = taken + RATE * vector(item.grad for item in model.parameters())
    time.sleep(0.05 * rank)
    optimizer.step()
    if step % 6 == 0:
        before = vector(model.parameters())
        for _ in range(3):
            dist.all_reduce(parallel(images).detach())
            assert (vector(model.parameters()) == before).all(), "each worker evaluates one model"
        dist.new_group(None)  # waits in the store
geomx.finish()
dist.barrier()
save(model, start=start, taken=taken, rounds=np.array(rounds), contributed=np.array(contributed))
