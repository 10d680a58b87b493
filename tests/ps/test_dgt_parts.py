"""Blocks, parts and datagrams of differential gradient transmission, in this process."""

import socket
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench import KeptLink
from cluster import until

from geomx_cli.contract import security
from geomx_cli.contract.config import NodeSettings
from geomx_cli.contract.security import Identity
from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import defaults
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.arrays import Arrays
from geomx_cli.ps.cluster.bodies import checked_request
from geomx_cli.ps.delivery._dgt_blocks import (
    BEHIND,
    PREAMBLE,
    SILENT,
    Block,
    Fragment,
    Ranking,
    channels,
    dequantise,
    encode_fragment,
    part_header,
    quantise,
)  # fmt: skip
from geomx_cli.ps.delivery._dgt_datagram_receiver import TOPICS, DatagramReceiver
from geomx_cli.ps.delivery._dgt_datagram_sender import DatagramSender, Pace
from geomx_cli.ps.delivery._dgt_delivery import DgtServer, Parts, Splitter
from geomx_cli.ps.delivery._dgt_parts import Grace, PartReceiver
from geomx_cli.ps.net.datagrams import (
    MAX_CHANNELS,
    REPLAY_WINDOW,
    Opener,
    ReceiverSocket,
    Sealer,
    SenderSocket,
    session_key,
)
from geomx_cli.ps.net.loop import Loop as RealLoop
from geomx_cli.ps.net.wire import BadMessage, Header, Kind, decode_header, encode_header

SIZE, BLOCK = 5000, 256  # elements; the last block is shorter


def settings(**options: Any) -> NodeSettings:
    return NodeSettings(options={**defaults(plugins.table()), "dgt": 1, "dgt_block": 4 * BLOCK, **options})


def header(round_: int = 1, **fields: Any) -> Header:
    given = {"length": SIZE, "size": SIZE, "contributors": (0,), "weight": 1.0, "request": round_, **fields}
    return Header(kind=Kind.EXCHANGE, key=3, slice=2, round=round_, **given)


def gradient(seed: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(dtype)


def payload(array: np.ndarray) -> memoryview:
    return memoryview(array.data).cast("B")


# Blocks.


@pytest.mark.parametrize(
    ("count", "k", "unreliable", "expected"),
    [
        (10, 0.8, 3, [0, 0, 0, 0, 0, 0, 0, 0, 1, 0]),
        (10, 0.5, 3, [0, 0, 0, 0, 0, 1, 1, 2, 3, 0]),
        (10, 0.2, 7, [0, 0, 1, 2, 3, 4, 5, 6, 7, 0]),
        (10, 0.25, 1, [0, 0, 0, 1, 1, 1, 1, 1, 1, 0]),  # round(2.5) is 3: half away from zero
        (10, 1.0, 3, [0] * 10), (1, 0.0, 3, [0]), (2, 0.5, 3, [0, 0]), (3, 0.0, 2, [1, 2, 0]),
    ],
)  # fmt: skip
def test_channels_of_blocks(count: int, k: float, unreliable: int, expected: list[int]) -> None:
    assert channels(count, k, unreliable).tolist() == expected


def test_contributions_are_moving_averages() -> None:
    ranking = Ranking()
    found = []
    for mean in (1, 1, 1, 0):
        assert ranking.update(np.full(8, -mean, np.float32), 4, 0.3)
        assert ranking.average is not None
        found.append(ranking.average.tolist())
    assert np.allclose(found, [[0.7] * 2, [0.91] * 2, [0.973] * 2, [0.2919] * 2], rtol=1e-12)
    assert not ranking.update(np.array([1, 2, 3, np.inf, 1, 1, 1, 1], np.float32), 4, 0.3), "not finite"
    assert np.allclose(ranking.average, 0.2919)


def test_blocks_are_sorted_but_the_last_and_empty_ones_are_not_sent() -> None:
    array = np.repeat(np.array([1, 0, 3, 2, 9], np.float32), 4)
    ranking = Ranking()
    ranking.update(array, 4, 0.3)
    channel, order = ranking.channels(0.5, 1, np.array([False, True, False, False, False]))
    assert order.tolist() == [2, 3, 0, 4] and channel.tolist() == [1, SILENT, 0, 0, 0]


def test_quantised_blocks_are_the_centres_of_sixteen_bins() -> None:
    rows = np.array([[0, 16, 8, 15.9], [-8, 8, 0, -7.9], [4, 5, 6, 8], [0, 0, 0, 0]], np.float32)
    bounds, codes = quantise(rows)
    assert bounds.tolist() == [[0, 16], [-8, 8], [0, 8], [0, 0]] and codes.shape == (4, 2)
    wanted = [[0.5, 15.5, 8.5, 15.5], [-7.5, 7.5, 0.5, -7.5], [4.25, 5.25, 6.25, 7.75], [0, 0, 0, 0]]
    assert dequantise(bounds, codes).tolist() == wanted


# Parts.


class Kept:
    """The arrays kept with each slice."""

    def __init__(self) -> None:
        self._slices: defaultdict[tuple[int, int], Arrays] = defaultdict(dict)

    def __call__(self, header: Header) -> Arrays:
        return self._slices[header.key, header.slice]


@dataclass
class Inbox:
    """Keeps what is handed in."""

    got: list[tuple[int, np.ndarray, int]] = field(default_factory=list)
    refuse: bool = False
    kept: Kept = field(default_factory=Kept)

    def check(self, link: Any, header: Header) -> None:
        if self.refuse:
            raise BadMessage("not declared")

    def hand_in(self, link: Any, header: Header, payload: memoryview, credit: int) -> None:
        assert header.kind == Kind.EXCHANGE
        dtype = np.float32 if header.wide or not header.dtype else np.float16
        self.got.append((header.round, np.frombuffer(payload, dtype), credit))


class Loop:
    """Calls nothing by itself."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Callable[[], None]]] = []

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        self.due.append((when, callback))

    def watch(self, _: int, read: Callable[[], None]) -> None:
        self.read = read

    def every(self, _: float, callback: Callable[[], None]) -> None:
        self.report = callback


class Bench:
    """A receiver with one member."""

    def __init__(self, **options: Any) -> None:
        self.loop, self.inbox, self.link = Loop(), Inbox(), KeptLink()
        self.refused: list[str] = []
        transport = SimpleNamespace(count_refused=lambda link, reason, text: self.refused.append(text), wan=None)
        self.node: Any = SimpleNamespace(
            settings=settings(**options), loop=self.loop, transport=transport, keys=None, process="root", listens=()
        )
        self.parts = PartReceiver(self.node, self.inbox)
        self.splitter = Splitter(self.node.settings, Kept())

    def first(self, round_: int, array: np.ndarray, **fields: Any) -> Parts:
        """Send the first part; the rest is left to the test."""
        about = header(round_, **fields)
        parts = self.splitter.split(about, payload(array))
        self.send(part_header(about), parts.important)
        return parts

    def send(self, about: Header, data: bytes) -> None:
        arrived = decode_header(encode_header(about), about.job)
        assert self.parts.receive(self.link, arrived, memoryview(data))  # type: ignore[arg-type]

    def datagram(self, block: Block, round_: int = 1) -> None:
        self.parts.on_fragment(self.link, Fragment(3, 2, round_, block.offset, block.data))  # type: ignore[arg-type]

    def expire(self) -> None:
        """Let the wait of everything end."""
        for incoming in [each for member in self.parts._members.values() for each in member.slices.values()]:
            for assembly in incoming.open.values():
                assembly.due = 0.0
        due, self.loop.due = self.loop.due, []
        for _, callback in due:
            callback()


def test_two_parts_are_the_contribution() -> None:
    bench = Bench(dgt=2)
    for round_, array in enumerate((gradient(1), gradient(2), gradient(3)), 1):
        about = header(round_)
        parts = bench.splitter.split(about, payload(array))
        credit = bench.link.credit
        bench.send(part_header(about), parts.important)
        assert bench.link.credit == credit + len(parts.important), "returned at once"
        bench.send(part_header(about, BEHIND), parts.others)
        assert part_header(about, BEHIND).priority < part_header(about).priority
        number, got, held = bench.inbox.got[-1]
        assert (number, held) == (round_, len(parts.others)) and got.tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_quantised_blocks_send_what_they_lost_with_later_rounds(dtype: str) -> None:
    bench = Bench(dgt=3, dgt_block=512)
    sent, got = np.zeros(SIZE), np.zeros(SIZE)
    worst = 0.0
    for round_ in range(1, 30):
        array = gradient(round_, dtype)
        about = header(round_, dtype=["float32", "float64", "float16"].index(dtype))
        parts = bench.splitter.split(about, payload(array))
        assert len(parts.important) + len(parts.others) < 0.7 * len(payload(array))
        bench.send(part_header(about), parts.important)
        bench.send(part_header(about, BEHIND), parts.others)
        found = bench.inbox.got[-1][1]
        assert parts.whole is not None and found.tobytes() == bytes(parts.whole), "as a repeat sends it"
        sent += array
        got += found
        worst = max(worst, float(np.abs(sent - got).max()))
    assert worst < 1.0, "what is lost does not add up"


def test_datagrams_complete_a_contribution_in_any_order() -> None:
    bench = Bench()
    array = gradient(1)
    parts = bench.splitter.split(header(), payload(array))
    halves = [(block, at) for block in parts.blocks for at in (0, 512)]
    blocks = [Block(block.channel, block.offset + at, block.data[at : at + 512]) for block, at in halves]
    for block in blocks[::2]:
        bench.datagram(block)  # before the first part
    bench.send(part_header(header()), parts.important)
    assert not bench.inbox.got
    for block in reversed(blocks[1::2]):
        bench.datagram(block)
    ((_, got, credit),) = bench.inbox.got
    assert got.tobytes() == array.tobytes() and credit == len(parts.important)


def test_what_is_missing_is_zero_and_joins_the_next_round_when_it_is_late() -> None:
    bench = Bench()
    one, two, three = gradient(1), gradient(2), gradient(3)
    parts = bench.first(1, one)
    lost, late, *rest = parts.blocks
    for block in rest:
        bench.datagram(block)
    bench.expire()
    assert len(bench.inbox.got) == 1
    wanted = one.copy()
    for block in (lost, late):
        wanted[block.offset // 4 :][:BLOCK] = 0
    assert bench.inbox.got[0][1].tobytes() == wanted.tobytes()
    bench.datagram(late)
    with pytest.raises(BadMessage):  # more than was missing
        bench.datagram(Block(1, 0, bytes(8 * BLOCK)))
    for block in bench.first(2, two).blocks:
        bench.datagram(block, 2)
    wanted = two.copy()
    wanted[late.offset // 4 :][:BLOCK] += one[late.offset // 4 :][:BLOCK]
    assert bench.inbox.got[1][1].tobytes() == wanted.tobytes()
    for block in bench.first(3, three).blocks:
        bench.datagram(block, 3)
    assert bench.inbox.got[2][1].tobytes() == three.tobytes(), "it joins one round"
    assert bench.parts.bytes["missing"] == 8 * BLOCK and bench.parts.bytes["late"] == 4 * BLOCK


def test_late_blocks_of_half_precision_are_added_in_single() -> None:
    bench = Bench(dgt_block=512)
    late: list[Block] = []
    for round_ in (1, 2, 3):
        first, *rest = bench.first(round_, gradient(round_, "float16"), dtype=2).blocks
        for block in rest:
            bench.datagram(block, round_)
        bench.expire()
        bench.datagram(first, round_)
        late.append(first)
    for number, (round_, got, _) in enumerate(bench.inbox.got):
        wanted = gradient(round_, "float16").astype(np.float32)
        wanted[late[number].offset // 2 :][:256] = 0
        if number:
            wanted[late[number - 1].offset // 2 :][:256] += np.frombuffer(late[number - 1].data, np.float16)
        assert got.dtype == (np.float32 if number else np.float16) and np.array_equal(got, wanted)


def test_a_repeat_is_whole_and_takes_late_blocks_too() -> None:
    bench = Bench()
    one, two = gradient(1), gradient(2)
    late = bench.first(1, one).blocks[0]
    bench.expire()
    bench.datagram(late)
    before = bench.link.credit
    parts = bench.first(2, two)
    whole = bench.splitter.split(header(2), payload(two)).whole
    assert bench.parts.receive(bench.link, header(2), whole)  # type: ignore[arg-type]
    assert bench.link.credit == before + len(parts.important), "the part is dropped"
    wanted = two.copy()
    wanted[late.offset // 4 :][:BLOCK] += one[late.offset // 4 :][:BLOCK]
    assert bench.inbox.got[-1][1].tobytes() == wanted.tobytes()
    bench.datagram(parts.blocks[0], 2)  # of a round that is over: nothing is missing there
    assert bench.parts.bytes["late"] == 4 * BLOCK


def test_blocks_that_were_not_sent_are_in_the_next_contribution() -> None:
    splitter = Splitter(settings(), Kept())
    one, two = gradient(1), gradient(2)
    unsent = splitter.split(header(), payload(one)).blocks[:3]
    whole = splitter.split(header(2), payload(two), unsent).whole
    wanted = two.copy()
    for block in unsent:
        wanted[block.offset // 4 :][:BLOCK] += one[block.offset // 4 :][:BLOCK]
    assert whole is not None and bytes(whole) == wanted.tobytes()


class ToRoot(KeptLink):
    """A link whose first part of each contribution stays in its queue, so that no datagrams are sent."""

    name, endpoint, wide_area, dialled = "root", "ipc:///root", False, True

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[Header, bytes | None]] = []

    def send(self, header: Header, payload: memoryview | None) -> None:
        arrived = decode_header(encode_header(header), header.job)
        self.sent.append((arrived, None if payload is None else bytes(payload)))

    def queues(self, header: Header) -> bool:
        return header.kind == Kind.PART


@pytest.mark.parametrize("repeated", [False, True], ids=["in-parts", "repeated-whole"])
def test_blocks_of_a_contribution_that_was_repeated_whole_are_not_added_to_the_next(repeated: bool) -> None:
    loop: Any = SimpleNamespace(call_later=lambda *_: None, every=lambda *_: None, watch=lambda *_: None)
    node: Any = SimpleNamespace(
        settings=settings(), loop=loop, keys=None, process="A", telemetry=SimpleNamespace(datagrams={}),
        rpc=SimpleNamespace(ask=lambda *_: None, add_topics=len), fail=print,
    )  # fmt: skip
    link: Any = ToRoot()
    upstream, server = UpstreamClient(), DgtServer()
    upstream.links = [link]
    server.begin(node, upstream, Inbox())
    server._sender(link).ready = True
    arrays = {round_: gradient(round_) for round_ in (1, 2, 3)}
    for round_, array in arrays.items():
        link.sent.clear()
        about = header(round_)
        server.up(0, about, payload(array), lambda *_: None)
        assert [each.kind for each, _ in link.sent] == [Kind.PART]
        if repeated:
            upstream.repeat(link, "tensors")
            upstream.again(link, about.request)
            whole = link.sent[-1][1]
            assert whole == array.tobytes()
        answer = header(round_, request=about.request)
        answer.kind = Kind.RESULT
        upstream.on_result(link, answer, payload(array))
    assert (node.telemetry.datagrams["withdrawn"] > 0) != repeated
    sender = server._senders[link]
    left = [item for _, _, item in sender._queue if item.blocks]
    assert len(left) == (3 if repeated else 1)  # a root takes them for what it has summed without them


def test_what_cannot_be_divided_stays_whole() -> None:
    splitter = Splitter(settings(), Kept())
    for array in (gradient(1)[:BLOCK], np.where(gradient(1) > 3, np.inf, gradient(1)).astype(np.float32)):
        parts = splitter.split(header(length=len(array)), payload(array))
        assert not parts.important and parts.whole is not None and bytes(parts.whole) == array.tobytes()
    assert splitter.split(header(weight=0.0), None) == Parts(None)
    as_bytes = np.ones(SIZE, np.uint8)
    assert not splitter.split(header(dtype=3), payload(as_bytes)).important


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:5], lambda data: data[:-1], lambda data: data + b"x", lambda data: b"\1" + bytes(8),
        lambda data: data[:1] + b"\3\0\0\0" + data[5:], lambda data: data[:5] + b"\xff" * 4 + data[9:],
        lambda data: bytes([data[0] | 2]) + data[1:], lambda data: b"",
    ],
)  # fmt: skip
def test_invalid_parts_are_refused_and_asked_for_again(damage: Callable[[bytes], bytes]) -> None:
    bench = Bench(dgt=2)
    parts = bench.splitter.split(header(), payload(gradient(1)))
    with pytest.raises(BadMessage):
        bench.send(part_header(header()), damage(parts.important))
    assert bench.link.damaged == [1] and not bench.inbox.got


@pytest.mark.parametrize("bound", [np.nan, np.inf, -3e38])
def test_quantised_blocks_whose_bounds_make_infinite_elements_are_refused(bound: float) -> None:
    bench = Bench(dgt=3, dgt_k=0.25)
    about = header()
    parts = bench.splitter.split(about, payload(gradient(1)))
    bench.send(part_header(about), parts.important)
    count = int(np.unpackbits(np.frombuffer(parts.others, np.uint8, (SIZE // BLOCK + 8) // 8, PREAMBLE.size)).sum())
    bounds = PREAMBLE.size + (SIZE // BLOCK + 8) // 8
    damaged = bytearray(parts.others)
    damaged[bounds : bounds + 8 * count] = np.full(2 * count, bound, "<f4").tobytes()
    with pytest.raises(BadMessage, match="bounds that are no numbers"):
        bench.send(part_header(about, BEHIND), bytes(damaged))
    bench.send(part_header(about, BEHIND), parts.others)
    assert np.isfinite(bench.inbox.got[0][1]).all()


def test_parts_of_what_was_not_declared_are_refused_and_those_of_earlier_rounds_dropped() -> None:
    bench = Bench(dgt=2)
    bench.inbox.refuse = True
    with pytest.raises(BadMessage):
        bench.first(1, gradient(1))
    assert not any(member.slices for member in bench.parts._members.values())
    bench.inbox.refuse = False
    for round_ in (*range(1, 6), 3):
        bench.first(round_, gradient(1))
    ((incoming,),) = [member.slices.values() for member in bench.parts._members.values()]
    assert list(incoming.open) == [5], "who begins a round has the results of those before"


def test_the_wait_ends_soon_after_later_datagrams_and_longer_where_these_overtake() -> None:
    bench = Bench(dgt_wait=30.0)
    bench.first(1, gradient(1))
    ((when, _),) = bench.loop.due
    assert when - time.monotonic() > 20
    bench.parts.on_passed(bench.link, 3, 2, 1)  # type: ignore[arg-type]
    assert bench.loop.due[-1][0] - time.monotonic() < 0.1
    grace = Grace(1.0)
    grace.arrived(0.2)
    assert 0.3 < grace.seconds < 0.5
    for _ in range(100):
        grace.arrived(0.0)
    assert grace.seconds == 0.005
    grace.arrived(5.0)
    assert grace.seconds == 1.0


def test_the_pace_follows_what_arrives() -> None:
    pace = Pace(1e6)
    for number in range(1, 40):
        pace.report(0.1 * number, int(2e5 * number), busy=True)  # 2 MB/s arrive
    assert pace.rate == pytest.approx(2.5e6)
    pace.report(4.0, int(2e5 * 39) + 100, busy=False)
    assert pace.rate == pytest.approx(2.5e6), "there was nothing to send"
    for number in range(40, 80):
        pace.report(0.1 * number + 1, int(2e5 * 39) + int(1e4 * number), busy=True)
    assert pace.rate == Pace.LEAST


def test_k_follows_the_loss() -> None:
    splitter = Splitter(settings(dgt_k=0.8, dgt_k_min=0.2), Kept())
    for losses, k in (
        ([(2.0, 2.0)], 0.8), ([(2.0, 1.0)], 0.4), ([(2.0, 1.0), (4.0, 3.5)], 0.6), ([(2.0, 0.1)], 0.2),
        ([(2.0, 9.0)], 1.0), ([(0.0, 1.0)], 0.8),
    ):  # fmt: skip
        splitter.follow(losses)
        assert splitter.k == pytest.approx(k)


# Datagrams.


def keys() -> tuple[security.KeyRing, security.KeyRing, security.KeyRing]:
    """Of a member, the root and another member."""
    import json

    callers = {name: Identity(name, "party", rank) for rank, name in enumerate(("A", "B"))}
    made = security.generate("job", {"root": callers, "A": None, "B": None})
    rings = []
    for name in ("A", "root", "B"):
        fields = json.loads(made[name])
        fields["allowed"] = {key: Identity(*known) for key, known in fields["allowed"].items()}
        rings.append(security.KeyRing(**fields))
    return rings[0], rings[1], rings[2]


def test_both_ends_derive_one_key_that_nobody_else_has() -> None:
    member, root, other = keys()
    salt = bytes(32)
    key = session_key(member, "A", "root", salt, sends=True)
    assert key == session_key(root, "A", "root", salt, sends=False)
    strangers, _, _ = keys()
    others = [
        session_key(other, "B", "root", salt, sends=True), session_key(member, "A", "root2", salt, sends=True),
        session_key(member, "A", "root", bytes(31) + b"1", sends=True),
        session_key(other, "A", "root", salt, sends=True), session_key(strangers, "A", "root", salt, sends=True),
    ]  # fmt: skip
    assert key not in others and len(set(others)) == len(others)
    with pytest.raises(BadMessage):
        session_key(root, "C", "root", salt, sends=False)


def test_each_datagram_is_accepted_once_in_any_order_within_the_window() -> None:
    sealer, opener = Sealer(bytes(32), 7), Opener(bytes(32))
    datagrams = [sealer.seal(1 + number % 2, str(number).encode()) for number in range(200)]
    order = np.random.default_rng(1).permutation(200)
    for number in order:
        assert opener.open(datagrams[number]) == (1 + number % 2, number // 2, str(number).encode())
    for number in order:
        with pytest.raises(BadMessage, match="received before"):
            opener.open(datagrams[number])
    old, *_ = [sealer.seal(3, b"x") for _ in range(REPLAY_WINDOW)]
    opener.open(sealer.seal(3, b"x"))
    with pytest.raises(BadMessage, match="received before"):
        opener.open(old)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_sockets_have_their_priority_and_fit_the_path(host: str) -> None:
    receiver = ReceiverSocket(host, 0)
    senders = [SenderSocket((host, receiver.port), precedence) for precedence in (2, 1, 0)]
    v6 = host == "::1"
    option = (socket.IPPROTO_IPV6, socket.IPV6_TCLASS) if v6 else (socket.IPPROTO_IP, socket.IP_TOS)
    assert [sender._socket.getsockopt(*option) >> 2 for sender in senders] == [16, 8, 0], "DSCP"
    assert {sender.size for sender in senders} == {9000 - (48 if v6 else 28)} and senders[0].least < 1280
    batch = [bytes([number]) * 1000 for number in range(SenderSocket.batch(1000))]
    assert len(batch) == 60 and senders[0].send(batch)
    found: list[bytes] = []
    until(lambda: found.extend(receiver.read()) or len(found) == len(batch))
    assert found == batch
    assert senders[1].send([bytes(70_000)]), "too long: lost"
    with pytest.raises(InvalidSettings, match=f"port {receiver.port}"):
        ReceiverSocket(host, receiver.port)
    for made in (receiver, *senders):
        made._socket.close()


def test_hostile_datagrams_change_nothing() -> None:
    """Random, truncated, altered, replayed, of another session and another job."""
    bench = Bench()
    receiver = DatagramReceiver(bench.node, bench.parts)
    answers: list[dict[str, Any]] = []
    request: Any = SimpleNamespace(link=bench.link, body={"salt": bytes(16)}, answer=answers.append)
    receiver.open(request)
    (answer,) = answers
    key = session_key(None, bench.link.name, "root", bytes(16) + answer["salt"], sends=True)
    sealer = Sealer(key, answer["session"])
    parts = bench.first(1, gradient(1))
    out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    fragments = [encode_fragment(Fragment(3, 2, 1, block.offset, block.data), 4 * BLOCK) for block in parts.blocks]
    good = [sealer.seal(block.channel, data) for block, data in zip(parts.blocks, fragments, strict=True)]
    random = np.random.default_rng(5)
    bad = [random.bytes(int(size)) for size in random.integers(0, 1500, 300)]
    for one in good:
        bad += [one[:-1], one[:20], one[:40] + bytes([one[40] ^ 1]) + one[41:]]
        bad += [bytes(4) + one[4:], one[:4] + b"\xff" + one[5:]]
    bad += [Sealer(bytes(32), answer["session"]).seal(1, fragments[0])]
    outside = [Fragment(3, 2, 1, 4 * SIZE - 4, bytes(8)), Fragment(3, 2, 1, 2**32 - 8, bytes(8))]
    outside += [Fragment(9, 9, 99, 0, b"x"), Fragment(3, 2, 0, 0, b"x"), Fragment(9, 9, 1, 0, b"x")]
    bad += [sealer.seal(1, encode_fragment(fragment, 8)) for fragment in outside] + [sealer.seal(1, b"short")]
    with out:
        out.connect(("127.0.0.1", answer["port"]))
        for one in bad:
            out.send(one)
            bench.loop.read()
        assert not bench.inbox.got and len(bench.refused) >= len(bad) - 3
        for one in good[:-1]:
            out.send(one)
            out.send(one)  # a replay
            bench.loop.read()
        out.send(good[-1])
        end = time.monotonic() + 10
        while not bench.inbox.got and time.monotonic() < end:
            bench.loop.read()
    ((_, got, _),) = bench.inbox.got
    assert got.tobytes() == gradient(1).tobytes()
    session = next(iter(receiver._sessions.values()))
    with pytest.raises(BadMessage):
        receiver.on_sent(SimpleNamespace(link=KeptLink(), body={"counters": [0] * MAX_CHANNELS}))  # type: ignore[arg-type]
    assert not session.sent and not session.waiting
    never: dict[str, Any] = {"counters": [2**53] * MAX_CHANNELS, "sent": [(0, 0, 1)] * 4095}
    for _ in range(16):
        receiver.on_sent(SimpleNamespace(link=bench.link, body=never))  # type: ignore[arg-type]
    with pytest.raises(BadMessage, match="too many"):
        receiver.on_sent(SimpleNamespace(link=bench.link, body=never))  # type: ignore[arg-type]
    with pytest.raises(BadMessage):
        checked_request("datagrams", {"counters": [1], "sent": [(0, 0, 1)] * 5000}, TOPICS)
    receiver._socket._socket.close()


class Wired:
    """A sender and a root in one loop; requests and reports are calls.

    held: requests whose first part waits for the window.
    """

    def __init__(self) -> None:
        self.loop, self.held, self.wire = RealLoop(), set[int](), KeptLink()
        about_link = {"name": "root", "endpoint": "ipc:///root", "sent": 0, "window": SimpleNamespace(rate=0.0)}
        calls = {"queues": lambda header: header.request in self.held, "control": self._to_root}
        for name, value in {**about_link, **calls}.items():
            setattr(self.wire, name, value)
        self.start_root()
        self.node = SimpleNamespace(
            settings=settings(), loop=self.loop, transport=self.root.node.transport, keys=None, process="A",
            telemetry=SimpleNamespace(datagrams={"sent": 0, "withdrawn": 0}), rpc=SimpleNamespace(ask=self._ask),
            fail=print, events=SimpleNamespace(write=print),
        )  # fmt: skip
        self.splitter = Splitter(self.node.settings, Kept())
        self.sender = DatagramSender(self.node, self.wire)  # type: ignore[arg-type]

    def start_root(self) -> None:
        """Start the root, in another life than before."""
        self.root = Bench()
        self.root.node.loop, self.root.link.name = self.loop, "A"
        self.root.link.control = lambda _, body: self.sender.on_report(body)  # type: ignore[method-assign]
        self.root.parts = PartReceiver(self.root.node, self.root.inbox)
        self.receiver = DatagramReceiver(self.root.node, self.root.parts)

    def kill_root(self) -> None:
        self.receiver._sessions.clear()
        self.loop.unwatch(self.receiver._socket.fileno())
        self.receiver._socket._socket.close()

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        self.loop.run(lambda: condition() or time.monotonic() > end)
        assert condition()

    def send(self, key: int, array: np.ndarray, round_: int = 1) -> Parts:
        """Send the blocks of a contribution, whose request has the number of the key."""
        parts = self.splitter.split(header(round_, request=key), payload(array))
        self.sender.send(self.first(key, round_), parts.blocks)
        return parts

    @staticmethod
    def first(key: int, round_: int = 1) -> Header:
        """The header of its first part."""
        about = part_header(header(round_, request=key))
        about.key = key
        return about

    def close(self) -> None:
        self.loop.close()
        for made in (self.receiver._socket, *self.sender._sockets):
            made._socket.close()

    def _to_root(self, topic: str, body: dict[str, Any]) -> None:
        self.receiver.on_sent(SimpleNamespace(link=self.root.link, body=body))  # type: ignore[arg-type]

    def _ask(self, link: Any, topic: str, body: dict[str, Any], answer: Callable[[Any], None], failed: Any) -> None:
        request: Any = SimpleNamespace(link=self.root.link, body=body, answer=answer)
        self.loop.submit(lambda: self.receiver.open(request))


def test_a_sender_finds_the_path_and_sends_what_its_first_part_has_left_the_queue_of() -> None:
    wired = Wired()
    sender, root = wired.sender, wired.root
    wired.until(lambda: sender.ready)
    arrays = {3: gradient(1), 4: gradient(2)}
    wired.held.add(3)  # the first part of key 3 waits for the window; key 4's datagrams pass it
    parts = {key: wired.send(key, array) for key, array in arrays.items()}
    root.send(wired.first(4), parts[4].important)
    wired.until(lambda: bool(root.inbox.got))
    assert root.inbox.got[0][1].tobytes() == arrays[4].tobytes()
    assert not root.parts._members[root.link].slices.get((3, 2))  # type: ignore[call-overload]
    assert len(sender.withdraw(3, 2)) == len(parts[3].blocks) and not sender.withdraw(4, 2)
    assert root.parts.bytes["received"] == sum(len(block.data) for block in parts[4].blocks)
    wired.close()


def test_datagrams_go_on_when_their_root_was_restarted() -> None:
    """In a session with its new life. What was not sent waits, for a repeat or the next contribution."""
    wired = Wired()
    sender = wired.sender
    wired.until(lambda: sender.ready)
    wired.held.add(3)
    unsent = wired.send(3, gradient(1)).blocks
    wired.kill_root()
    wired.start_root()
    sender.reopen()
    old = sender._salt
    assert not sender.ready, "so contributions go whole"
    sender.reopen()
    sender._opened(old, {})  # answered late
    wired.until(lambda: sender.ready)
    assert tuple(sender.withdraw(3, 2)) == unsent
    array, root = gradient(2), wired.root
    root.send(wired.first(4, 500), wired.send(4, array, 500).important)
    wired.until(lambda: bool(root.inbox.got))
    assert root.inbox.got[0][1].tobytes() == array.tobytes()
    assert not root.parts.bytes["missing"] and root.refused == []
    wired.close()


def test_blocks_that_come_before_the_first_part_count_in_any_round() -> None:
    """A root that was restarted does not know in which one a slice is."""
    bench, array = Bench(), gradient(1)
    parts = bench.splitter.split(header(500), payload(array))
    for block in parts.blocks:
        bench.datagram(block, 500)
    bench.send(part_header(header(500)), parts.important)
    assert [(round_, got.tobytes()) for round_, got, _ in bench.inbox.got] == [(500, array.tobytes())]


def test_each_end_hears_that_the_other_was_restarted() -> None:
    """And a root that was restarted itself receives where it was planned to listen, though it does not listen yet."""
    bench, link = Bench(), ToRoot()
    bench.node.settings = replace(bench.node.settings, bind=("tcp://127.0.0.2:0",))
    bench.node.rpc = SimpleNamespace(add_topics=len, ask=lambda *given: asked.append(given[1]))
    bench.node.telemetry, bench.node.fail, asked = SimpleNamespace(datagrams={}), print, list[str]()
    root, local = DgtServer(), DgtServer()
    root.begin(bench.node, None, bench.inbox)  # type: ignore[arg-type]
    assert root._datagrams is not None
    assert root._datagrams._socket._socket.getsockname()[0] == "127.0.0.2"
    root.on_request(SimpleNamespace(topic="datagrams_open", link=bench.link, body={"salt": bytes(16)}, answer=len))  # type: ignore[arg-type]
    assert root._datagrams._sessions
    root.on_renewed(bench.link)  # type: ignore[arg-type]
    assert not root._datagrams._sessions
    root._datagrams._socket._socket.close()
    local.begin(bench.node, UpstreamClient(), bench.inbox)  # type: ignore[arg-type]
    sender = local._sender(link)  # type: ignore[arg-type]
    sender.ready = True
    local.on_renewed(link)  # type: ignore[arg-type]
    assert not sender.ready and asked == ["datagrams_open"] * 2
