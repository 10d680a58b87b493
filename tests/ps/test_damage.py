"""Payloads of a wrong size are requested again, some times, and the rounds have the right results."""

import numpy as np
from bench import SIZE, Bench, KeptLink, gradient

from geomx_cli.ps.aggregation.upstream import MAX_REPEATS, UpstreamClient
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.net.wire import BadMessage, Header, Kind


class Pair:
    """A root, and the client of its member 0; its member 1 contributes by itself."""

    def __init__(self) -> None:
        self.bench, self.link, self.upstream = Bench(), KeptLink(), UpstreamClient()
        self.bench.init(np.zeros(SIZE, np.float32))
        self.got: list[Array] = []
        header = self.bench.header(Kind.EXCHANGE, round=1, contributors=(0,), weight=1.0)
        self.upstream.send(
            self.link, header, gradient(0, 1).data.cast("B"), lambda _, found: self.got.append(np.asarray(found))  # type: ignore[arg-type]
        )

    def up(self, size: int = -1) -> list[bool]:
        """Deliver what the member has sent, with payloads of `size` bytes; returns which had one."""
        sent, self.link.sent = self.link.sent, []
        for header, payload in sent:
            part = payload if payload is None or size < 0 else payload[:size]
            try:
                self.bench.rounds.on_exchange(self.bench.links[0], header, part, 0)  # type: ignore[arg-type]
            except BadMessage:
                assert size >= 0
        return [payload is not None for _, payload in sent]

    def down(self, change: int = 0) -> None:
        """Deliver the results, longer by `change` bytes."""
        downs, self.bench.delivery.downs = self.bench.delivery.downs, []
        for link, header, payload in downs:
            if link is self.bench.links[0] and payload is not None:
                self._take(header, memoryview(bytes(payload) + bytes(change)), bool(change))

    def _take(self, header: Header, payload: memoryview, damaged: bool) -> None:
        try:
            self.upstream.on_result(self.link, header, payload)  # type: ignore[arg-type]
        except BadMessage:
            assert damaged

    def asked(self) -> int:
        """Tell the member what the root asks for; returns the number of requests."""
        damaged, self.bench.links[0].damaged = self.bench.links[0].damaged, []
        for request in damaged:
            self.upstream.again(self.link, request, damaged=True)  # type: ignore[arg-type]
        return len(damaged)


def test_a_damaged_contribution_is_sent_again_at_most_three_times() -> None:
    pair = Pair()
    for _ in range(MAX_REPEATS):
        assert pair.up(7) == [True]
        assert pair.asked() == 1
    assert pair.up(7) == [True]
    assert pair.asked() == 1
    assert pair.up() == [], "it is refused for good"
    pair = Pair()
    pair.up(7)
    pair.asked()
    assert pair.up() == [True]
    pair.bench.push(1, 1, gradient(1, 1))
    pair.down()
    assert pair.got[0].tobytes() == (gradient(0, 1) + gradient(1, 1)).tobytes()


def test_a_damaged_result_is_answered_again_at_most_three_times() -> None:
    for damages in (1, MAX_REPEATS, MAX_REPEATS + 1):
        pair = Pair()
        pair.up()
        pair.bench.push(1, 1, gradient(1, 1))
        for _ in range(damages):
            pair.down(change=4)
            queries = pair.up()
        assert queries == ([False] if damages <= MAX_REPEATS else []), "without the contribution, which is here"
        pair.down()
        assert len(pair.got) == (damages <= MAX_REPEATS)
        assert all(found.tobytes() == (gradient(0, 1) + gradient(1, 1)).tobytes() for found in pair.got)


def test_what_was_not_damaged_is_not_sent_again() -> None:
    pair = Pair()
    pair.up()
    pair.upstream.again(pair.link, 1)  # type: ignore[arg-type]
    pair.upstream.again(KeptLink(), 1, damaged=True)  # type: ignore[arg-type]
    pair.upstream.again(pair.link, 2, damaged=True)  # type: ignore[arg-type]
    assert pair.up() == []
