"""Initial values that all workers have: only their digests cross links between parties, and only the master's count."""

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench import SIZE, Bench, KeptLink
from cluster import Cluster, free_ports, until
from proxy import Proxy
from rounds import SCRIPT, SIZES, assert_equal, expected, found_in, initial

from geomx_cli.core.options import Value
from geomx_cli.ps.aggregation import value_service
from geomx_cli.ps.aggregation.aggregator import Aggregator
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.aggregation.slices import SliceState, SliceTable
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.arrays import Array, SliceArrays
from geomx_cli.ps.net.payload import Content, as_payload, digest, view
from geomx_cli.ps.net.wire import BadMessage, Form, Header, Kind
from geomx_cli.runtime.algorithms.fsa import FsaServer

MODEL = 4 * sum(SIZES)
FIRST, OTHER = (np.full(SIZE, value, np.float32) for value in (1, 2))


def payload(array: Array) -> memoryview:
    return as_payload(array, 0)


class Root:
    """A root, links to two of its members, and the answers to them."""

    def __init__(self, may_offer: bool = True, dtype: int = 0) -> None:
        self.warnings: list[str] = []
        self.bench = Bench("sgd", dtype=dtype, may_offer=lambda: may_offer, warn=self.warnings.append)
        self.bench.links[0].name, self.bench.links[1].name = "near", "far"
        self.values, (self.near, self.far) = self.bench.rounds.values, self.bench.links

    @property
    def entry(self) -> SliceState:
        return self.bench.rounds.table.entries[0, 0]

    def push(self, array: Array, request: int = 1, link: KeptLink | None = None, *, whole: bool = False) -> None:
        header = self.bench.header(Kind.PUSH, request=request, digest=digest(payload(array), 0))
        self.values.on_push(link or self.far, header, payload(array) if whole else None)  # type: ignore[arg-type]

    def offer(self, array: Array) -> None:
        header = self.bench.header(Kind.OFFER, request=99)
        self.values.on_offer(self.near, header, payload(array))  # type: ignore[arg-type]

    def pull(self, have: Array, request: int = 50) -> None:
        header = self.bench.header(Kind.PULL, request=request, digest=digest(payload(have), 0))
        self.values.on_pull(self.far, header, 1)  # type: ignore[arg-type]

    def answers(self) -> list[tuple[int, Form, int]]:
        """Request, form and bytes of the payload of each answer since the last call, but of those to offers."""
        found = [(h.request, h.form, len(p or b"")) for _, h, p in self.bench.delivery.downs if h.request != 99]
        self.bench.delivery.downs.clear()
        return found


@pytest.mark.parametrize("order", list(itertools.permutations("opq")), ids="".join)
def test_an_offer_completes_a_digest_in_any_order(order: tuple[str, ...]) -> None:
    root = Root()
    steps: dict[str, Callable[[], None]] = {
        "o": lambda: root.offer(FIRST),
        "p": lambda: root.push(FIRST),
        "q": lambda: root.pull(FIRST),
    }
    for step in order:
        steps[step]()
    assert sorted(root.answers()) == [(1, Form.FULL, 0), (50, Form.SAME, 0)]
    assert root.far.again == []
    assert np.array_equal(root.entry.value, FIRST)
    assert root.entry.offered is None
    root.pull(OTHER, 51)
    assert root.answers() == [(51, Form.FULL, 4 * SIZE)]


@pytest.mark.parametrize("first", ["offer", "digest"])
def test_an_offer_that_differs_sets_nothing(first: str) -> None:
    root = Root()
    steps = [lambda: root.offer(OTHER), lambda: root.push(FIRST)]
    for step in steps if first == "offer" else reversed(steps):
        step()
    root.pull(OTHER)
    assert (root.far.again, root.answers(), root.entry.value) == ([1], [], None)
    root.push(FIRST, whole=True)
    assert sorted(root.answers()) == [(1, Form.FULL, 0), (50, Form.FULL, 4 * SIZE)]
    assert np.array_equal(root.entry.value, FIRST)
    root.offer(OTHER)
    root.push(OTHER, 2)
    assert np.array_equal(root.entry.value, FIRST), "the first push wins"
    assert root.entry.offered is None
    assert root.answers() == [(2, Form.FULL, 0)]


def test_without_a_member_that_may_offer_the_value_is_requested_at_once() -> None:
    root = Root(may_offer=False)
    root.push(FIRST)
    assert root.far.again == [1]


def test_an_offer_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(value_service, "time", SimpleNamespace(monotonic=lambda: clock.now))
    root = Root()
    root.push(FIRST)
    root.push(FIRST)  # repeated after a cut
    root.values.check_offers()
    assert root.far.again == []
    clock.now += value_service.OFFER_LIMIT + 1
    root.values.check_offers()
    root.values.check_offers()
    assert root.far.again == [1]
    root.push(FIRST, whole=True)
    assert root.answers() == [(1, Form.FULL, 0)]


def test_one_push_of_a_slice_waits_and_further_ones_send_their_value() -> None:
    root = Root()
    root.push(FIRST)
    root.push(OTHER, 2)
    root.push(OTHER, 1, root.near)
    assert (root.far.again, root.near.again) == ([2], [1])
    root.push(OTHER, 2, whole=True)
    assert sorted(root.answers()) == [(1, Form.FULL, 0), (2, Form.FULL, 0)], "the one that waited is answered as well"
    assert np.array_equal(root.entry.value, OTHER)


@pytest.mark.parametrize("whole", [True, False])
def test_a_later_push_of_another_value_is_warned_of_once(whole: bool) -> None:
    root = Root()
    root.push(FIRST, whole=True)
    root.push(FIRST, 1, whole=whole)
    root.push(FIRST, 2, root.near, whole=whole)
    assert root.warnings == []
    root.push(OTHER, 3, root.near, whole=whole)
    root.push(OTHER, 4, root.near, whole=whole)
    (warning,) = root.warnings
    assert "was given an initial value by far and by near; the first one counts" in warning
    root.push(OTHER, 5, whole=whole)
    assert "twice by far, with different values" in root.warnings[1]
    assert np.array_equal(root.entry.value, FIRST)


def test_a_push_after_a_round_is_warned_of_if_it_is_no_repeat() -> None:
    root = Root()
    root.push(FIRST, whole=True)
    for rank in (0, 1):
        root.bench.push(rank, 1, np.ones(SIZE, np.float32))
    root.push(FIRST, whole=True)
    assert root.warnings == []
    root.push(FIRST, 2, root.near, whole=True)
    assert len(root.warnings) == 1


@pytest.mark.parametrize("whole", [True, False])
def test_a_push_of_the_value_after_a_round_is_not_warned_of(whole: bool) -> None:
    root = Root()
    root.push(FIRST, whole=True)
    for rank in (0, 1):
        root.bench.push(rank, 1, np.ones(SIZE, np.float32))
    root.push(root.entry.value, 1, root.near, whole=whole)
    assert root.warnings == []
    root.push(OTHER, 2, root.near, whole=whole)
    assert len(root.warnings) == 1


def test_a_push_that_waited_for_an_offer_is_compared_too() -> None:
    root = Root()
    root.push(FIRST)
    root.push(OTHER, 2, root.near, whole=True)
    assert "by near and by far" in root.warnings[0]


def test_a_value_after_a_round_is_sent_though_it_equals_the_initial_one() -> None:
    root = Root()
    root.push(FIRST, whole=True)
    for rank in (0, 1):
        root.bench.push(rank, 1, np.zeros(SIZE, np.float32))
    root.answers()
    root.pull(FIRST)
    assert root.answers() == [(50, Form.FULL, 4 * SIZE)]


def test_an_offer_of_wider_elements_cannot_add_bits() -> None:
    root = Root(dtype=2)
    wide, exact = np.full(SIZE, 1 + 2**-20, np.float32), np.ones(SIZE, np.float16)
    header = root.bench.header(Kind.OFFER, request=99, wide=True)
    root.values.on_offer(root.near, header, payload(wide))  # type: ignore[arg-type]
    digested = root.bench.header(Kind.PUSH, request=1, digest=digest(as_payload(exact, 2), 2))
    root.values.on_push(root.far, digested, None)  # type: ignore[arg-type]
    assert root.entry.value.dtype == np.float16
    assert np.array_equal(root.entry.value, exact)


# The sending end.


class Upstream:
    """A client with a link to a root in another party, and the contents of results."""

    def __init__(self, compress: str = "") -> None:
        self.client, self.link = UpstreamClient(), KeptLink()
        self.compression, self.arrays = Compression(compress), SliceArrays()
        self.link.wide_area = True
        self.found: list[Content] = []

    def send(self, kind: Kind, array: Array) -> Header:
        header = Header(kind=kind, length=SIZE, digest=digest(payload(array), 0))
        self.client.send(self.link, header, payload(array), self.take)  # type: ignore[arg-type]
        return header

    def take(self, result: Header, found: Content) -> None:
        self.found.append(self.compression.pulled(self.arrays, result, found))

    def sent(self) -> list[int]:
        """Bytes of the payloads sent since the last call."""
        found = [len(each or b"") for _, each in self.link.sent]
        self.link.sent.clear()
        return found

    def answer(self, asked: Header, **fields: Any) -> None:
        fields = {"length": SIZE if asked.kind == Kind.PULL else 0, **fields}
        header = Header(kind=Kind.RESULT, request=asked.request, **fields)
        self.client.on_result(self.link, header, None)  # type: ignore[arg-type]


def test_a_push_is_sent_when_it_is_asked_for_and_asked_about_again_after_a_cut() -> None:
    up = Upstream()
    asked = up.send(Kind.PUSH, FIRST)
    assert up.sent() == [0]
    up.client.again(up.link, asked.request)  # type: ignore[arg-type]
    up.client.again(up.link, asked.request)  # type: ignore[arg-type]
    assert up.sent() == [4 * SIZE]
    for lane in ("tensors", "control"):
        up.client.repeat(up.link, lane)  # type: ignore[arg-type]
    assert up.sent() == [0, 0]
    up.client.again(up.link, asked.request)  # type: ignore[arg-type]
    assert up.sent() == [4 * SIZE]
    up.answer(asked)
    up.answer(asked)
    assert len(up.found) == 1 and up.client.waiting == 0


@pytest.mark.parametrize("compress", ["", "int8"])
def test_the_same_value_is_the_one_at_hand_and_the_reference_of_changes(compress: str) -> None:
    up = Upstream(compress)
    asked = up.send(Kind.PULL, FIRST)
    up.client.again(up.link, asked.request)  # type: ignore[arg-type]
    up.client.repeat(up.link, "tensors")  # type: ignore[arg-type]
    assert up.sent() == [0, 0]
    for _ in range(2):
        up.answer(asked, form=Form.SAME)
    (found,) = up.found
    assert isinstance(found, np.ndarray) and found.tobytes() == FIRST.tobytes()
    assert up.compression.has_reference(up.arrays) == bool(compress)


def test_only_who_has_a_value_is_told_that_it_is_the_same() -> None:
    up = Upstream()
    asked = Header(kind=Kind.PULL, length=SIZE)
    up.client.send(up.link, asked, None, lambda _, found: up.found.append(found))  # type: ignore[arg-type]
    with pytest.raises(BadMessage):
        up.answer(asked, form=Form.SAME)
    pushed = up.send(Kind.PUSH, FIRST)
    with pytest.raises(BadMessage, match="where none was offered"):
        up.answer(pushed, form=Form.SAME)
    assert not up.found


class LocalServer:
    """A local server below a root in another party, links to two of its workers, and the answers to them."""

    def __init__(self) -> None:
        self.up, self.near, self.far = Upstream(), KeptLink(), KeptLink()
        self.near.name, self.far.name = "near", "far"
        self.up.client.links = [self.up.link]  # type: ignore[list-item]
        self.warnings: list[str] = []
        self.answers: list[tuple[KeptLink, int]] = []
        down = SimpleNamespace(down=lambda link, header, _: self.answers.append((link, header.request)))
        table = SliceTable(algorithm=FsaServer(), roots=lambda: 1, required_contributors=lambda: [0, 1])
        self.rounds = Aggregator(
            delivery=down, upstream=self.up.client, own_rank=lambda: 0, table=table, warn=self.warnings.append,  # type: ignore[arg-type]
        )  # fmt: skip

    def push(self, link: KeptLink, request: int, array: Array = FIRST) -> None:
        header = Header(kind=Kind.PUSH, length=SIZE, request=request)
        self.rounds.values.on_push(link, header, payload(array))  # type: ignore[arg-type]


def test_what_a_member_pushes_before_a_root_acknowledges_it_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeat is not forwarded again, another member has its own limit, and acknowledged values do not count."""
    monkeypatch.setattr(value_service, "MAX_PUSHED", 3 * 4 * SIZE)
    monkeypatch.setattr(value_service, "MAX_PUSHES", 1)
    server = LocalServer()
    up, near = server.up, server.near
    for request in (1, 2, 3, 1, 2, 3):
        server.push(near, request)
    forwarded = [header for header, _ in up.link.sent]
    assert up.sent() == [4 * SIZE] * 3
    with pytest.raises(BadMessage, match="a push beyond 12000 bytes"):
        server.push(near, 4)
    server.push(server.far, 4)
    up.answer(forwarded[0])
    server.push(near, 5)
    assert up.sent() == [4 * SIZE] * 2
    assert server.answers == [(near, 1)]


def test_a_local_server_warns_of_another_value_and_not_of_another_worker() -> None:
    server = LocalServer()
    server.push(server.near, 1)
    server.push(server.far, 1)
    server.push(server.near, 2)
    assert server.warnings == []
    server.push(server.far, 2, OTHER)
    (warning,) = server.warnings
    assert "was given an initial value by near and by far; the first one counts" in warning


def test_a_local_server_does_not_warn_of_the_present_value() -> None:
    server = LocalServer()
    server.push(server.near, 1)
    server.rounds.table.entries[0, 0].value = OTHER
    server.push(server.far, 1, OTHER)
    assert server.warnings == []


def test_a_digest_is_of_dtype_and_bits() -> None:
    zeros = np.zeros(4, np.float32)
    halves = np.zeros(8, np.float16)
    assert digest(as_payload(zeros, 0), 0) == digest(as_payload(zeros.copy(), 0), 0)
    assert digest(as_payload(zeros, 0), 0) != digest(as_payload(-zeros, 0), 0)
    assert digest(as_payload(zeros, 0), 0) != digest(as_payload(halves, 2), 2)
    assert view(Header(kind=Kind.PUSH, length=4), payload(zeros)).tobytes() == zeros.tobytes()


# Clusters.

SHAPES: dict[str, dict[str, Value]] = {
    "central": {},
    "central, 2 local servers": {"global_servers": 2, "local_servers": 2},
    "central, one of the workers is the master": {"rank_scope": "global"},
    "spread": {"topology": "spread"},
    "spread, central workers": {"topology": "spread", "workers": 1, "central_workers": 2},
    "spread, one of the workers is the master": {"topology": "spread", "rank_scope": "global"},
    "flat": {"topology": "flat"},
}

CROSSES = {"central, one of the workers is the master": 2, "flat": 1}
"""How often `wan_bytes` counts the model: where nobody near the root can offer values, the master's cross once, to it.
"""


def run(cluster: Cluster, options: dict[str, Value], differ: str = "", **env: str) -> list[Array]:
    """Run a planned cluster, and return the weights that all its workers have at the end."""
    planned = cluster.planned(SCRIPT[1:], {**options, "slice_elements": 20_000, "heartbeat": 0.5})
    cluster.environment = {"OUT": str(cluster.directory / "w{rank}.npz"), "SERVER_OPTIMIZER": "1", "COMMON": "1", **env}
    cluster.each = {
        each.file_name: {"COMMON": "differ"} for each in planned.processes if differ and each.name.startswith(differ)
    }
    cluster.launch_planned(planned)
    cluster.finish()
    found = found_in(cluster.directory)
    assert_equal(found, found[0])
    return found[0]


def wan_bytes(directory: Path) -> int:
    """Bytes that all servers sent and received between parties; the script's workers write no events."""
    total = 0
    for path in (directory / "events").glob("*.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        traffic = [event["bytes"]["wan"] for event in events if event.get("bytes")]
        total += sum(traffic[-1]) if traffic else 0
    return total


@pytest.mark.parametrize("shape", SHAPES)
def test_only_digests_cross_between_parties(cluster: Cluster, shape: str) -> None:
    found = run(cluster, SHAPES[shape], ROUNDS="0")
    for index, array in enumerate(found):
        assert array.tobytes() == initial(SIZES[index], index).tobytes()
    crossed = wan_bytes(cluster.directory) - MODEL * CROSSES.get(shape, 0)
    assert 0 < crossed < MODEL / 4, crossed


@pytest.mark.parametrize(("differ", "compress"), [("A/", ""), ("B/worker:0", "int8")])
def test_the_masters_values_count_whatever_others_offer(
    cluster: Cluster, tmp_path: Path, differ: str, compress: str
) -> None:
    options: dict[str, Value] = {"topology": "spread", "compress": compress or "none"}
    found = run(cluster, options, differ, ROUNDS="3")
    if compress:
        other = Cluster(tmp_path / "other")
        other.directory.mkdir()
        try:
            wanted = run(other, options, ROUNDS="3", COMMON="")
        finally:
            other.stop()
    else:
        wanted = expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 3), optimizer=True)
    assert_equal({0: found}, wanted)


@pytest.mark.parametrize("differ", [False, True])
def test_cuts_while_the_values_are_set(cluster: Cluster, tmp_path: Path, differ: bool) -> None:
    """The master is far from the root, one party near, the other far; values cross in slices of 5000 elements."""
    ports = free_ports(14)
    near, far = ports[:7], ports[7:]
    servers = ("root0", "Asrv0", "Bsrv0")
    workers = ("Aw0", "Aw1", "Bw0", "Bw1")
    parties = {"gs": "A", "root0": "A", "cs": "Z", "master": "Z"}
    for name in ("gs", "cs", "master", "As", "Bs", *servers, *workers):
        cluster.each[name] = {"GEOMX_PROCESS": name, "GEOMX_PARTY": parties.get(name, name[0])}
    for name, front, port in zip(("gs", "cs", "As", "Bs", *servers), near, far, strict=True):
        cluster.each[name]["GEOMX_BIND"] = f"tcp://127.0.0.1:{port}"
        if name in servers:
            cluster.each[name]["GEOMX_ADVERTISE"] = f"tcp://127.0.0.1:{front}"
    gates = tmp_path / "gates"
    gates.mkdir()
    cluster.environment = {
        "OUT": str(tmp_path / "w{rank}.npz"), "SERVER_OPTIMIZER": "1", "COMMON": "1", "GATES": str(gates),
        "MXNET_KVSTORE_BIGARRAY_BOUND": "5000",
    }  # fmt: skip
    if differ:
        cluster.each["Aw0"]["COMMON"] = "differ"
    proxy = Proxy(dict(zip(near, far, strict=True)))
    cluster.launch(SCRIPT, ports=near[:4])
    until(lambda: all("at declare\n" in cluster.output(name) for name in (*workers, "master")))
    (gates / "declare").touch()
    until(lambda: all("at declare\n" in cluster.output(name) for name in workers))
    while not all("at barrier\n" in cluster.output(name) for name in workers):
        proxy.cut(chance=0.5)
        with proxy.losing():
            time.sleep(0.02)
        time.sleep(0.25)
        assert all(process.poll() is None for process in cluster.processes.values()), cluster.outputs()
    for gate in ("barrier", "leave", "close"):
        (gates / gate).touch()
    cluster.finish()
    assert_equal(found_in(tmp_path), expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 5), optimizer=True))
