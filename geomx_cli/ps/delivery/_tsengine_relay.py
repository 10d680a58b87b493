"""What a TSEngine relay does: add the contributions of other parties to its own, and pass the result on.

A relay keeps nothing that is not kept elsewhere: a sender keeps its contribution until it has the result, and asks the
root if the relay fails. The root counts each party once, whichever messages bring its contribution.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from geomx_cli.ps.aggregation.accumulator import Accumulator, Contribution
from geomx_cli.ps.aggregation.codec import received
from geomx_cli.ps.aggregation.upstream import OnResult, UpstreamClient
from geomx_cli.ps.delivery._tsengine_neighbours import TOPIC
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.payload import Content, sum_payload
from geomx_cli.ps.net.wire import MAX_ROUNDS_AHEAD, BadMessage, Form, Header

__all__ = ["MISSES", "Relay", "can_be_added"]

MAX_GROUPS = 65_536
"""Slices and rounds of which contributions of other parties are held."""
MISSES = 3
"""Rounds in a row in which a party sends a slice another way, until it is no longer expected here."""
ASK, LONGEST = 0.1, 5.0
"""Seconds for which this party's contribution waits for others until these are asked, as their workers' windows may be
full of other slices, and at most, as messages may be lost with a connection."""

_Where = tuple[int, int]
_Same = tuple[object, ...]


@dataclass(slots=True)
class _Client:
    """A contribution of another party."""

    link: Link
    header: Header
    content: Content | None


@dataclass(slots=True)
class _Own:
    """This party's contribution."""

    header: Header
    payload: memoryview
    on_result: OnResult


@dataclass(slots=True)
class _Group:
    """The contributions to one slice and round, by party, that wait for others. skipped: the parties that send theirs
    another way. since: when this party's came (time.monotonic seconds). asked: whether the others were asked.
    """

    own: _Own | None = None
    clients: dict[int, _Client] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    since: float = 0.0
    asked: bool = False


class Relay:
    """Adds contributions to this party's. `relays`: whether the party of this index still sends through this process,
    as far as its reports tell. Used by the loop's thread only.
    """

    def __init__(self, upstream: UpstreamClient, relays: Callable[[int], bool]) -> None:
        self._upstream = upstream
        self._relays = relays
        self._groups: dict[tuple[int, int, int], _Group] = {}
        self._last: dict[_Where, int] = {}  # the last round that this party has sent
        # parties whose next contribution should come here, and how many in a row have not
        self._expected: dict[_Where, dict[int, int]] = {}
        self._merged: dict[int, tuple[_Own, list[_Client]]] = {}  # by the number of the request

    def serves(self, header: Header) -> bool:
        """Whether other parties send this slice through here, so that this party's must go to the root."""
        where = (header.key, header.slice)
        return bool(self._expected.get(where)) or (*where, header.round) in self._groups

    def take_own(self, header: Header, payload: memoryview, on_result: OnResult) -> None:
        """Send this party's contribution together with those that are expected."""
        where = (header.key, header.slice, header.round)
        group = self._groups.setdefault(where, _Group())
        group.own, group.since = _Own(header, payload, on_result), time.monotonic()
        self._check(where)

    def passed(self, header: Header) -> None:
        """This party's contribution went alone, or through another party: what waits for it has to go alone too."""
        self._last[header.key, header.slice] = header.round
        group = self._groups.pop((header.key, header.slice, header.round), None)
        if group is not None:
            self._refuse(group.clients.values())

    def take(self, link: Link, rank: int, header: Header, payload: memoryview | None) -> None:
        """Take the contribution of another party, or its question whether that is here. Raises BadMessage."""
        if header.contributors != (rank,) or not header.weight or header.root >= len(self._upstream.links):
            raise BadMessage(f"a contribution of {header.contributors} for root {header.root} from party {rank}")
        if not 0 <= header.acked < header.round <= header.acked + MAX_ROUNDS_AHEAD + 1:
            raise BadMessage(f"round {header.round} of a party that has {header.acked} results")
        where, last = (header.key, header.slice, header.round), self._last.get((header.key, header.slice), 0)
        group = self._groups.get(where)
        if payload is None:
            if group is None or rank not in group.clients:
                self._refuse([_Client(link, header, None)])
            return
        if header.form != Form.FULL:
            raise BadMessage(f"a contribution of form {header.form.name} for a sum")
        client = _Client(link, header, received(header, payload))
        link.consumed(len(payload))  # it waits for this party's, so it must not hold up others
        if header.round > last + MAX_ROUNDS_AHEAD or len(self._groups) >= MAX_GROUPS:
            self._refuse([client])
            return
        if header.round <= last:
            self._refuse([client])
            return
        self.expect(rank, [where[:2]])
        self._groups.setdefault(where, _Group()).clients[rank] = client
        self._check(where)

    def expect(self, rank: int, where: Iterable[_Where]) -> None:
        """This party sends these slices through here from the next round on."""
        for key, index in where:
            if len(self._expected) < MAX_GROUPS:
                self._expected.setdefault((key, index), {})[rank] = 0

    def skip(self, rank: int, where: Iterable[tuple[int, int, int]]) -> None:
        """This party sends these slices and rounds another way."""
        for key, index, round_ in where:
            expected, last = self._expected.get((key, index), {}), self._last.get((key, index), 0)
            if rank not in expected:
                continue
            expected[rank] += 1
            if expected[rank] >= MISSES:
                del expected[rank]
            if last < round_ <= last + MAX_ROUNDS_AHEAD and len(self._groups) < MAX_GROUPS:
                group = self._groups.setdefault((key, index, round_), _Group())
                group.skipped.add(rank)
                group.clients.pop(rank, None)
                self._check((key, index, round_))

    def check(self) -> None:
        """Stop waiting for parties that do not relay any more."""
        for where in [where for where, group in self._groups.items() if group.own is not None]:
            self._check(where)

    def on_result(self, header: Header, payload: memoryview | None) -> None:
        """Pass the result on to the parties whose contributions were added, as it came."""
        _, clients = self._merged.pop(header.request, (None, []))
        for client in clients:
            about = {"request": client.header.request, "priority": client.header.priority}
            client.link.send(msgspec.structs.replace(header, **about), payload)

    def split(self, request: int) -> None:
        """The root has the contribution of another party already: send this party's alone."""
        found = self._merged.pop(request, None)
        if found is not None:
            own, clients = found
            self._upstream.replace(request, own.header, own.payload)
            self._refuse(clients)

    def _check(self, where: tuple[int, int, int]) -> None:
        group, (key, index, _) = self._groups[where], where
        if group.own is None:
            return
        expected = self._expected.get((key, index), {})
        missing = expected.keys() - group.clients.keys() - group.skipped
        waited, coming = time.monotonic() - group.since, [rank for rank in missing if self._relays(rank)]
        if coming and waited < LONGEST:
            if waited > ASK and not group.asked:
                group.asked = True
                for rank in coming:
                    self._upstream.peers[rank].request_slice(*where)
            return
        for rank in missing:
            del expected[rank]
        del self._groups[where]
        self._last[key, index] = max(group.own.header.round, self._last.get((key, index), 0))
        self._send(group.own, group.clients)

    def _send(self, own: _Own, clients: dict[int, _Client]) -> None:
        link = self._upstream.links[own.header.root]
        alike = {rank: client for rank, client in clients.items() if _same(client.header) == _same(own.header)}
        self._refuse(client for rank, client in clients.items() if rank not in alike)
        if not alike:
            self._upstream.send(link, own.header, own.payload, own.on_result)
            return
        header = own.header
        accumulator, (rank,) = Accumulator(), header.contributors
        contents: dict[int, tuple[Header, Content | None]] = {rank: (header, received(header, own.payload))}
        contents |= {rank: (client.header, client.content) for rank, client in alike.items()}
        for rank, (about, content) in contents.items():
            accumulator.offer(Contribution((rank,), content, about.weight, about.hyper, _nothing))
        accumulator.merge(contents)
        assert accumulator.total is not None
        payload, wide = sum_payload(accumulator.total, header.dtype)
        merged = msgspec.structs.replace(
            header, contributors=tuple(sorted(contents)), weight=accumulator.weight, hyper=accumulator.hyper, wide=wide
        )
        acked = min(client.header.acked for client in alike.values())
        self._upstream.send(link, merged, payload, own.on_result, acked=acked)
        self._merged[merged.request] = own, list(alike.values())

    @staticmethod
    def _refuse(clients: Iterable[_Client]) -> None:
        for client in clients:
            client.link.control(TOPIC, {"refused": [client.header.request]})


def can_be_added(header: Header, payload: memoryview | None) -> bool:
    """Whether this contribution can be added to others on its way: it has all elements, and not encoded."""
    return payload is not None and bool(header.weight) and header.form == Form.FULL


def _same(header: Header) -> _Same:
    """What contributions must have in common to be added and to get the same result."""
    return (
        header.root, header.offset, header.length, header.dtype, header.row, header.size, header.shard, header.reply,
        header.codec,
    )  # fmt: skip


def _nothing() -> None:
    """The credit of what is added here was returned, or is the local server's."""
