"""A TSEngine relay: it adds the contributions of its peers to its own, and passes the result on.

A contribution cannot be added if it is encoded, or if its sender goes through rounds by itself. It is then passed on
alone, and its header says so (`asynchronous`). The server answers it as if it had come directly.

A relay keeps nothing that other processes do not keep too. A sender keeps its contribution until it has the result, and
asks the server above if the relay fails. The server counts each process once, whichever messages bring its
contribution.

Credit is returned on arrival, so windows do not limit what a relay keeps. As at a server, slices and rounds limit it.
Of each peer and slice the relay keeps one contribution, of the same length as its own. It belongs to the round after
the last round to which the relay itself has contributed. A peer has no later round, because its next round waits for
the result.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from geomx_cli.ps.aggregation.codec import received
from geomx_cli.ps.aggregation.rounds import Accumulator, Contribution
from geomx_cli.ps.aggregation.upstream import OnResult, UpstreamClient
from geomx_cli.ps.cluster.members import CENTRAL
from geomx_cli.ps.delivery._tsengine_neighbours import TOPIC
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import Content, sum_payload
from geomx_cli.ps.net.wire import ROW_NUMBER_SIZE, BadMessage, Form, Header

__all__ = ["MISSES", "Relay", "can_be_relayed"]

MAX_GROUPS = 65_536
"""Limits: slices that peers announce, and rounds for which they are noted to be sent another way."""
MISSES = 3
"""After so many rounds in a row in which a peer sends a slice another way, the slice is no longer expected here."""
ASK, REPEAT, LONGEST = 0.1, 0.5, 5.0
"""Three times, in seconds, for which the relay's own contribution waits for others: until the relay asks for them,
until it asks again, and at most. It has to ask because windows may be full of other slices, and messages may be lost
with a connection.
"""
MAX_VAIN, FORGOTTEN = 4, 20
"""After so many rounds with waits in vain for one peer, nothing waits for it. So many rounds without make up for all.
"""

MAX_PASSING = 4
"""Limit on contributions of one peer to one slice that are passed on alone: one, and some that it has meanwhile sent
another way."""

Up = Callable[[int, Header, memoryview | None, OnResult], None]
_MARGIN, _LARGEST_ELEMENT = 4096, 8
"""In bytes: by how much an encoded contribution may be longer than its elements, and the largest element."""
_Where = tuple[int, int]
_Same = tuple[object, ...]


@dataclass(slots=True)
class _Client:
    """A contribution of a peer."""

    link: Link
    header: Header
    content: Content | None


@dataclass(slots=True)
class _Own:
    """The contribution of this process."""

    header: Header
    payload: memoryview
    on_result: OnResult


@dataclass(slots=True)
class _Group:
    """The contributions to one slice and round that wait for others. Times in time.monotonic seconds.

    own: this process's contribution; None until it exists.
    clients: the peers' contributions, by rank.
    skipped: the peers that send their contributions another way.
    since: when the own contribution came.
    ask: when to ask the other peers next.
    """

    own: _Own | None = None
    clients: dict[int, _Client] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    since: float = 0.0
    ask: float = 0.0


class Relay:
    """Adds contributions to this process's, or passes them on alone. Used by the loop's thread only.

    up: sends the own contribution alone to the server of this rank.
    above: for a header, the rank of the server that it is for.
    relays: whether the peer of this rank still sends through this process, as far as its reports tell.
    warn: receives warnings for the user.
    """

    def __init__(
        self, upstream: UpstreamClient, up: Up, above: Callable[[Header], int], relays: Callable[[int], bool],
        warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._upstream = upstream
        self._up = up
        self._above = above
        self._relays = relays
        self._warn = warn
        self._groups: dict[tuple[int, int, int], _Group] = {}
        self._waiting: dict[_Where, int] = {}  # the rounds of own contributions that wait
        self._last: dict[_Where, int] = {}  # the last round that this process has sent
        self._shapes: dict[_Where, _Same] = {}  # of the own contributions
        self._vain: dict[int, tuple[int, int]] = {}  # by rank: rounds of waits in vain, the last one
        # peers whose next contribution should come here, and how many in a row have not
        self._expected: dict[_Where, dict[int, int]] = {}
        self._merged: dict[int, tuple[_Own, list[_Client]]] = {}  # by the number of the request
        # rounds of peers' contributions on their way alone, by rank and slice
        self._passing: dict[tuple[int, int, int], set[int]] = {}

    def serves(self, header: Header) -> bool:
        """Whether peers send this slice through this process. If so, the own contribution must go to the server."""
        where = (header.key, header.slice)
        return bool(self._expected.get(where)) or (*where, header.round) in self._groups

    def send_with_others(self, header: Header, payload: memoryview, on_result: OnResult) -> None:
        """Send this process's contribution together with the expected ones."""
        where = (header.key, header.slice, header.round)
        self._shapes[where[:2]] = _shape(header)
        self._waiting[where[:2]] = header.round
        group = self._groups.setdefault(where, _Group())
        group.own, group.since = _Own(header, payload, on_result), time.monotonic()
        group.ask = group.since + ASK
        self._check(where)

    def send_apart(self, header: Header) -> None:
        """This process's contribution is sent alone, or through a peer. So contributions that wait for it go alone too.
        """
        self._shapes[header.key, header.slice] = _shape(header)
        self._last[header.key, header.slice] = header.round
        group = self._groups.pop((header.key, header.slice, header.round), None)
        if group is not None:
            self._refuse(group.clients.values())

    def on_contribution(self, link: Link, rank: int, header: Header, payload: memoryview | None) -> None:
        """Accept the contribution of a peer, or its question whether the contribution is here. Raises BadMessage."""
        ranks, server = header.contributors, self._above(header)
        if len(ranks) != 1 or ranks[0] % CENTRAL != rank or not header.weight or server >= len(self._upstream.links):
            raise BadMessage(f"a contribution of {ranks} for server {server} from the peer of rank {rank}")
        longest = _MARGIN + header.length * (_LARGEST_ELEMENT + ROW_NUMBER_SIZE)
        shape = _shape(header)
        own_shape = self._shapes.get((header.key, header.slice), shape)  # without one it is not kept
        if shape != own_shape or len(payload or b"") > longest:
            self._refuse([_Client(link, header, None)])
            raise BadMessage(f"a contribution to slice {header.slice} of key {header.key} unlike this process's own")
        if header.asynchronous:
            self._pass_on(link, rank, header, payload)
            return
        where, last = (header.key, header.slice, header.round), self._last.get((header.key, header.slice), 0)
        group = self._groups.get(where)
        if payload is None:
            if group is None or rank not in group.clients:
                self._refuse([_Client(link, header, None)])
            return
        if header.form != Form.FULL:
            raise BadMessage(f"a contribution of form {header.form.name} for a sum")
        if not last or header.round != last + 1:
            link.consumed(len(payload))
            self._refuse([_Client(link, header, None)])
            return
        client = _Client(link, header, received(header, payload))
        link.consumed(len(payload))  # it waits for the own contribution, so it must not delay others
        self.expect(rank, [where[:2]])
        self._groups.setdefault(where, _Group()).clients[rank] = client
        self._check(where)

    def expect(self, rank: int, where: Iterable[_Where]) -> None:
        """From the next round on, this peer sends these slices through this process."""
        for key, index in where:
            if len(self._expected) < MAX_GROUPS and self._vain.get(rank, (0, 0))[0] < MAX_VAIN:
                self._expected.setdefault((key, index), {})[rank] = 0

    def skip(self, rank: int, where: Iterable[tuple[int, int, int]]) -> None:
        """This peer sends these slices and rounds another way."""
        for key, index, round_ in where:
            expected, last = self._expected.get((key, index), {}), self._last.get((key, index), 0)
            if rank not in expected:
                continue
            expected[rank] += 1
            if expected[rank] >= MISSES:
                del expected[rank]
            if round_ == last + 1 and len(self._groups) < MAX_GROUPS:
                group = self._groups.setdefault((key, index, round_), _Group())
                group.skipped.add(rank)
                group.clients.pop(rank, None)
                self._check((key, index, round_))

    def expire_waits(self) -> None:
        """Stop waiting for peers that no longer send through this process."""
        for slice_, round_ in list(self._waiting.items()):
            self._check((*slice_, round_))

    def on_result(self, header: Header, payload: memoryview | None) -> None:
        """Pass the result on, unchanged, to the peers whose contributions were added."""
        _, clients = self._merged.pop(header.request, (None, []))
        for client in clients:
            _answer(client, header, payload)

    def split(self, request: int) -> None:
        """The server has a peer's contribution already: send the own contribution alone."""
        found = self._merged.pop(request, None)
        if found is not None:
            own, clients = found
            self._upstream.replace(request, own.header, own.payload)
            self._refuse(clients)

    def has_chosen(self, where: tuple[int, int, int]) -> bool:
        """Whether the way of this process's contribution to this slice and round is chosen: it was sent, or waits here.
        """
        return where[2] <= self._last.get(where[:2], 0) or where[2] == self._waiting.get(where[:2])

    def _pass_on(self, link: Link, rank: int, header: Header, payload: memoryview | None) -> None:
        """Send a peer's contribution unchanged to the server, and the result back."""
        link.consumed(len(payload or b""))
        rounds = self._passing.get((rank, header.key, header.slice), set())
        if header.round in rounds:
            return  # the result follows
        client = _Client(link, header, None)
        if payload is None or len(rounds) >= MAX_PASSING or (header.key, header.slice) not in self._last:
            self._refuse([client])
            return

        def on_result(result: Header, found: memoryview | None) -> None:
            rounds.discard(header.round)
            _answer(client, result, found)

        rounds.add(header.round)
        self._passing[rank, header.key, header.slice] = rounds
        link_above, sent = self._upstream.links[self._above(header)], msgspec.structs.replace(header)
        self._upstream.pass_on(link_above, sent, payload, on_result)
        # The window may be full of own contributions, which wait at the server for this one. So it is sent without
        # credit.
        link_above.want(header.key, header.slice, header.round)

    def _check(self, where: tuple[int, int, int]) -> None:
        group, (key, index, round_) = self._groups[where], where
        if group.own is None:
            return
        expected = self._expected.get((key, index), {})
        missing = expected.keys() - group.clients.keys() - group.skipped
        now, coming = time.monotonic(), [rank for rank in missing if self._relays(rank)]
        if coming and now - group.since < LONGEST:
            if now > group.ask:
                group.ask = now + REPEAT
                for rank in coming:
                    self._upstream.peers[rank].request_slice(*where)
            return
        for rank in missing:
            del expected[rank]
            if rank in coming:
                self._note_vain(rank, round_)
        self._release(where)

    def _note_vain(self, rank: int, round_: int) -> None:
        count, last = self._vain.get(rank, (0, 0))
        if round_ <= last:
            return
        count = 1 if round_ > last + FORGOTTEN else count + 1
        self._vain[rank] = count, round_
        if count == MAX_VAIN:
            what = f"in {MAX_VAIN} rounds contributions that {self._upstream.peers[rank].name} had announced"
            self._warn(f"{what} did not come within {LONGEST:g} s; nothing waits for it any more")

    def _release(self, where: tuple[int, int, int]) -> None:
        """Send the own contribution together with the peers' contributions that have arrived."""
        group, (key, index, round_) = self._groups.pop(where), where
        assert group.own is not None
        del self._waiting[key, index]
        self._last[key, index] = round_
        self._send(group.own, group.clients)

    def _send(self, own: _Own, clients: dict[int, _Client]) -> None:
        alike = {rank: client for rank, client in clients.items() if _same(client.header) == _same(own.header)}
        self._refuse(client for rank, client in clients.items() if rank not in alike)
        if not alike:
            self._up(self._above(own.header), own.header, own.payload, own.on_result)
            return
        header = own.header
        accumulator, (rank,) = Accumulator(), header.contributors
        contents: dict[int, tuple[Header, Content | None]] = {rank: (header, received(header, own.payload))}
        contents |= {client.header.contributors[0]: (client.header, client.content) for client in alike.values()}
        for rank, (about, content) in contents.items():
            accumulator.park(Contribution((rank,), content, about.weight, about.hyper, _nothing))
        accumulator.merge(contents)
        assert accumulator.total is not None
        payload, wide = sum_payload(accumulator.total, header.dtype)
        merged = msgspec.structs.replace(
            header, contributors=tuple(sorted(contents)), weight=accumulator.weight, hyper=accumulator.hyper, wide=wide
        )
        link = self._upstream.links[self._above(own.header)]
        self._upstream.send(link, merged, payload, own.on_result)
        self._merged[merged.request] = own, list(alike.values())
        for client in alike.values():
            client.content = None  # it is in the sum

    @staticmethod
    def _refuse(clients: Iterable[_Client]) -> None:
        for client in clients:
            client.link.control(TOPIC, {"refused": [client.header.request]})


def can_be_relayed(header: Header, payload: memoryview | None) -> bool:
    """Whether this contribution can be added to others on its way or, if it is encoded, passed on alone."""
    return payload is not None and bool(header.weight) and header.form in (Form.FULL, Form.ENCODED)


def _answer(client: _Client, result: Header, payload: memoryview | None) -> None:
    """Send a result to a peer, unchanged."""
    about = {"request": client.header.request, "priority": client.header.priority}
    client.link.send(msgspec.structs.replace(result, **about), payload)


def _same(header: Header) -> _Same:
    """The fields that contributions must have in common to be added and to get the same result."""
    return (
        header.root, header.server, header.offset, header.length, header.dtype, header.row, header.size, header.shard,
        header.reply, header.codec, header.contributors[0] // CENTRAL,
    )  # fmt: skip


def _shape(header: Header) -> _Same:
    """The fields that contributions of all processes to a slice have in common."""
    return header.offset, header.length, header.dtype, header.row, header.size, header.shard


def _nothing() -> None:
    """Nothing to return: the credit of added contributions was returned already, or is this process's own."""
