"""Compares every collective operation of torch.distributed with what it has to result in."""

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
is_gloo = dist.get_backend() == "gloo"
assert size > 1


def given(dtype: torch.dtype, shape: tuple[int, ...] = (3, 7), salt: int = 0) -> list[torch.Tensor]:
    """The tensors of all workers, known to each."""
    found = []
    for each in range(size):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(salt * 100 + each), dtype=torch.float32)
        found.append((values * 10).to(dtype) if dtype != torch.bool else values > 0)
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.dtype == other.dtype and one.shape == other.shape
    assert torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)
for number, dtype in enumerate(DTYPES):
    for shape in ((3, 7), (), (40_000,)):
        all_ = given(dtype, shape, number)
        own = all_[rank].clone()
        for source in (0, size - 1):
            copied = own.clone()
            dist.broadcast(copied, source)
            same(copied, all_[source])
        found = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(found, own)
        for one, other in zip(found, all_, strict=True):
            same(one, other)
        if shape:
            whole = torch.empty((size * shape[0], *shape[1:]), dtype=dtype)
            dist.all_gather_into_tensor(whole, own)
            same(whole, torch.cat(all_))
        gathered = [torch.empty_like(own) for _ in range(size)] if rank == 1 else None
        dist.gather(own, gathered, dst=1)
        for one, other in zip(gathered or (), all_, strict=False):
            same(one, other)
        part = torch.empty_like(own)
        dist.scatter(part, all_ if rank == 1 else None, src=1)
        same(part, all_[rank])
        assert torch.equal(own, all_[rank]), "inputs stay as they are"

transposed = given(torch.float32)[rank].t()  # not contiguous
if not is_gloo:
    dist.all_reduce(transposed)
    torch.testing.assert_close(transposed, sum(given(torch.float32)).t())
    means = given(torch.bfloat16)[rank]
    dist.all_reduce(means, ReduceOp.AVG)
    same(means, (sum(each.float() for each in given(torch.bfloat16)) / size).bfloat16())
    part = torch.empty(2)
    dist.reduce_scatter(part, list(given(torch.float32, (size, 2))[rank].unbind()))
    torch.testing.assert_close(part, sum(given(torch.float32, (size, 2)))[rank])
    dist.reduce_scatter_tensor(part, given(torch.float32, (size, 2))[rank].reshape(-1))
    torch.testing.assert_close(part, sum(given(torch.float32, (size, 2)))[rank])

for dtype in (torch.float32, torch.int64):  # parts of different sizes
    parts = [given(dtype, (3 * each + 1, 2), each) for each in range(size)]  # by the worker that gets it, then by giver
    part = torch.empty_like(parts[rank][0])
    dist.reduce_scatter(part, [each[rank] for each in parts])
    torch.testing.assert_close(part, sum(parts[rank]))
pairs = [(each, each[:2, :3].contiguous()) for each in given(torch.float32)]
found = [[torch.empty_like(tensor) for tensor in pair] for pair in pairs]
dist.all_gather_coalesced(found, list(pairs[rank]))
for pair, each in zip(pairs, found, strict=True):
    same(each[0], pair[0])
    same(each[1], pair[1])

REDUCTIONS = {
    ReduceOp.SUM: lambda values: values.sum(0), ReduceOp.PRODUCT: lambda values: values.prod(0),
    ReduceOp.MIN: lambda values: values.amin(0), ReduceOp.MAX: lambda values: values.amax(0),
}  # fmt: skip
for operation, expected in REDUCTIONS.items():
    for dtype in (torch.float32, torch.float64, torch.int64):
        for shape in ((5,), (30_001,)):
            all_ = torch.stack(given(dtype, shape))
            own = all_[rank].clone()
            work = dist.all_reduce(own, operation, async_op=True)
            work.wait()
            assert work.is_completed()
            torch.testing.assert_close(own, expected(all_).to(dtype))
            own = all_[rank].clone()
            dist.reduce(own, 1, operation)
            if rank == 1:
                torch.testing.assert_close(own, expected(all_).to(dtype))

large = given(torch.float32, (40_000,))
own = large[rank].clone()
leaf = torch.ones(1, requires_grad=True)
leaf.register_hook(lambda _: dist.reduce(own, 1))  # in a backward pass large sums of all workers may be encoded
(leaf * 2).backward()
if rank == 1:
    torch.testing.assert_close(own, sum(large))
elif not is_gloo:
    assert torch.equal(own, large[rank])

works = []
for step in range(100):  # many rounds of one key at a time
    own = torch.full((3,), float(rank + step))
    works.append((dist.all_reduce(own, async_op=True), own, sum(range(size)) + size * step))
for work, own, total in works:
    work.wait()
    assert own.tolist() == [total] * 3

objects = [None] * size
dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank * 1000})
assert [item["rank"] for item in objects] == list(range(size))
words = ["a", {"b": rank}] if rank == 1 else [None, None]
dist.broadcast_object_list(words, src=1)
assert words == ["a", {"b": 1}]
group = dist.new_group(list(range(size)), backend="gloo")
ones = torch.ones(4)
dist.all_reduce(ones, group=group)
assert ones.tolist() == [size] * 4
dist.barrier()
dist.destroy_process_group()
if not is_gloo:  # whose workers may still find the store of the first group at the port
    dist.init_process_group("gloo", rank=rank, world_size=size)
    dist.barrier()
print("all are right")
