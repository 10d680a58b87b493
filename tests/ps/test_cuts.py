"""Connections cut at any moment: they are restored, lost messages are sent again, and nothing is executed twice."""

import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, free_ports, until
from proxy import Proxy
from rounds import SCRIPT, assert_equal, expected, found_in

from geomx_cli.contract.config import NodeSettings
from geomx_cli.core.errors import GeomxError
from geomx_cli.core.event_log import EventLog
from geomx_cli.core.options import defaults
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.net.link import Link

WORKERS = ("Aw0", "Aw1", "Bw0", "Bw1")


def launch(cluster: Cluster, tmp_path: Path, **variables: str) -> Proxy:
    """Two parties of two workers; all connections go through the proxy."""
    ports = free_ports(14)
    near, far = ports[:7], ports[7:]
    schedulers, servers = ("gs", "cs", "As", "Bs"), ("root0", "Asrv0", "Bsrv0")
    for name, front, port in zip((*schedulers, *servers), near, far, strict=True):
        cluster.each[name] = {"GEOMX_BIND": f"tcp://127.0.0.1:{port}", "GEOMX_PROCESS": name}
        if name in servers:
            cluster.each[name]["GEOMX_ADVERTISE"] = f"tcp://127.0.0.1:{front}"
    (tmp_path / "gates").mkdir()
    cluster.environment = {
        "OUT": str(tmp_path / "w{rank}.npz"),
        "SERVER_OPTIMIZER": "1",
        "GATES": str(tmp_path / "gates"),
        **variables,
    }
    for name in WORKERS:
        cluster.each.setdefault(name, {})["GEOMX_PROCESS"] = name
    proxy = Proxy(dict(zip(near, far, strict=True)))
    cluster.launch(SCRIPT, ports=near[:4])
    return proxy


def wait_at(cluster: Cluster, gate: str) -> None:
    """Wait until all workers have reached the gate."""
    until(lambda: all(f"at {gate}\n" in cluster.output(name) for name in WORKERS))


def open_gates(tmp_path: Path, *names: str) -> None:
    """Let the workers pass."""
    for name in names:
        (tmp_path / "gates" / name).touch()


def assert_trained(tmp_path: Path, rounds: int) -> None:
    """All four workers have the right weights."""
    found = found_in(tmp_path)
    assert len(found) == 4
    assert_equal(found, expected([[0, 1], [2, 3]], dict.fromkeys(range(4), rounds), optimizer=True))


def test_a_cut_link_to_the_root_comes_back_and_nothing_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    port, front = free_ports(2)
    proxy = Proxy({front: port})
    cluster.environment = {
        "OUT": str(tmp_path / "w{rank}.npz"),
        "SERVER_OPTIMIZER": "1",
        "MXNET_KVSTORE_BIGARRAY_BOUND": "5000",
        "ROUNDS": "40",
    }
    listens = {"GEOMX_BIND": f"tcp://127.0.0.1:{port}", "GEOMX_ADVERTISE": f"tcp://127.0.0.1:{front}"}
    cluster.launch(SCRIPT, root_env=listens)
    for mebibytes in (1, 3, 6):
        until(lambda mebibytes=mebibytes: proxy.forwarded >= mebibytes * 2**20)
        before = proxy.cuts
        proxy.cut()
        assert proxy.cuts > before, "there was nothing to cut"
    cluster.finish()
    assert_trained(tmp_path, 40)


def test_connections_that_a_proxy_has_forgotten_are_dialled_again(cluster: Cluster, tmp_path: Path) -> None:
    """It goes on acknowledging what is sent, so that TCP sees nothing."""
    port, front = free_ports(2)
    proxy = Proxy({front: port})
    out = str(tmp_path / "w{rank}.npz")
    cluster.environment = {"OUT": out, "SERVER_OPTIMIZER": "1", "ROUNDS": "40", "SLOW": "0.05"}
    listens = {"GEOMX_BIND": f"tcp://127.0.0.1:{port}", "GEOMX_ADVERTISE": f"tcp://127.0.0.1:{front}"}
    cluster.launch(SCRIPT, root_env=listens)
    until(lambda: proxy.forwarded >= 2**20)
    assert proxy.forget() >= 4, "there are two parties with two connections each"
    cluster.finish()
    assert_trained(tmp_path, 40)
    assert "is acknowledged and does not arrive; dialling again" in cluster.output("Asrv0") + cluster.output("Bsrv0")


@pytest.mark.parametrize("gate", ["declare", "barrier", "leave", "close"])
def test_what_is_asked_when_all_connections_break_is_asked_again(cluster: Cluster, tmp_path: Path, gate: str) -> None:
    """Requests, relayed requests, answers and goodbyes of all processes are lost, some twice."""
    proxy = launch(cluster, tmp_path)
    gates = ["declare", "barrier", "leave", "close"]
    open_gates(tmp_path, *gates[: gates.index(gate)])
    wait_at(cluster, gate)
    with proxy.losing():
        open_gates(tmp_path, gate)
        time.sleep(0.3)
    for pause in (0.05, 0.1, 0.2, 0.4):
        time.sleep(pause)
        with proxy.losing():
            time.sleep(0.05)
    open_gates(tmp_path, *gates)
    cluster.finish()
    assert_trained(tmp_path, 5)


def test_a_barrier_that_waits_outlives_its_connections(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "late").mkdir()
    cluster.each["Bw1"] = {"GATES": str(tmp_path / "late")}
    proxy = launch(cluster, tmp_path)
    open_gates(tmp_path, "declare", "barrier", "leave", "close")
    (tmp_path / "late" / "declare").touch()
    wait_at(cluster, "barrier")
    for _ in range(4):
        time.sleep(0.3)
        proxy.cut()
    assert not any("at leave" in cluster.output(name) for name in WORKERS)
    for gate in ("barrier", "leave", "close"):
        (tmp_path / "late" / gate).touch()
    cluster.finish()
    assert_trained(tmp_path, 5)


def test_cuts_from_the_beginning_to_the_end(cluster: Cluster, tmp_path: Path) -> None:
    proxy = launch(cluster, tmp_path, ROUNDS="10")
    open_gates(tmp_path, "declare", "barrier", "leave", "close")
    for _ in range(100):
        time.sleep(0.25)
        proxy.cut(chance=0.3)
        if all(process.poll() is not None for process in cluster.processes.values()):
            break
    cluster.finish()
    assert proxy.cuts
    assert_trained(tmp_path, 10)


def test_a_failure_is_told_though_the_connections_break(cluster: Cluster, tmp_path: Path) -> None:
    cluster.each["Bw1"] = {"FAIL": "1"}
    proxy = launch(cluster, tmp_path, GEOMX_SILENCE="8")  # the process that could report it may be disconnected
    open_gates(tmp_path, "declare", "barrier", "leave")
    wait_at(cluster, "close")
    with proxy.losing():
        open_gates(tmp_path, "close")
        time.sleep(0.1)
    cluster.wait()
    told = [name for name in cluster.processes if "it was told to fail" in cluster.output(name)]
    assert {"Bs", "Bsrv0", "gs", "root0"} <= set(told), cluster.outputs()


class Peer:
    """A node in a thread that answers each request with the number of times that it was executed."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.links: list[Link] = []
        self.node = Node(
            NodeSettings(options=defaults()), EventLog(None),
            on_tensor=lambda *_: None, on_request=self._work, on_link=self.links.append,
        )  # fmt: skip
        self.thread = threading.Thread(target=self.node.loop.run)

    def _work(self, request: Request) -> None:
        self.done[request.topic] += 1
        pause = random.Random(request.topic).random() * 0.05
        self.node.loop.call_later(pause, lambda: request.answer({"topic": request.topic}))

    def ask(self, link: Link, count: int) -> Counter[str]:
        """Make requests; returns the answers, which arrive over time."""
        answers: Counter[str] = Counter()

        def check(topic: str, body: dict[str, Any]) -> None:
            answers[topic if body == {"topic": topic} else f"{body} to {topic}"] += 1

        def failed(error: GeomxError) -> None:
            answers[str(error)] += 1

        def ask(topic: str) -> None:
            self.node.rpc.ask(link, topic, {"some": "thing"}, lambda body: check(topic, body), failed)

        for number in range(count):
            self.node.loop.call_later(number * 0.002, lambda topic=f"{number}": ask(topic))
        return answers

    def stop(self) -> None:
        """End the thread."""
        self.node.loop.submit(self.node.loop.stop)
        self.thread.join()
        self.node.close()


def test_a_request_is_done_once_and_answered_once_whichever_side_asks() -> None:
    near, far = free_ports(2)
    proxy = Proxy({near: far})
    below, above = Peer(), Peer()
    above.node.transport.listen((f"tcp://127.0.0.1:{far}",))
    link = below.node.transport.dial(f"tcp://127.0.0.1:{near}", "above", wide_area=False)
    for peer in (below, above):
        peer.thread.start()
    until(lambda: above.links)
    count = 600
    wanted = Counter({str(number): 1 for number in range(count)})
    answers = [below.ask(link, count), above.ask(above.links[0], count)]
    for chance in (1, 0.5) * 8:
        time.sleep(0.15)
        proxy.cut(chance)
    until(lambda: all(item == wanted for item in answers))
    for peer in (below, above):
        peer.stop()
    assert answers == [wanted, wanted]
    assert below.done == above.done == wanted
