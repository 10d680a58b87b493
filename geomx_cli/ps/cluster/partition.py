"""Divides tensors over the servers so that the servers hold equally many bytes, and cuts tensors into slices.

The rank-0 root places slices on the roots. The rank-0 local server places slices on the servers of its party. All
others learn the placement when the tensor is declared. Key names play no part, so no pattern of names can overload one
server.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from geomx_cli.contract.config import NodeSettings
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.cluster.members import Member, ServerMembers
from geomx_cli.ps.net.wire import DTYPE_NAMES, EVERY, ITEM_SIZES, MAX_ELEMENTS, Header

__all__ = ["LONGEST", "NEAR", "Partition", "Placement", "Placements", "Slice", "Tensor"]

MAX_SLICES, MAX_SLICES_OF_ALL = 16_384, 1_000_000
"""Limits on the slices of a tensor, and of all tensors: while a server cuts a tensor, it does nothing else."""
OF_ONE, OF_PARTY = MAX_SLICES_OF_ALL // 4, MAX_SLICES_OF_ALL // 2
"""Limits on the slices that one process is the first to declare, and that a party's processes together are the first to
declare. So a process that declares without end leaves room to its party, and the party to other parties."""
NEAR = 524_288
"""Elements in a slice if all members run on the roots' host. A slice costs each process time, whatever its size."""
FAR, FAR_MIN = 262_144, 16_384
"""The most and the fewest elements in a slice if some members run on other hosts. The shorter the slices, the sooner a
slow link is busy in both directions.
"""
FAR_URGENT = 65_536
"""The most elements in a slice then, if steps wait for single layers (--p3). Nothing overtakes a slice that is
under way, so short slices help. Without --p3 slices are longer, because each costs all processes time.
"""
MAX_SCALE = 4
"""How many times longer such a slice may be if it is sent encoded: it has few bytes, and costs the same time."""
FEW_BYTES, MAX_SCALE_OF_FEW = 30.0, 8
"""The same, if the encoding makes the bytes at least FEW_BYTES times fewer."""
LONGEST = max(NEAR, MAX_SCALE_OF_FEW * FAR)
"""The most elements in a slice, if the length is not given."""
SLICES_PER_ROOT = 8
"""Slices of a tensor that each root should have then, within the limits above, so that roots are loaded alike."""
LEAST, LEAST_ENCODED = 256, 4096
"""The fewest elements of a divided tensor that a server gets; the second with a codec, which may need chunks."""
MAX_ANSWERED = 65_536
"""Limit on the slices in one answer. An answer is made at once, and other members wait meanwhile. A slice takes up to
21 bytes of the answer.
"""
SLACK = 0.02
"""A tensor is not divided if no server's bytes then exceed the mean by more than this fraction."""


@dataclass(frozen=True)
class Tensor:
    """A tensor by name.

    size: number of elements.
    dtype: their dtype (wire.DTYPE_NAMES).
    row: elements in a row.
    shard: the rank, in its party, of the only worker of each party that contributes. EVERY: all workers contribute.
    """

    name: str
    size: int
    dtype: str
    row: int = 1
    shard: int = EVERY

    def __str__(self) -> str:
        whose = "" if self.shard == EVERY else f", contributed by worker {self.shard} of each party"
        return f"{self.size} elements of {self.dtype} in rows of {self.row}{whose}"


class Slice(NamedTuple):
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
        """Elements in a row if every slice has whole rows. Otherwise 0, and all elements have to be sent together."""
        row = self.tensor.row
        return 0 if any(item.offset % row or item.length % row for item in self.slices) else row

    @cached_property
    def encoded(self) -> msgspec.Raw:
        """Its entry in an answer (bodies.py), encoded once: every member declares the tensor, and some repeat it."""
        return msgspec.Raw(msgspec.msgpack.encode((self.key, self.slices)))

    def has(self, header: Header) -> bool:
        """Whether the slice in a header of this key is one of the slices here."""
        if header.slice >= len(self.slices):
            return False
        own, tensor = self.slices[header.slice], self.tensor
        found = (header.root, header.offset, header.length, header.row, header.size, header.shard)
        right = (own.root, own.offset, own.length, self.row or 1, tensor.size, tensor.shard)
        return found == right and DTYPE_NAMES[header.dtype] == tensor.dtype


class Partition:
    """Cuts and places each tensor when it is first declared. Declaring it again changes nothing.

    slice_elements: the most elements in a slice. 0 chooses a size that suits servers across a wide-area link.
    ratio: how many times fewer bytes elements have when sent.
    urgent: whether a step waits for single layers (--p3).
    """

    def __init__(self, slice_elements: int, servers: int, ratio: float = 1.0, *, urgent: bool = False) -> None:
        self._slice_elements = min(slice_elements, MAX_ELEMENTS)
        self._far = FAR_URGENT if urgent else FAR
        self._scale = MAX_SCALE_OF_FEW if ratio >= FEW_BYTES else max(1, int(min(ratio, MAX_SCALE)))
        self._least = LEAST if ratio <= 1 else LEAST_ENCODED
        self._servers = servers
        self._load = [0] * servers
        self._placed: dict[str, Placement] = {}
        self._slices = Counter[str]()

    def declare(self, tensor: Tensor, by: str = "", party: str = "") -> Placement:
        """The placement of `tensor` over the roots.

        by: the process that declares it.
        party: the local server that relays the declaration, "" for none.
        Raises InvalidSettings if it was declared with another size, dtype or shard, or if there would be too many
        slices. Then nothing changes.
        """
        known = self._placed.get(tensor.name)
        if known is None:
            known = self._place(tensor, by, party)
            self._placed[tensor.name] = known
        if known.tensor != tensor:
            raise InvalidSettings(
                f"key {tensor.name!r} has {tensor} here, but {known.tensor} where it was first declared",
                "every worker initialises the same keys with the same shapes and dtypes",
            )
        return known

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Discard all declarations in this block if the block raises an error."""
        load, slices, count = self._load.copy(), self._slices.copy(), len(self._placed)
        try:
            yield
        except BaseException:
            self._load, self._slices = load, slices
            for name in list(self._placed)[count:]:
                del self._placed[name]
            raise

    def assign(self, sizes: Sequence[int]) -> list[int]:
        """Assign each size in turn to the least loaded server (lowest rank among equals)."""
        chosen = []
        for size in sizes:
            server = self._load.index(min(self._load))
            self._load[server] += size
            chosen.append(server)
        return chosen

    def _place(self, tensor: Tensor, by: str, party: str) -> Placement:
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
        if not 0 < tensor.size <= MAX_SLICES * most:
            raise InvalidSettings(
                f"key {tensor.name!r} has {tensor.size} elements",
                f"it must have at least one and at most {MAX_SLICES} slices",
            )
        unit = tensor.row if tensor.row <= most else 1
        divided = self._divide(tensor, unit)
        self._check_count(tensor, by, party, sum(-(-units // (most // unit)) for _, units in divided))
        cut = [(root, _cut(units, most // unit)) for root, units in divided]
        # in turn, so that all servers have work from the first slice on
        pieces = [
            (root, unit * lengths[turn])
            for turn in range(max(len(lengths) for _, lengths in cut))
            for root, lengths in cut
            if turn < len(lengths)
        ]
        offsets = itertools.accumulate((length for _, length in pieces), initial=0)
        slices = tuple(Slice(o, n, root, root) for o, (root, n) in zip(offsets, pieces, strict=False))
        for server, units in divided:
            self._load[server] += units * unit * ITEM_SIZES[tensor.dtype]
        self._slices.update(dict.fromkeys({"", by, party}, len(slices)))
        return Placement(len(self._placed), tensor, slices)

    def _check_count(self, tensor: Tensor, by: str, party: str, count: int) -> None:
        """Raise InvalidSettings if `count` slices are too many. It names the process that has declared most."""
        limits = ((by, OF_ONE), (party, OF_PARTY), ("", MAX_SLICES_OF_ALL))
        over = next(((who, most) for who, most in limits if self._slices[who] + count > most), None)
        if over is None:
            return
        who, most = over
        if not who:
            who = max((other for other in self._slices if other), key=self._slices.__getitem__, default="")
        first = f", {self._slices[who]} of them declared first by {who}" if who else ""
        raise InvalidSettings(
            f"key {tensor.name!r} has {tensor.size} elements, {count} slices, and other keys have"
            f" {self._slices['']} already{first}; {most} is the limit",
            "set a larger slice size, or find out what declares so many",
        )

    def _divide(self, tensor: Tensor, unit: int) -> list[tuple[int, int]]:
        """Divide the tensor's units among the least loaded servers, so that the loads become as equal as possible.

        Returns (server, units), by server.
        """
        # Pour the tensor onto the servers' loads like water onto stairs: the lowest `count` loads rise to one level.
        # More servers mean smaller pieces, so another server is added only while all get their least share.
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
        return sorted((server, given) for server, given in found if given)


def _cut(units: int, most: int) -> list[int]:
    """Cut into as few parts of at most `most` as possible, of near equal size."""
    count = -(-units // most)
    return [units // count + (index < units % count) for index in range(count)]


class Placements:
    """The servers to which the slices of declared tensors go. The rank-0 root places slices on the roots. The rank-0
    local server then places them on the servers of its party.

    ratio: returns how many times fewer bytes the codec of exchanges with the roots sends. Called once, at the first
        declaration.
    rank: this server's rank in the plane of its members.
    """

    def __init__(
        self, settings: NodeSettings, members: ServerMembers, *, is_root: bool, ratio: Callable[[], float],
        rank: Callable[[], int],
    ) -> None:  # fmt: skip
        self._settings = settings
        self._members = members
        self._is_root = is_root
        self._ratio = ratio
        self._rank = rank
        self._partition: Partition | None = None
        self._placed: dict[str, Placement] = {}
        self._by_key: dict[int, Placement] = {}

    def has_declared(self, header: Header) -> bool:
        """Whether the slice in a header matches a declaration. Only the first server of a plane receives declarations.
        So the others accept any slice, except that a root accepts only its own.
        """
        if self._rank() != 0:
            return not self._is_root or header.root == self._rank()
        placement = self._by_key.get(header.key)
        return placement is not None and placement.has(header)

    def place(self, body: Body, sender: Member) -> Body:
        """At the root: place the tensors of a declaration, and return the answer. Raises InvalidSettings if a tensor
        was declared differently before or is listed twice, or if the sender's party has no worker for its shard. Also
        raises it if there are more slices than an answer may have. Then nothing has changed.
        """
        tensors, by, partition = self.tensors_of(body, sender), body["by"], self._own_partition()
        placements, count = list[Placement](), 0
        with partition.all_or_none():
            for tensor in tensors:
                placements.append(partition.declare(tensor, by, sender.process if sender.process != by else ""))
                count += len(placements[-1].slices)
                if count > MAX_ANSWERED:
                    what = f"the keys of one declaration have more than {MAX_ANSWERED} slices"
                    raise InvalidSettings(what, "initialise fewer keys at once, or set a larger slice size")
        return self._keep(placements)

    def assign(self, body: Body, sender: Member) -> Body:
        """At a local server: assign the slices that the root has placed to the servers of the party. Returns the
        answer.

        body: a declaration, with the root's `placements`.
        """
        tensors = self.tensors_of(body, sender)
        for tensor, (key, slices) in zip(tensors, body["placements"], strict=True):
            if tensor.name not in self._placed:
                servers = self._own_partition().assign([length for _, length, _, _ in slices])
                placed = [Slice(o, n, root, own) for (o, n, root, _), own in zip(slices, servers, strict=True)]
                self._placed[tensor.name] = Placement(key, tensor, tuple(placed))
        return self._keep([self._placed[tensor.name] for tensor in tensors])

    def known(self, tensors: Sequence[Tensor]) -> Body | None:
        """At a local server: the answer to a declaration whose tensors are all assigned. Otherwise None."""
        found = [self._placed.get(tensor.name) for tensor in tensors]
        known = [item for item, tensor in zip(found, tensors, strict=True) if item and item.tensor == tensor]
        return self._keep(known) if len(known) == len(tensors) else None

    def tensors_of(self, body: Body, sender: Member) -> list[Tensor]:
        """The tensors of a declaration. Raises InvalidSettings for a tensor that is listed twice or has a wrong shard.
        """
        tensors, names = [Tensor(*fields) for fields in body["tensors"]], set[str]()
        for tensor in tensors:
            if tensor.name in names:
                what = f"key {tensor.name!r} is listed twice in one declaration"
                raise InvalidSettings(what, "declare each key once")
            names.add(tensor.name)
        if not self._members.is_party(sender.rank):  # otherwise its local server has checked them
            self._check_shards(tensors)
        return tensors

    def _check_shards(self, tensors: Sequence[Tensor]) -> None:
        local, is_flat = self._settings.local, self._settings.upper is None
        count = local.workers if local is not None and not is_flat else 0
        for tensor in tensors:
            if tensor.shard != EVERY and tensor.shard >= count:
                what = f"key {tensor.name!r} is contributed by worker {tensor.shard} of each party"
                have = "a flat cluster has no parties" if is_flat else f"this one has {count}"
                raise InvalidSettings(f"{what}, and {have}", "divide the model into as many shards in each party")

    def _keep(self, placements: Sequence[Placement]) -> Body:
        self._by_key.update((item.key, item) for item in placements)
        encoded: list[Any] = [item.encoded for item in placements]
        return {"placements": encoded}

    def _own_partition(self) -> Partition:
        """The partition over the roots (at a root) or over the party's servers (at a local server)."""
        if self._partition is None:
            settings = self._settings
            plane = settings.upper or settings.local if self._is_root else settings.local
            assert plane is not None
            near = settings.host != "" and self._members.all_on(settings.host)
            elements = int(settings.number("slice_elements")) or (NEAR if near else 0)
            self._partition = Partition(elements, plane.servers, self._ratio(), urgent=bool(settings.options["p3"]))
        return self._partition
