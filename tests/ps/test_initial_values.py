"""Initial values: the first push of a key counts, and another value from a later one is warned of."""

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from bench import SIZE, Bench, KeptLink
from cluster import Cluster, free_ports, until
from proxy import Proxy
from rounds import SCRIPT, assert_equal, expected, found_in

from geomx_cli.ps.aggregation import value_service
from geomx_cli.ps.aggregation.aggregator import Aggregator
from geomx_cli.ps.aggregation.slice_state import SliceState
from geomx_cli.ps.aggregation.slice_table import SliceTable
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.net.payload import as_payload, digest, view
from geomx_cli.ps.net.wire import BadMessage, Header, Kind
from geomx_cli.runtime.algorithms.fsa import FsaServer

FIRST, OTHER = (np.full(SIZE, value, np.float32) for value in (1, 2))


def payload(array: Array) -> memoryview:
    return as_payload(array, 0)


class Root:
    """A root, links to two of its members, and the answers to them."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.bench = Bench("sgd", warn=self.warnings.append)
        self.bench.links[0].name, self.bench.links[1].name = "near", "far"
        self.values, (self.near, self.far) = self.bench.rounds.values, self.bench.links

    @property
    def entry(self) -> SliceState:
        return self.bench.rounds.table.entries[0, 0]

    def push(self, array: Array, request: int = 1, link: KeptLink | None = None) -> None:
        header = self.bench.header(Kind.PUSH, request=request)
        self.values.on_push(link or self.far, header, payload(array))  # type: ignore[arg-type]


def test_a_later_push_of_another_value_is_warned_of_once() -> None:
    root = Root()
    root.push(FIRST)
    root.push(FIRST, 1)
    root.push(FIRST, 2, root.near)
    assert root.warnings == []
    root.push(OTHER, 3, root.near)
    root.push(OTHER, 4, root.near)
    (warning,) = root.warnings
    assert "was given an initial value by far and by near; the first one counts" in warning
    root.push(OTHER, 5)
    assert "twice by far, with different values" in root.warnings[1]
    assert np.array_equal(root.entry.slot.value, FIRST)


def test_a_push_after_a_round_is_warned_of_if_it_is_no_repeat() -> None:
    root = Root()
    root.push(FIRST)
    for rank in (0, 1):
        root.bench.push(rank, 1, np.ones(SIZE, np.float32))
    root.push(FIRST)
    assert root.warnings == []
    root.push(FIRST, 2, root.near)
    assert len(root.warnings) == 1


def test_a_push_of_the_value_after_a_round_is_not_warned_of() -> None:
    root = Root()
    root.push(FIRST)
    for rank in (0, 1):
        root.bench.push(rank, 1, np.ones(SIZE, np.float32))
    root.push(root.entry.slot.value, 1, root.near)
    assert root.warnings == []
    root.push(OTHER, 2, root.near)
    assert len(root.warnings) == 1


# A local server.


class LocalServer:
    """A local server below a root in another party, links to two of its workers, and the answers to them."""

    def __init__(self) -> None:
        self.up, self.root, self.near, self.far = UpstreamClient(), KeptLink(), KeptLink(), KeptLink()
        self.near.name, self.far.name = "near", "far"
        self.up.links = [self.root]  # type: ignore[list-item]
        self.warnings: list[str] = []
        self.answers: list[tuple[KeptLink, int]] = []
        down = SimpleNamespace(down=lambda link, header, _: self.answers.append((link, header.request)))
        table = SliceTable(algorithm=FsaServer(), roots=lambda: 1, required_contributors=lambda: [0, 1])
        self.rounds = Aggregator(
            delivery=down, upstream=self.up, own_rank=lambda: 0, table=table, warn=self.warnings.append,  # type: ignore[arg-type]
        )  # fmt: skip

    def forwarded(self) -> list[int]:
        """Bytes of the values sent to the root since the last call."""
        found = [len(each or b"") for _, each in self.root.sent]
        self.root.sent.clear()
        return found

    def push(self, link: KeptLink, request: int, array: Array = FIRST) -> None:
        header = Header(kind=Kind.PUSH, length=SIZE, request=request)
        self.rounds.values.on_push(link, header, payload(array))  # type: ignore[arg-type]


def test_what_a_member_pushes_before_a_root_acknowledges_it_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeat is not forwarded again, another member has its own limit, and acknowledged values do not count."""
    monkeypatch.setattr(value_service, "MAX_PUSHED", 3 * 4 * SIZE)
    monkeypatch.setattr(value_service, "MAX_PUSHES", 1)
    server = LocalServer()
    near = server.near
    for request in (1, 2, 3, 1, 2, 3):
        server.push(near, request)
    first, _ = server.root.sent[0]
    assert server.forwarded() == [4 * SIZE] * 3
    with pytest.raises(BadMessage, match="a push beyond 12000 bytes"):
        server.push(near, 4)
    server.push(server.far, 4)
    server.up.on_result(server.root, Header(kind=Kind.RESULT, request=first.request), None)  # type: ignore[arg-type]
    server.push(near, 5)
    assert server.forwarded() == [4 * SIZE] * 2
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
    server.rounds.table.entries[0, 0].slot.value = OTHER
    server.push(server.far, 1, OTHER)
    assert server.warnings == []


def test_a_digest_is_of_dtype_and_bits() -> None:
    zeros = np.zeros(4, np.float32)
    halves = np.zeros(8, np.float16)
    assert digest(as_payload(zeros, 0), 0) == digest(as_payload(zeros.copy(), 0), 0)
    assert digest(as_payload(zeros, 0), 0) != digest(as_payload(-zeros, 0), 0)
    assert digest(as_payload(zeros, 0), 0) != digest(as_payload(halves, 2), 2)
    assert view(Header(kind=Kind.PUSH, length=4), payload(zeros)).tobytes() == zeros.tobytes()


# A cluster.


def test_cuts_while_the_values_are_set(cluster: Cluster, tmp_path: Path) -> None:
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
        "OUT": str(tmp_path / "w{rank}.npz"), "SERVER_OPTIMIZER": "1", "GATES": str(gates),
        "MXNET_KVSTORE_BIGARRAY_BOUND": "5000",
    }  # fmt: skip
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
