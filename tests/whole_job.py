"""A whole job in this process: schedulers, servers and workers in threads, over sockets, without a launcher."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from cluster import free_ports

from geomx_cli.contract.config import NodeSettings, PlaneSettings
from geomx_cli.core import plugins
from geomx_cli.core.event_log import EventLog
from geomx_cli.core.options import defaults
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.client import Client
from geomx_cli.ps.cluster.partition import Tensor
from geomx_cli.ps.cluster.scheduler import Scheduler
from geomx_cli.ps.server import Server

SIZES = {"w": 300_000, "b": 7}
LIMIT = 60.0
Results = dict[tuple[int, str], Array]
"""By round and key."""


class WholeJob:
    """`parties` of two workers below `roots`, or with `flat` one party whose server is the root. With an optimizer the
    roots run SGD with momentum, else results are sums. Each worker begins `ahead` rounds before it waits for the first.
    """

    def __init__(
        self, *, flat: bool = False, parties: int = 2, roots: int = 1, optimizer: bool = True, ahead: int = 0,
        **options: Any,
    ) -> None:  # fmt: skip
        self._options = {**defaults(plugins.table()), "rank_scope": "global", "patience": LIMIT, **options}
        self._optimizer, self._ahead = optimizer, ahead
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []
        self.results: dict[int, Results] = {}
        parties = 1 if flat else parties
        upper = None if flat else PlaneSettings("127.0.0.1", *free_ports(1), roots, parties)
        if upper is not None:
            self._start(self._schedule, self._settings("global_scheduler", "gsched", upper=upper))
            for rank in range(roots):
                self._start(self._serve, self._settings("global_server", f"root{rank}", upper=upper, rank=rank))
        for index, party in enumerate("ABCD"[:parties]):
            local = PlaneSettings("127.0.0.1", *free_ports(1), 1, 2)
            about: dict[str, Any] = {"local": local, "party": party}
            self._start(self._schedule, self._settings("scheduler", f"{party}/scheduler:0", **about))
            about |= {"party_index": index, "num_all_workers": 2 * parties}
            self._start(self._serve, self._settings("server", f"{party}/server:0", upper=upper, rank=0, **about))
            for rank in (0, 1):
                about["global_rank"] = 2 * index + rank
                self._start(self._work, self._settings("worker", f"{party}/worker:{rank}", rank=rank, **about))

    def run(self) -> dict[int, Results]:
        """The results of each worker, by its global rank. Raises the first error."""
        for thread in self._threads:
            thread.join(LIMIT)
        if self._errors:
            raise self._errors[0]
        assert not any(thread.is_alive() for thread in self._threads)
        return self.results

    def _settings(self, role: Any, process: str, **about: Any) -> NodeSettings:
        return NodeSettings(
            role=role, process=process, job="whole", insecure=True, node_host="127.0.0.1", host="h",
            options=self._options, **about,
        )  # fmt: skip

    def _start(self, body: Callable[[NodeSettings], None], settings: NodeSettings) -> None:
        def guarded() -> None:
            try:
                body(settings)
            except BaseException as error:
                self._errors.append(error)

        thread = threading.Thread(target=guarded, name=settings.process, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _schedule(self, settings: NodeSettings) -> None:
        plane = settings.local or settings.upper
        assert plane is not None
        Scheduler(settings, plane, EventLog(None)).run()

    def _serve(self, settings: NodeSettings) -> None:
        algorithm: Any = plugins.find("algorithm", str(self._options["algo"]))
        delivery: Any = plugins.find("delivery", str(self._options["delivery"]))
        Server(settings, EventLog(None), algorithm.server(settings), delivery.server()).run()

    def _work(self, settings: NodeSettings) -> None:
        delivery: Any = plugins.find("delivery", str(self._options["delivery"]))
        client = Client(settings, EventLog(None), delivery.worker())
        if self._optimizer and client.global_rank == 0:
            client.control.set_optimizer("sgd", {"learning_rate": 0.1, "momentum": 0.9})
        client.declare([Tensor(name, size, "float32") for name, size in SIZES.items()])
        client.init({name: np.zeros(size, np.float32) for name, size in SIZES.items()})
        for name, size in SIZES.items():
            client.pull(name, np.empty(size, np.float32)).result(LIMIT)
        results: Results = {}
        open_: list[Any] = []
        for number in range(1, 7):
            random = np.random.default_rng([client.global_rank, number])
            for name, size in SIZES.items():
                out = results[number, name] = np.empty(size, np.float32)
                open_.append(client.exchange(name, random.standard_normal(size).astype(np.float32), out))
            while len(open_) > self._ahead * len(SIZES):
                open_.pop(0).done.result(LIMIT)
        for exchange in open_:
            exchange.done.result(LIMIT)
        self.results[client.global_rank] = results
        client.leave()
        client.close()
