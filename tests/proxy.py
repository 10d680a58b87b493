"""A TCP proxy that breaks connections."""

import contextlib
import random
import select
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping


class Proxy(threading.Thread):
    """Forwards TCP from each port of `routes` to another; can break connections and lose data sent before."""

    def __init__(self, routes: Mapping[int, int]) -> None:
        super().__init__(daemon=True)
        self._listeners = {socket.create_server(("127.0.0.1", near)): far for near, far in routes.items()}
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._cutting, self._losing = threading.Event(), threading.Event()
        self._forgotten: set[socket.socket] = set()
        self._chance, self._random = 1.0, random.Random(1)
        self.forwarded = 0
        self.cuts = self.turns = 0  # broken connections, and how often that was requested
        self.start()

    def cut(self, chance: float = 1.0) -> None:
        """Break all connections at once, or each with some probability; returns when done."""
        before, self._chance = self.turns, chance
        self._cutting.set()
        while self.turns == before:
            time.sleep(0.001)

    @contextlib.contextmanager
    def losing(self) -> Iterator[None]:
        """Lose the data sent within the block, and all connections at its end."""
        self._losing.set()
        yield
        self.cut()
        self._losing.clear()

    def forget(self) -> int:
        """From now on read what comes over the present connections, so that the system acknowledges it, and drop it;
        neither end hears that the other one closes. Returns their number.
        """
        self._forgotten = set(self._pairs)
        return len(self._forgotten) // 2

    def run(self) -> None:
        """Forward until the process ends."""
        while True:
            sources = [] if self._losing.is_set() else [*self._listeners, *self._pairs]
            readable = _readable(sources, 0.01)
            if self._cutting.is_set():
                self._cutting.clear()
                doomed = [item for item in list(self._pairs) if self._random.random() < self._chance]
                self._drop(*doomed)
                self.cuts += len(doomed)
                self.turns += 1
                continue
            for item in readable if not self._losing.is_set() else ():
                if item in self._listeners:
                    self._accept(item)
                elif item in self._pairs:
                    self._forward(item)

    def _accept(self, listener: socket.socket) -> None:
        near, _ = listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self._listeners[listener]))
        except OSError:
            near.close()
            return
        self._pairs |= {near: far, far: near}

    def _forward(self, source: socket.socket) -> None:
        try:
            data = source.recv(65536)
            if source in self._forgotten:
                if not data:
                    self._pairs.pop(source)
                    source.close()
                return
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


def _readable(sources: Iterable[socket.socket], seconds: float) -> list[socket.socket]:
    """Those from which can be read; with poll, as a long run of tests has more descriptors than select takes."""
    poll, found = select.poll(), {source.fileno(): source for source in sources}
    for number in found:
        poll.register(number, select.POLLIN)
    return [found[number] for number, _ in poll.poll(seconds * 1000)]
