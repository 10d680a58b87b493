"""Sums of sparse tensors, as the gradients of embeddings: their elements are exchanged, and no zeros."""

from typing import Any

import numpy as np
import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array
from geomx_cli.runtime.frontends.torch.reductions import mean, wide
from geomx_cli.runtime.frontends.torch.tensor_bytes import of_bytes, read_bytes

__all__ = ["SparseSum"]


class SparseSum:
    """The sum of a tensor (COO) over all workers, in rank order. count: of its elements, as 8 bytes: workers gather
    these first, then `elements`. Raises InvalidSettings for a worker that has more elements than fit.
    """

    def __init__(self, tensor: Any) -> None:
        self._own = tensor.detach().cpu().coalesce()
        self.count = np.array([self._own._nnz()], "<i8").view(np.uint8)
        values = self._own.values()
        self._width = values.shape[1:].numel() * values.element_size()

    def elements(self, counts: Array) -> Array:
        """This worker's elements, as many bytes in all workers. counts: `count` of each."""
        found = np.zeros(max(1, int(self._numbers(counts).max())) * self._size, np.uint8)
        for start, part in ((0, self._own.values()), (self._own._nnz() * self._width, self._own.indices())):
            found[start : start + part.numel() * part.element_size()] = read_bytes(part)
        return found

    def sum(self, counts: Array, rows: Array, name: str) -> Any:
        """The sum, or for "AVG" the mean. rows: `elements` of each worker."""
        values, indices = [], []
        for count, row in zip(self._numbers(counts), rows, strict=True):
            parts = row[: count * self._width].copy(), row[count * self._width : count * self._size].copy()
            values.append(of_bytes(parts[0], self._own.dtype).view(count, *self._own.values().shape[1:]))
            indices.append(of_bytes(parts[1], torch.int64).view(self._own.sparse_dim(), count))
        given = torch.cat(values).to(wide(self._own.dtype))
        total = torch.sparse_coo_tensor(torch.cat(indices, 1), given, self._own.shape).coalesce()
        result = total.values() if name == "SUM" else mean(total.values(), len(rows))
        return torch.sparse_coo_tensor(total.indices(), result.to(self._own.dtype), self._own.shape, is_coalesced=True)

    @property
    def _size(self) -> int:
        """Bytes of an element with its indices."""
        return int(self._width + 8 * self._own.sparse_dim())

    def _numbers(self, counts: Array) -> Array:
        found: Array = np.ascontiguousarray(counts).view("<i8")[:, 0]
        room = self._own.shape[: self._own.sparse_dim()].numel()
        for rank, count in enumerate(found):
            if not 0 <= count <= room:
                what = f"worker {rank} gives {count} elements of a sparse tensor that has room for {room}"
                raise InvalidSettings(what, "let all workers give tensors of equal shapes")
        return found
