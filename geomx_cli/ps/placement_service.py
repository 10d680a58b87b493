"""Where the slices of declared tensors go."""

from typing import Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.partition import NEAR, Partition, Placement, Slice, Tensor
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.cluster.server_members import ServerMembers
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import EVERY, MAX_CONTROL, Header

__all__ = ["PlacementService"]

MAX_ANSWERED = MAX_CONTROL // 32
"""Slices in one answer, which is a control message: a slice takes up to 21 bytes of it, a tensor up to 11 more."""


class PlacementService:
    """Answers declarations of tensors: the rank-0 root places slices on the roots, the rank-0 local server then on the
    servers of its party.

    compression: of exchanges with the roots, as agreed when the first tensor is declared.
    """

    def __init__(
        self, node: Node, members: ServerMembers, upstream: UpstreamClient | None, compression: Compression
    ) -> None:
        self._node = node
        self._members = members
        self._upstream = upstream
        self._compression = compression
        self._partition: Partition | None = None
        self._placements: dict[str, Placement] = {}
        self._shapes: dict[tuple[int, int], tuple[int, ...]] = {}

    def has_declared(self, header: Header) -> bool:
        """Whether the slice in a header matches a declaration. Only the first server of a plane receives declarations,
        so the others accept any slice, a root only its own.
        """
        if self._node.memberships[0].rank != 0:
            return self._upstream is not None or header.root == self._node.memberships[0].rank
        found = (header.root, header.offset, header.length, header.dtype, header.row, header.size, header.shard)
        return self._shapes.get((header.key, header.slice)) == found

    def declare(self, request: Request) -> None:
        """Answer with the placements of the tensors. Raises InvalidSettings for one that was declared otherwise or is
        listed twice, for a shard of which this party has no worker, and for more slices than an answer may have.
        """
        given = request.body["tensors"]
        tensors = [Tensor(*fields) for fields in given]
        _check_names(tensors)
        self._check_shards(tensors, request.link)
        if self._upstream is None:
            self._answer(request, self._place(tensors))
            return
        self._node.rpc.ask(
            self._upstream.links[0], "declare", request.body,
            lambda body: self._assign_to_party(request, tensors, body), request.refuse,
        )  # fmt: skip

    def _check_shards(self, tensors: list[Tensor], sender: Link) -> None:
        settings = self._node.settings
        if settings.upper is None:
            count = 0
        elif self._members.is_party(self._members.rank_of(sender)):
            return  # whose local server has checked them
        else:
            count = settings.local.workers if settings.local is not None else 0
        for tensor in tensors:
            if tensor.shard != EVERY and tensor.shard >= count:
                what = f"key {tensor.name!r} is contributed by worker {tensor.shard} of each party"
                have = f"this one has {count}" if settings.upper is not None else "a flat cluster has no parties"
                raise InvalidSettings(f"{what}, and {have}", "divide the model into as many shards in each party")

    def _place(self, tensors: list[Tensor]) -> list[Placement]:
        placements, count = [], 0
        for tensor in tensors:
            placements.append(self._own_partition().declare(tensor))
            count += len(placements[-1].slices)
            if count > MAX_ANSWERED:
                what = f"the keys of one declaration have more than {MAX_ANSWERED} slices"
                raise InvalidSettings(what, "initialise fewer keys at once, or set a larger slice size")
        return placements

    def _assign_to_party(self, request: Request, tensors: list[Tensor], body: dict[str, Any]) -> None:
        """Assign the slices to the local servers of this party."""
        for tensor, (key, slices) in zip(tensors, body["placements"], strict=True):
            if tensor.name not in self._placements:
                servers = self._own_partition().assign([length for _, length, _, _ in slices])
                placed = [Slice(o, n, root, own) for (o, n, root, _), own in zip(slices, servers, strict=True)]
                self._placements[tensor.name] = Placement(key, tensor, tuple(placed))
        self._answer(request, [self._placements[tensor.name] for tensor in tensors])

    def _answer(self, request: Request, placements: list[Placement]) -> None:
        for item in placements:
            self._shapes |= item.shapes()
        answer = [[item.key, [[s.offset, s.length, s.root, s.server] for s in item.slices]] for item in placements]
        request.answer({"placements": answer})

    def _own_partition(self) -> Partition:
        """The partition over the roots (at a root) or over the party's servers (at a local server)."""
        if self._partition is None:
            settings = self._node.settings
            plane = settings.local if self._upstream is not None else settings.upper or settings.local
            assert plane is not None
            near = settings.host != "" and self._members.all_on(settings.host)
            elements = int(settings.number("slice_elements")) or (NEAR if near else 0)
            urgent = bool(settings.options["p3"])
            self._partition = Partition(elements, plane.servers, self._compression.ratio, urgent=urgent)
        return self._partition


def _check_names(tensors: list[Tensor]) -> None:
    names = set[str]()
    for tensor in tensors:
        if tensor.name in names:
            what = f"key {tensor.name!r} is listed twice in one declaration"
            raise InvalidSettings(what, "declare each key once")
        names.add(tensor.name)
