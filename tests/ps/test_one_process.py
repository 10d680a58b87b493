"""Whole clusters as threads of one process: joining, requests of all kinds, barriers over both planes, and the end."""

import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geomx_cli.contract.config import PlaneSettings
from geomx_cli.contract.settings import Settings
from geomx_cli.core import plugins
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.client import Client
from geomx_cli.ps.cluster.partition import Tensor
from geomx_cli.ps.cluster.scheduler import Scheduler
from geomx_cli.ps.net.lanes import LANES, Lane
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.transport import Transport
from geomx_cli.ps.server import Server
from geomx_cli.runtime.plugin_factory import part

SIZE = 70_000
LIMIT = 240.0


class Processes:
    """Schedulers, servers and workers of a job, each in a thread. `errors`: of those that have failed."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.directory = directory
        given = {"silence": 120.0, "timeout": 120.0, "patience": 120.0, **options}
        defaults = {option.name: option.default for option in plugins.table()}
        self.common: dict[str, Any] = {
            "job": "j", "job_dir": str(directory), "host": "h", "options": {**defaults, **given}
        }  # fmt: skip
        self.errors: list[BaseException] = []
        self.threads: list[threading.Thread] = []

    def plane(self, name: str, servers: int, workers: int) -> PlaneSettings:
        return PlaneSettings("127.0.0.1", 1, servers, workers, scheduler=f"ipc://{self.directory}/{name}")

    def schedule(self, role: str, plane: PlaneSettings, name: str, **fields: Any) -> None:
        settings = self._settings(name, role=role, bind=(plane.scheduler,), **fields)
        self._run(lambda: Scheduler(settings, plane, EventLog(None)).run())

    def serve(self, name: str, **fields: Any) -> None:
        settings = self._settings(name, **fields)

        def run() -> None:
            algorithm, delivery = part(settings, "algo", "server")(settings), part(settings, "delivery", "server")()
            Server(settings, EventLog(None), algorithm, delivery).run()

        self._run(run)

    def work(self, name: str, script: Callable[[Client], None], **fields: Any) -> None:
        settings = self._settings(name, role="worker", **fields)

        def run() -> None:
            client = Client(settings, EventLog(None), part(settings, "delivery", "worker")())
            script(client)
            client.leave()
            client.close()

        self._run(run)

    def join(self) -> None:
        until = time.monotonic() + LIMIT
        for thread in self.threads:
            thread.join(max(0.0, until - time.monotonic()))
        assert self.errors == []
        assert not any(thread.is_alive() for thread in self.threads)

    def _settings(self, name: str, **fields: Any) -> Settings:
        bind = {"bind": (f"ipc://{self.directory}/{name.replace('/', '-')}",), **fields}
        return Settings(process=name, party=name[0], **bind, **self.common)

    def _run(self, run: Callable[[], object]) -> None:
        def body() -> None:
            try:
                run()
            except BaseException as error:
                self.errors.append(error)

        self.threads.append(threading.Thread(target=body, daemon=True))
        self.threads[-1].start()


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path, as addresses of unix sockets are."""
    path = tempfile.mkdtemp(prefix="geomx-")
    yield Path(path)
    shutil.rmtree(path, ignore_errors=True)


def launch(processes: Processes, script: Callable[[Client], None], *, flat: bool, servers: int, master: bool) -> None:
    """Two parties of two workers, or one alone; `master`: and one that does not train, in a party with the roots."""
    parties, central = ["A"] if flat else ["A", "B"], processes.plane("Z", servers, 1) if master else None
    upper = None if flat else processes.plane("G", servers, servers * len(parties))
    if upper is not None:
        processes.schedule("global_scheduler", upper, "Z/global_scheduler:0", upper=upper)
        for rank in range(servers):
            fields = {"upper": upper, "local": central, "rank": rank, "num_all_workers": 4}
            processes.serve(f"Z/global_server:{rank}", role="global_server", **fields)
    if central is not None:
        processes.schedule("scheduler", central, "Z/scheduler:0", local=central)
        processes.work("Z/worker:0", script, local=central, rank=0, master=True)
    for index, party in enumerate(parties):
        local = processes.plane(party, servers, 2)
        processes.schedule("scheduler", local, f"{party}/scheduler:0", local=local)
        for rank in range(servers):
            fields = {"local": local, "upper": upper, "rank": rank, "party_index": index}
            processes.serve(f"{party}/server:{rank}", role="server", num_all_workers=2 * len(parties), **fields)
        for rank in range(2):
            processes.work(f"{party}/worker:{rank}", script, local=local, rank=rank, party_index=index)


@pytest.mark.parametrize(
    ("flat", "servers", "master", "delivery"),
    [
        (True, 1, False, "direct"), (False, 1, False, "direct"), (False, 2, True, "direct"),
        (False, 1, False, "tsengine"), (False, 2, False, "tsengine"),
    ],
)  # fmt: skip
def test_a_job(directory: Path, flat: bool, servers: int, master: bool, delivery: str) -> None:
    found, arrived = list[float](), list[int]()

    def script(client: Client) -> None:
        client.declare([Tensor("a", SIZE, "float32"), Tensor("b", 10, "float32")])
        if client.is_master:
            client.control.set_optimizer("sgd", {"learning_rate": 0.5})
        client.init({"a": np.ones(SIZE, np.float32), "b": np.zeros(10, np.float32)})
        client.control.barrier("all")
        for number in range(3):
            arrived.append(number)
            client.control.barrier("all")
            assert arrived.count(number) >= (2 if flat else 4)  # a master that does not train is not waited for
        if not client.trains:
            return
        for _ in range(2):
            client.control.barrier()
        client.control.be_patient(500.0)
        client.control.set_compression("none")
        if client.global_rank == 0:
            client.control.request("store", {"op": "set", "keys": ["k"], "values": [b"v"]})
        answer = client.control.ask("store", {"op": "get", "keys": ["k"], "seconds": 100.0}, 100.0)
        assert answer.result(LIMIT)["values"] == [b"v"]
        out = np.zeros(SIZE, np.float32)
        client.pull("a", out).result(LIMIT)
        assert (out == 1).all()
        for _ in range(3):
            client.exchange("a", np.full(SIZE, 1.0 + client.global_rank, np.float32), out).done.result(LIMIT)
        found.append(float(out[-1]))

    processes = Processes(directory, delivery=delivery, rank_scope="party" if master or flat else "global")
    launch(processes, script, flat=flat, servers=servers, master=master)
    processes.join()
    assert found == [1 - 3 * 0.5 * 3] * 2 if flat else [1 - 3 * 0.5 * 10] * 4


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.thorough), {"delivery": "tsengine", "tsengine": "both"},
        pytest.param({"delivery": "dgt", "dgt": 2}, marks=pytest.mark.thorough),
    ],
    ids=["direct", "tsengine", "dgt"],
)  # fmt: skip
def test_cut_connections_change_no_result(
    directory: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """One lane of a random link is cut every 30 ms, while payloads are in shared memory too."""
    rounds, size, links = 40, 300_000, list[tuple[Transport, Link]]()
    dial, draw, cuts, found = Transport.dial, random.Random(1), list[Lane](), dict[str, list[float]]()

    def dial_and_note(self: Transport, *args: Any, **hello: Any) -> Link:
        links.append((self, dial(self, *args, **hello)))
        return links[-1][1]

    def cut(link: Link, lane: Lane) -> None:
        connection = link.lanes.connections.get(lane)
        if connection is not None and link.lanes.all_up:
            connection.shut_down()
            cuts.append(lane)

    def cut_often(ended: threading.Event) -> None:
        while not ended.wait(0.03):
            transport, link = draw.choice([pair for pair in links if "scheduler" not in pair[1].name])
            transport.loop.submit(partial(cut, link, draw.choice(LANES)))

    trained, ended = threading.Barrier(4), threading.Event()

    def script(client: Client) -> None:
        client.declare([Tensor("a", size, "float32")])
        client.init({"a": np.zeros(size, np.float32)})
        client.control.barrier("all")
        if client.global_rank == 0:
            threading.Thread(target=cut_often, args=(ended,), daemon=True).start()
        out, sums = np.zeros(size, np.float32), found.setdefault(client.process, [])
        for number in range(1, rounds + 1):
            array = np.full(size, number * (client.global_rank + 1), np.float32)
            client.exchange("a", array, out).done.result(LIMIT)
            assert (out == out[0]).all()
            sums.append(float(out[0]))
        trained.wait(LIMIT)
        ended.set()

    monkeypatch.setattr(Transport, "dial", dial_and_note)
    processes = Processes(directory, rank_scope="global", **options)
    launch(processes, script, flat=False, servers=1, master=False)
    processes.join()
    assert cuts
    assert list(found.values()) == [[10.0 * number for number in range(1, rounds + 1)]] * 4
