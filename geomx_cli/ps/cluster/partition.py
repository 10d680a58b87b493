"""Divides tensors over the servers so that these hold equally many bytes, and cuts them into slices.

The rank-0 root places slices on the roots, the rank-0 local server on those of its party; all others learn the
placement when the tensor is declared. Key names play no part, so no pattern of names can overload one server.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.net.wire import DTYPE_NAMES, EVERY, ITEM_SIZES, MAX_ELEMENTS

__all__ = ["LONGEST", "NEAR", "Partition", "Placement", "Slice", "Tensor"]

MAX_KEYS = 1_000_000
MAX_SLICES, MAX_SLICES_OF_ALL = 100_000, 1_000_000
NEAR = 524_288
"""Elements in a slice where all members share the roots' host: a slice costs each process time, whatever its size."""
FAR, FAR_MIN = 262_144, 16_384
"""Elements in a slice elsewhere, at most and at least: the shorter, the sooner a slow link is busy both ways."""
FAR_URGENT = 65_536
"""Elements in a slice elsewhere, at most, if single layers are waited for: nothing overtakes a slice that is under way,
and each costs all processes time, so they are longer otherwise."""
MAX_SCALE = 4
"""How many times longer a slice elsewhere may be if it is sent encoded: its bytes are few, and its cost is the same."""
FEW_BYTES, MAX_SCALE_OF_FEW = 30.0, 8
"""The same if its bytes are at least FEW_BYTES times fewer."""
LONGEST = max(NEAR, MAX_SCALE_OF_FEW * FAR)
"""Elements in a slice, at most, if the length is not given."""
SLICES_PER_ROOT = 8
"""Slices of a tensor that each root should have elsewhere, within these limits: so they are loaded alike."""
LEAST, LEAST_ENCODED = 256, 4096
"""Elements that a server gets of a tensor that is divided, at least; the second with a codec, which may need chunks."""
SLACK = 0.02
"""A tensor is not divided if the bytes of no server then exceed the mean by more than this part."""


@dataclass(frozen=True)
class Tensor:
    """A tensor by name: `size` elements of `dtype` (wire.DTYPE_NAMES), in rows of `row` elements.

    shard: the rank, in its party, of the only worker of each party that contributes; EVERY: all do.
    """

    name: str
    size: int
    dtype: str
    row: int = 1
    shard: int = EVERY

    def __str__(self) -> str:
        whose = "" if self.shard == EVERY else f", contributed by worker {self.shard} of each party"
        return f"{self.size} elements of {self.dtype} in rows of {self.row}{whose}"


@dataclass(frozen=True)
class Slice:
    """Elements [offset, offset + length) of a tensor; owned by `root`, handled by `server` of the own plane."""

    offset: int
    length: int
    root: int
    server: int

    @property
    def end(self) -> int:
        """The offset after the last element."""
        return self.offset + self.length


@dataclass(frozen=True)
class Placement:
    """The placement of a declared tensor."""

    key: int
    tensor: Tensor
    slices: tuple[Slice, ...]

    @cached_property
    def row(self) -> int:
        """Elements in a row if every slice has whole rows; else 0, and all elements have to be sent together."""
        row = self.tensor.row
        return 0 if any(item.offset % row or item.length % row for item in self.slices) else row

    def shapes(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """For each slice, by key and index: its root, offset and elements, its dtype's code, the elements in a row and
        of the tensor, and the shard.
        """
        tensor, row = self.tensor, self.row or 1
        dtype = DTYPE_NAMES.index(tensor.dtype)
        return {
            (self.key, index): (item.root, item.offset, item.length, dtype, row, tensor.size, tensor.shard)
            for index, item in enumerate(self.slices)
        }


class Partition:
    """Cuts and places each tensor when it is first declared. Declaring it again changes nothing.

    slice_elements: maximum per slice; 0 chooses a size suited to servers across a wide-area link, where elements are
    sent in `ratio` times fewer bytes. urgent: a step waits for single layers (--p3).
    """

    def __init__(self, slice_elements: int, servers: int, ratio: float = 1.0, *, urgent: bool = False) -> None:
        self._slice_elements = min(slice_elements, MAX_ELEMENTS)
        self._far = FAR_URGENT if urgent else FAR
        self._scale = MAX_SCALE_OF_FEW if ratio >= FEW_BYTES else max(1, int(min(ratio, MAX_SCALE)))
        self._least = LEAST if ratio <= 1 else LEAST_ENCODED
        self._servers = servers
        self._load = [0] * servers
        self._placed: dict[str, Placement] = {}
        self._slices = 0

    def declare(self, tensor: Tensor) -> Placement:
        """The placement of `tensor` over the roots. Raises InvalidSettings if it was declared with another size, dtype
        or shard.
        """
        known = self._placed.get(tensor.name)
        if known is None:
            known = self._place(tensor)
            self._placed[tensor.name] = known
        if known.tensor != tensor:
            raise InvalidSettings(
                f"key {tensor.name!r} has {tensor} here, but {known.tensor} where it was first declared",
                "every worker initialises the same keys with the same shapes and dtypes",
            )
        return known

    def assign(self, sizes: Sequence[int]) -> list[int]:
        """Assign each size in turn to the least loaded server (lowest rank among equals)."""
        chosen = []
        for size in sizes:
            server = self._load.index(min(self._load))
            self._load[server] += size
            chosen.append(server)
        return chosen

    def _place(self, tensor: Tensor) -> Placement:
        if tensor.dtype not in DTYPE_NAMES:
            raise InvalidSettings(f"key {tensor.name!r} is {tensor.dtype}", f"the store holds {', '.join(DTYPE_NAMES)}")
        if not 0 < tensor.row <= max(1, tensor.size) or tensor.size % tensor.row:
            raise InvalidSettings(
                f"key {tensor.name!r} has {tensor.size} elements in rows of {tensor.row}", "all rows are equally long"
            )
        share = -(-tensor.size // (SLICES_PER_ROOT * self._servers))
        # at least a whole row, unless that is long, or rows cannot be sent separately
        scale, far = self._scale, max(self._far, min(tensor.row, FAR))
        most = self._slice_elements or min(scale * far, max(FAR_MIN, tensor.row, scale * share))
        if not 0 < tensor.size <= MAX_SLICES * most or len(self._placed) >= MAX_KEYS:
            raise InvalidSettings(
                f"key {tensor.name!r} has {tensor.size} elements",
                f"it must have at least one and at most {MAX_SLICES} slices; there may be {MAX_KEYS} keys",
            )
        unit = tensor.row if tensor.row <= most else 1
        cut = [(root, _cut(units, most // unit)) for root, units in self._divide(tensor, unit)]
        # in turn, so that all servers have work from the first slice on
        pieces = [
            (root, unit * lengths[turn])
            for turn in range(max(len(lengths) for _, lengths in cut))
            for root, lengths in cut
            if turn < len(lengths)
        ]
        self._slices += len(pieces)
        if self._slices > MAX_SLICES_OF_ALL:
            raise InvalidSettings(f"key {tensor.name!r} would make {self._slices} slices", "set a larger slice size")
        offsets = itertools.accumulate((length for _, length in pieces), initial=0)
        slices = tuple(Slice(o, n, root, root) for o, (root, n) in zip(offsets, pieces, strict=False))
        return Placement(len(self._placed), tensor, slices)

    def _divide(self, tensor: Tensor, unit: int) -> list[tuple[int, int]]:
        """Give the tensor's units to the least loaded servers, so that their loads become as equal as they can.

        Returns (server, units), by server, and adds the bytes to the loads.
        """
        weight, units = unit * ITEM_SIZES[tensor.dtype], tensor.size // unit
        order = sorted(range(self._servers), key=lambda server: self._load[server])
        level, count = float(self._load[order[0]] + units * weight), 1
        mean = (sum(self._load) + units * weight) / self._servers
        if level > (1 + SLACK) * mean:
            for chosen in range(2, min(self._servers, tensor.size // max(self._least, unit)) + 1):
                # the load of the least loaded `chosen` servers, if they share the tensor
                shared = (sum(self._load[server] for server in order[:chosen]) + units * weight) / chosen
                if shared - self._load[order[chosen - 1]] < self._least * ITEM_SIZES[tensor.dtype]:
                    break
                level, count = shared, chosen
        shares = [max(0.0, level - self._load[server]) / weight for server in order[:count]]
        bounds = [round(end) for end in itertools.accumulate(shares)]
        found = [(order[index], end - start) for index, (start, end) in enumerate(itertools.pairwise([0, *bounds]))]
        for server, given in found:
            self._load[server] += given * weight
        return sorted((server, given) for server, given in found if given)


def _cut(units: int, most: int) -> list[int]:
    """Cut into as few parts of at most `most` as possible, of near equal size."""
    count = -(-units // most)
    return [units // count + (index < units % count) for index in range(count)]
