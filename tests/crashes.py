"""A job's servers in one process, any of which may be killed at any moment and starts again from its state files.

Messages of one channel arrive in order, those of different channels in any. A killed server loses what it had in memory
and what was on its way to it. Of what it had sent, some still arrives before it is back.
"""

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
from tree import Node, Slice, Tree, Who

from geomx_cli.contract.codecs import has_momentum
from geomx_cli.ps.aggregation.aggregator import Aggregator
from geomx_cli.ps.aggregation.algorithm import ServerAlgorithm
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.aggregation.slices import SliceState
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.cluster.members import Member, Members
from geomx_cli.ps.optim import optimizers
from geomx_cli.ps.server_state import ServerState

Name = tuple[str, int]
"""("root", its rank) or ("local", its party)."""


class Killed(BaseException):
    """The server that handles a message ends here."""


class Channels:
    """Messages on their way, by who gets them: the one queue of a Tree, apart."""

    def __init__(self) -> None:
        self.of: dict[tuple[Any, ...], deque[Callable[[], None]]] = {}

    def append(self, message: Any) -> None:
        own = 1 if message.func.__name__ == "again" else 2  # arguments of the message; those before are the handler's
        self.of.setdefault((message.func, *message.args[:-own]), deque()).append(message)

    def drop(self, handler: Any) -> None:
        self.of.pop((handler.func, *handler.args), None)


class CrashTree(Tree):
    """A Tree whose servers keep their state in `folder`, and are killed by chance, with each message and commit."""

    def __init__(
        self, parties: Sequence[int], part: Callable[[int, bool], ServerAlgorithm], folder: Path, random: Random,
        *, chance: float, optimizer: tuple[str, Mapping[str, float]] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        self._random, self._chance, self._folder, self._part = random, chance, folder, part
        self._parties = parties
        self._states: dict[Aggregator, ServerState] = {}
        self._lives: dict[Name, int] = {}
        self._dead: dict[Name, int] = {}  # with the messages that it stays so
        self.kills, self._plays = 0, False
        self._channels = Channels()
        super().__init__(parties, part, clients=True, **more)
        for name, node in self._nodes().items():
            self._open(name, node)
        if optimizer is not None:
            for root in self.roots:
                self._set_optimizer(root.rounds, {"name": optimizer[0], "params": dict(optimizer[1])})
                body = {"name": optimizer[0], "params": dict(optimizer[1])}
                self._states[root.rounds].log("optimizer", body, Member("w"))

    # What a test asks for.

    def play(self, rounds: int, value: Callable[[Who, int, Slice], Array], slices: Sequence[Slice]) -> None:
        """Have all workers go through so many rounds of the slices; a worker begins the next one with its result."""
        who = [(party, rank) for party, workers in enumerate(self._parties) for rank in range(workers)]
        pushed = {(worker, where): 0 for worker in who for where in slices}
        self._plays = True
        while True:
            for (worker, where), number in pushed.items():
                if number < rounds and len(self.got(worker, where)) == number:
                    pushed[worker, where] += 1
                    self.push(worker, number + 1, value(worker, number + 1, where), where)
            if not self._step():
                break
        late = {each: len(self.got(*each)) for each in pushed if len(self.got(*each)) < rounds}
        assert not late, f"stuck after {self.kills} kills: {late} of {rounds}"

    def close(self) -> None:
        for state in self._states.values():
            state.close()

    # A Tree's parts.

    @property
    def _sent(self) -> Channels:  # type: ignore[override]
        return self._channels

    @_sent.setter
    def _sent(self, _: object) -> None:
        """The Tree's own queue is not used."""

    def _run(self) -> None:
        """Messages are delivered by `play`."""

    def _commit(self, rounds: Aggregator, entry: SliceState) -> None:
        state = self._states.get(rounds)
        if state is None:  # the first value, before there are files
            return
        self._perhaps()
        state.commit(entry, asynchronous=rounds.table.asynchronous, optimizers=rounds.history.uses)
        self._perhaps()

    # Steps.

    def _perhaps(self) -> None:
        if self._plays and self._random.random() < self._chance:
            raise Killed

    def _step(self) -> bool:
        """Deliver a message, or bring a server back. Returns False if there is nothing left to do."""
        for name in [name for name, rest in self._dead.items() if rest <= 0]:
            self._restart(name)
        waiting = [handler for handler, queue in self._channels.of.items() if queue]
        if not waiting and not self._dead:
            return False
        for name in self._dead:
            self._dead[name] -= 1 if waiting else 1000
        if waiting:
            handler = self._random.choice(waiting)
            name = self._handles(handler)
            message = self._channels.of[handler].popleft()
            if name is None:
                message()
            elif name not in self._dead:
                try:
                    self._perhaps()
                    message()
                    self._perhaps()
                except Killed:
                    self._kill(name)
        return True

    def _handles(self, handler: tuple[Any, ...]) -> Name | None:
        """The server that a handler belongs to; None for a worker's."""
        parts = [*handler[1:], getattr(handler[0], "__self__", None)]
        for name, node in self._nodes().items():
            if any(part is node or (part is node.upstream is not None) for part in parts):
                return name
        return None

    def _kill(self, name: Name) -> None:
        self.kills += 1
        self._dead[name] = self._random.randrange(12)

    def _restart(self, name: Name) -> None:
        del self._dead[name]
        old = self._nodes()[name]
        kind, number = name
        self._lives[name] = life = self._lives.get(name, 0) + 1
        self._states.pop(old.rounds).close()
        # What it had sent and did not arrive until now is of a life that its peers know to be over.
        for wire in [*old.wires.values(), *(old.upstream.links if old.upstream is not None else ())]:
            for handler in (wire.up, wire.down, wire.again):
                self._channels.drop(handler)
        gradients = self._gradients and not has_momentum(self._compress_lan)
        if kind == "root":
            new = self._node(self._part(1, True), old.members, None)
            new.wires = old.wires
            self.roots[number] = new
        else:
            upstream = UpstreamClient()
            upstream._serial = itertools.count((life << 36) + 1)  # type: ignore[attr-defined]
            above = Compression(self._compress, gradients=gradients)
            new = self._node(self._part(self._parties[number], False), old.members, upstream, number, above)
            new.wires = old.wires
            self.servers[number] = new
        self._open(name, new)
        self._reconnect(name, new)

    def _open(self, name: Name, node: Node) -> None:
        own = self._folder / f"{name[0]}{name[1]}"
        own.mkdir(exist_ok=True)
        state = ServerState(own, self._fail)
        self._states[node.rounds] = state
        commands = SimpleNamespace(apply_again=lambda _, body, __: self._set_optimizer(node.rounds, body))
        state.restore(Members(), node.rounds, commands)  # type: ignore[arg-type]

    def _reconnect(self, name: Name, node: Node) -> None:
        kind, number = name
        if kind == "local":
            assert node.upstream is not None
            for root in self.roots:
                self._connect(root.wires[number], root, number, node.upstream)
                root.rounds.forget_requests(root.wires[number])  # type: ignore[arg-type]
            for rank, wire in node.wires.items():
                client = self._clients[number, rank].upstream
                wire.up = partial(self._at_server, node, wire, (number, rank))
                self._repeat(client, wire)
        else:
            for party, server in enumerate(self.servers):
                wire = node.wires[party]
                wire.up = partial(self._at_root, node, party)
                assert server.upstream is not None
                if ("local", party) not in self._dead:
                    self._repeat(server.upstream, wire)

    @staticmethod
    def _repeat(client: UpstreamClient, wire: Any) -> None:
        client.repeat(wire, "control")
        client.repeat(wire, "tensors")

    def _nodes(self) -> dict[Name, Node]:
        roots = {("root", index): node for index, node in enumerate(self.roots)}
        return roots | {("local", party): node for party, node in enumerate(self.servers)}

    @staticmethod
    def _set_optimizer(rounds: Aggregator, body: Mapping[str, Any]) -> None:
        rounds.use(optimizers.create(body["name"], body["params"]))

    @staticmethod
    def _fail(warning: str) -> None:
        raise AssertionError(warning)


def contribution(who: Who, number: int, where: Slice, size: int, dtype: str = "float32") -> Array:
    """What a worker contributes to a round: the same in every run."""
    seed = [who[0] + 1, who[1], number, *where]
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)
