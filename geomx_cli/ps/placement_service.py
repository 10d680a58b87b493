"""Where the slices of declared tensors go."""

from collections import deque
from collections.abc import Callable
from functools import partial

from geomx_cli.core.errors import GeomxError, InvalidSettings
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.partition import NEAR, Partition, Placement, Slice, Tensor
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.cluster.server_members import ServerMembers
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import EVERY, Header

__all__ = ["PlacementService"]

MAX_ANSWERED = 65_536
"""Slices in one answer: it is made at once, and other members wait meanwhile. A slice takes up to 21 bytes of it."""


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
        self._by_key: dict[int, Placement] = {}
        self._asking: dict[Link, deque[Callable[[], None]]] = {}

    def has_declared(self, header: Header) -> bool:
        """Whether the slice in a header matches a declaration. Only the first server of a plane receives declarations,
        so the others accept any slice, a root only its own.
        """
        if self._node.memberships[0].rank != 0:
            return self._upstream is not None or header.root == self._node.memberships[0].rank
        placement = self._by_key.get(header.key)
        return placement is not None and placement.has(header)

    def declare(self, request: Request) -> None:
        """Answer with the placements of the tensors. Raises InvalidSettings for one that was declared otherwise or is
        listed twice, for a shard of which this party has no worker, and for more slices than an answer may have.
        """
        given = request.body["tensors"]
        tensors = [Tensor(*fields) for fields in given]
        _check_names(tensors)
        self._check_shards(tensors, request.link)
        if self._upstream is None:
            self._answer(request, self._place(tensors, request))
            return
        waiting = self._asking.setdefault(request.link, deque())
        waiting.append(partial(self._ask, self._upstream.links[0], request, tensors))
        if len(waiting) == 1:
            waiting[0]()

    def _ask(self, root: Link, request: Request, tensors: list[Tensor]) -> None:
        """Answer a member's declaration, or ask the root, and then do the same with its next one. One at a time is
        asked for each member: the answer of the root has all slices, and a member may declare a tensor many times.
        """

        def assign(body: Body) -> None:
            self._assign_to_party(tensors, body)
            self._answer(request, [self._placements[tensor.name] for tensor in tensors])
            after()

        def refuse(error: GeomxError) -> None:
            request.refuse(error)
            after()

        def after() -> None:
            waiting = self._asking[request.link]
            waiting.popleft()
            if waiting:
                self._node.loop.submit(waiting[0])

        placed = [self._placements.get(tensor.name) for tensor in tensors]
        known = [item for item, tensor in zip(placed, tensors, strict=True) if item and item.tensor == tensor]
        if len(known) < len(tensors):
            self._node.rpc.ask(root, "declare", request.body, assign, refuse)
        else:
            self._answer(request, known)
            after()

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

    def _place(self, tensors: list[Tensor], request: Request) -> list[Placement]:
        placements, count, by = [], 0, request.body["by"]
        party = request.link.name if request.link.name != by else ""
        for tensor in tensors:
            placements.append(self._own_partition().declare(tensor, by, party))
            count += len(placements[-1].slices)
            if count > MAX_ANSWERED:
                what = f"the keys of one declaration have more than {MAX_ANSWERED} slices"
                raise InvalidSettings(what, "initialise fewer keys at once, or set a larger slice size")
        return placements

    def _assign_to_party(self, tensors: list[Tensor], body: Body) -> None:
        """Assign the slices to the local servers of this party."""
        for tensor, (key, slices) in zip(tensors, body["placements"], strict=True):
            if tensor.name not in self._placements:
                servers = self._own_partition().assign([length for _, length, _, _ in slices])
                placed = [Slice(o, n, root, own) for (o, n, root, _), own in zip(slices, servers, strict=True)]
                self._placements[tensor.name] = Placement(key, tensor, tuple(placed))

    def _answer(self, request: Request, placements: list[Placement]) -> None:
        self._by_key.update((item.key, item) for item in placements)
        request.answer({"placements": [item.encoded for item in placements]}, keep=False)

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
