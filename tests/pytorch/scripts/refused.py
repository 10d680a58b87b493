"""What torch.distributed cannot do under geomx launch is refused by name."""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from geomx_cli.core.errors import InvalidSettings


@contextlib.contextmanager
def refused(part: str):
    try:
        yield
    except InvalidSettings as error:
        assert part in str(error), error
    else:
        raise AssertionError(part)


if sys.argv[1] == "async":
    with refused("--algo async"):
        dist.init_process_group("nccl")
    sys.exit()
with refused("rank=7"):
    dist.init_process_group("nccl", rank=7)
dist.init_process_group("nccl", init_method="tcp://127.0.0.1:1")
with refused("all_to_all_single of 4 rows in parts of [1, 2]"):
    dist.all_to_all_single(torch.zeros(4), torch.ones(4), [1, 2], [2, 2])
with refused("all_to_all with 3 inputs"):
    dist.all_to_all([torch.zeros(1)] * 2, [torch.ones(1)] * 3)
with refused("worker 0 gives worker 0 1 elements in all_to_all, which expects 2"):  # in both
    dist.all_to_all([torch.zeros(2 - dist.get_rank())] * 2, [torch.ones(1)] * 2)
with refused("torch.distributed.send"):
    dist.send(torch.zeros(4), 1 - dist.get_rank())
with refused("AVG of torch.bool"):
    dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG)
with refused("a tensor of layout sparse_coo"):
    dist.broadcast(torch.eye(3).to_sparse(), 0)
with refused("a tensor of layout sparse_csr"):
    dist.all_reduce(torch.eye(3).to_sparse_csr())
with refused("a value of 5000000 bytes in the store, at most 4194304: '0//large'"):
    dist.distributed_c10d._get_default_store().set("large", "x" * 5_000_000)
with refused("ReduceOp.PREMUL_SUM is not supported"):
    dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(0.5))
two, three = torch.zeros(2), torch.zeros(3)
with refused("reduce_scatter of tensors of [3, 3] elements"):
    dist.reduce_scatter(two, [three, three])
with refused("reduce_scatter of tensors of [2] elements"):
    dist.reduce_scatter(two, [two])
with refused("reduce_scatter with an input of 3 elements (it must have 4"):
    dist.reduce_scatter_tensor(two, three)
with refused("all_gather with an output of 3 elements (it must have 4"):
    dist.all_gather_into_tensor(three, two)
with refused("all_gather of a tensor of 2 elements, with a list of tensors of [2]"):
    dist.all_gather([two], two)
with refused("all_gather with an output of 3 elements"):  # before it waits for the others
    dist.all_gather_into_tensor(three, two, async_op=True)
if dist.get_rank() == 0:  # which the others cannot know
    with refused("scatter of a tensor of 2 elements, with a list of tensors of [1, 3]"):
        dist.scatter(two, [torch.zeros(1), three], 0)
    with refused("gather to 0 of a tensor of 2 elements, with a list of tensors of [2, 3]"):
        dist.gather(two, [two, three], 0)
else:
    dist.gather(two, None, 0)
model = DistributedDataParallel(torch.nn.Linear(2, 1))
with refused("Join with DistributedDataParallel"), Join([model]):
    pass
dist.barrier()
