"""Connections that are cut in the middle of training: they come back, what was lost is sent again, nothing changes."""

import contextlib
import select
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
from conftest import ROOT, Cluster, free_ports
from test_exact import assert_equal, expected

SCRIPT = [sys.executable, str(ROOT / "tests/scripts/rounds.py")]


class Proxy(threading.Thread):
    """Forwards TCP between a port of its own and `target`; `cut` breaks every connection at once."""

    def __init__(self, port: int, target: int) -> None:
        super().__init__(daemon=True)
        self._listener = socket.create_server(("127.0.0.1", port))
        self._target = target
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._cutting = threading.Event()
        self.forwarded = 0
        self.cuts = 0
        self.start()

    def cut(self) -> None:
        """Break all connections."""
        self._cutting.set()

    def run(self) -> None:
        """Until the process ends."""
        while True:
            readable, _, _ = select.select([self._listener, *self._pairs], [], [], 0.02)
            if self._cutting.is_set():
                self._drop(*list(self._pairs))
                self._cutting.clear()
                self.cuts += 1
                continue
            for item in readable:
                if item is self._listener:
                    self._accept()
                elif item in self._pairs:
                    self._forward(item)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            near.close()
            return
        self._pairs |= {near: far, far: near}

    def _forward(self, source: socket.socket) -> None:
        try:
            data = source.recv(65536)
            self._pairs[source].sendall(data)
        except OSError:
            data = b""
        self.forwarded += len(data)
        if not data:
            self._drop(source)

    def _drop(self, *sockets: socket.socket) -> None:
        for item in sockets:
            other = self._pairs.pop(item, None)
            if other is not None:
                self._pairs.pop(other, None)
                for end in (item, other):
                    with contextlib.suppress(OSError):
                        end.close()


def test_a_cut_link_to_the_root_comes_back_and_nothing_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    port, front = free_ports(2)
    proxy = Proxy(front, port)
    cluster.environment = {
        "OUT": str(tmp_path / "w{rank}.npz"),
        "SERVER_OPTIMIZER": "1",
        "MXNET_KVSTORE_BIGARRAY_BOUND": "5000",
        "ROUNDS": "40",
    }
    listens = {"GEOMX_BIND": f"tcp://127.0.0.1:{port}", "GEOMX_ADVERTISE": f"tcp://127.0.0.1:{front}"}
    cluster.launch(SCRIPT, root_env=listens)
    for mebibytes in (1, 3, 6):
        end = time.monotonic() + 30
        while proxy.forwarded < mebibytes * 2**20 and time.monotonic() < end:
            time.sleep(0.001)
        proxy.cut()
    cluster.finish(50)
    assert proxy.cuts == 3
    found = {int(path.stem[1:]): list(np.load(path).values()) for path in tmp_path.glob("w*.npz")}
    assert len(found) == 4
    assert_equal(found, expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 40), optimizer=True))
