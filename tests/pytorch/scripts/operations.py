"""Operations beyond those of collectives.py, compared with what they have to result in: operations.py FOLDER. Under
gloo too, but for means, which it does not have.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
is_gloo = dist.get_backend() != "geomx"
assert size == 3
PAIRS = [(giver, taker) for giver in range(3) for taker in range(3)]

# all_to_all, and gradients through all_gather.
for dtype in (torch.float32, torch.int64):
    rows = {(giver, taker): torch.full((giver * taker, 2), 9 * giver + taker, dtype=dtype) for giver, taker in PAIRS}
    given, expected = ([rows[pair] for pair in PAIRS if pair[side] == rank] for side in (0, 1))
    found = [torch.empty_like(part) for part in expected]
    if not is_gloo:  # which wants equal sizes here
        dist.all_to_all(found, given)
        assert all(map(torch.equal, found, expected))
    output = torch.empty(sum(map(len, expected)), 2, dtype=dtype)
    dist.all_to_all_single(output, torch.cat(given), [*map(len, expected)], [*map(len, given)])
    assert torch.equal(output, torch.cat(expected))
output = torch.empty(3, dtype=torch.float64)
work = dist.all_to_all_single(output, torch.arange(3.0, dtype=torch.float64) + 10 * rank, async_op=True)
work.wait()
assert output.tolist() == [rank, 10 + rank, 20 + rank]
leaf = (torch.arange(3.0) + rank).requires_grad_()
(torch.cat(all_gather(leaf)) ** 2).sum().backward()
assert torch.equal(leaf.grad, 2 * leaf.detach() * size)

if not is_gloo:
    whole = torch.tensor([rank + 1, -rank, 3])
    dist.all_reduce(whole, dist.ReduceOp.AVG)
    assert whole.tolist() == [2, -1, 3]
    whole = torch.tensor([rank, -rank - rank // 2])  # sums 3 and -4
    dist.all_reduce(whole, dist.ReduceOp.AVG)
    assert whole.tolist() == [1, -1], "towards zero"

# Groups of one, and meshes with dimensions of size 1.
alone = [dist.new_group([each]) for each in range(size)][rank]
ones = torch.full((3,), float(rank))
for operation in (dist.all_reduce, lambda each, group: dist.broadcast(each, rank, group=group)):
    operation(ones, group=alone)
gathered = [torch.empty(3)]
dist.all_gather(gathered, ones, group=alone)
assert ones.tolist() == gathered[0].tolist() == [rank] * 3 and alone.size() == 1
dist.barrier(group=alone)
mesh = init_device_mesh("cpu", (1, size, 1), mesh_dim_names=("pp", "dp", "tp"))
dist.all_reduce(ones, group=mesh["dp"].get_group())
dist.all_reduce(ones, group=mesh["tp"].get_group())
assert ones.tolist() == [3] * 3 and mesh["tp"].size() == 1

# Sparse tensors.
indices, values = torch.tensor([[rank, 2]]), torch.tensor([[1.0, 2.0], [0.5, rank]])
none = torch.sparse_coo_tensor(indices[:, :0], values[:0], (5, 2))
for given in (torch.sparse_coo_tensor(indices, values, (5, 2)), none):
    expected = given.to_dense()
    dist.all_reduce(expected)
    dist.all_reduce(given)
    assert given.is_sparse and torch.equal(given.to_dense(), expected)
torch.manual_seed(0)
table = torch.nn.Embedding(20, 4, sparse=True)
parallel = DistributedDataParallel(table)
parallel(torch.tensor([rank, 7, 7])).sum().backward()
expected = torch.zeros(20, 4)
expected[:3] += 1 / 3
expected[7] += 2
torch.testing.assert_close(table.weight.grad.to_dense(), expected)

# Operations in callbacks of others, which are under way at the same time and end in any order.
if not is_gloo:  # whose order of calls is that in time
    futures = []
    for number in range(20):
        given = torch.full((9,), float(number))

        def call(future: torch.futures.Future, number: int = number) -> torch.Tensor:
            time.sleep(0.003 * ((number * 7 + rank * 5) % 4))
            inner = future.value()[0] + number
            dist.all_reduce(inner, async_op=True).get_future().wait()
            return inner

        future = dist.all_reduce(given, async_op=True).get_future().then(call)
        futures.append(future.then(lambda future: dist.all_reduce(future.wait(), async_op=True).get_future().wait()[0]))
    for number, future in enumerate(futures):
        assert future.wait().tolist() == [9 * (size * number + number)] * 9


def train(hook: str, layers: int = 1, **options: float) -> torch.Tensor:
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(layers)))
    parallel = DistributedDataParallel(model, **options)
    if hook == "power":
        parallel.register_comm_hook(power.PowerSGDState(None, 2, start_powerSGD_iter=2), power.powerSGD_hook)
    elif hook:
        parallel._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        parallel(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


plain = train("")
trained = {hook: train(hook) for hook in ("power", "ALLREDUCE", "FP16_COMPRESS")}
torch.testing.assert_close(trained["ALLREDUCE"], plain)
torch.testing.assert_close(trained["FP16_COMPRESS"], plain, rtol=1e-3, atol=1e-4)
if not is_gloo:  # several buckets, whose callbacks are under way at the same time
    several = train("power", 6, bucket_cap_mb=0.005)
    every = [torch.empty_like(several) for _ in range(size)]
    dist.all_gather(every, several)
    assert several.isfinite().all() and all(torch.equal(each, several) for each in every)
torch.save(trained["power"], f"power{rank}.pt")

# The store.
store = dist.distributed_c10d._get_default_store()
stores = [store, *([] if is_gloo else [dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))])]
for store in stores:
    store.set(f"own{rank}", str(rank))
    assert [store.get(f"own{each}") for each in range(size)] == [b"0", b"1", b"2"]
    store.wait(["own0", "own1"], timedelta(seconds=30))
    store.add("sum", rank + 1)
    store.add("here", 1)
    while store.add("here", 0) < size:
        time.sleep(0.01)
    assert store.add("sum", 0) == 6 and store.get("sum") == b"6"
    assert store.compare_set("first", "", "a") == b"a" and store.compare_set("first", "b", "c") == b"a"
    assert store.check(["sum", "first"]) and not store.check(["sum", "none"])
    store.set(f"gone{rank}", "")
    assert store.num_keys() >= 6 and store.delete_key(f"gone{rank}") and not store.check([f"gone{rank}"])
    try:
        store.wait(["never"], timedelta(milliseconds=50))
    except dist.DistStoreError:
        pass
    else:
        raise AssertionError("a value that nobody sets")
    dist.barrier()
private = dist.TCPStore("127.0.0.1", 0, 1, True)
private.set("a", "b")
assert private.get("a") == b"b"

# monitored_barrier.
dist.monitored_barrier()
if rank != 2 and not is_gloo:  # which closes all connections then
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True)
    except RuntimeError as error:
        assert rank or "worker 2 did not reach" in str(error), error
    else:
        raise AssertionError("a worker that is not there")
dist.barrier()

# Checkpoints that are saved while training goes on, with gloo in a group of their own and one after another.
saved, options = [], {"process_group": dist.new_group()} if is_gloo else {}
for number in range(2):
    folder = Path(sys.argv[1]) / str(number)
    saved.append(dcp.async_save({"plain": plain + number}, checkpoint_id=folder, **options))
    for _ in range(10):
        dist.all_reduce(torch.ones(1))
    if is_gloo:
        saved[-1].result()
for each in saved:
    each.result()
loaded = {"plain": torch.zeros_like(plain)}
dcp.load(loaded, checkpoint_id=folder)
assert torch.equal(loaded["plain"], plain + 1)
dist.barrier()
print("all are right")
