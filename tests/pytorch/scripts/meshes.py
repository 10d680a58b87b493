"""Device meshes, DTensors, functional collectives and fully_shard over all workers, compared with one process."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from geomx_cli.core.errors import InvalidSettings

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
assert mesh.get_group().size() == size and mesh.get_local_rank() == rank
assert dist.distributed_c10d._resolve_process_group(mesh.get_group().group_name) is mesh.get_group()


def given(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


whole = given(1, 2 * size + 1, 3)  # in parts of different sizes
divided = distribute_tensor(whole, mesh, [Shard(0)])
assert torch.equal(divided.full_tensor(), whole)
torch.testing.assert_close(divided.sum().full_tensor(), whole.sum())

terms = [given(each, size * 2, 3) for each in range(size)]
partial = DTensor.from_local(terms[rank], mesh, [Partial()])
own = slice(2 * rank, 2 * rank + 2)
torch.testing.assert_close(partial.redistribute(mesh, [Shard(0)]).to_local(), sum(terms)[own])
torch.testing.assert_close(partial.redistribute(mesh, [Replicate()]).to_local(), sum(terms))
found = functional.reduce_scatter_tensor_coalesced([terms[rank], terms[rank] * 2], "sum", [0, 0], mesh)
torch.testing.assert_close(found[1].wait(), sum(terms)[own] * 2)


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 301), torch.nn.ReLU(), torch.nn.Linear(301, 40))


alone, together = model(), model()
for layer in (together[0], together[2], together):
    fully_shard(layer, mesh=mesh)
optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (alone, together)]
for step in range(4):
    batches = [given(100 * step + each, 8, 40) for each in range(size)]
    together(batches[rank]).square().mean().backward()
    alone(torch.cat(batches)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
for one, other in zip(alone.parameters(), together.parameters(), strict=True):
    torch.testing.assert_close(other.full_tensor(), one, rtol=1e-4, atol=1e-5)

if dist.get_backend() == "geomx":
    try:
        init_device_mesh("cpu", (2, size // 2))
    except InvalidSettings as error:
        assert "a device mesh one dimension" in error.hint and "--shards" in error.hint, error
    else:
        raise AssertionError("a group of fewer than all workers")
dist.barrier()
print("all are right")
