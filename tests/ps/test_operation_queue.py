"""When a worker's operations on a tensor are sent."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.cluster.partition import Placement, Slice, Tensor
from geomx_cli.ps.net.wire import Header, Kind
from geomx_cli.ps.operation_queue import Operation, OperationQueue

ONES = np.ones(4, np.float32)


class Queue:
    """A queue whose messages are kept: the kind, key, round and slice of each, with what its result calls."""

    def __init__(self) -> None:
        self.sent: list[tuple[Kind, int, int, int]] = []
        self.results: list[Any] = []
        delivery: Any = SimpleNamespace(up=lambda server, header, payload, then: self.keep(header, then))
        node: Any = SimpleNamespace(encoded={}, telemetry=SimpleNamespace(round=0))
        upstream: Any = UpstreamClient()
        upstream.links, upstream.send = [None], lambda link, header, payload, then: self.keep(header, then)
        self.queue = OperationQueue(node, upstream, delivery)

    def keep(self, header: Header, then: Any) -> None:
        self.sent.append((header.kind, header.key, header.round, header.slice))
        self.results.append(lambda: then(Header(kind=Kind.RESULT, round=header.round), ONES[: header.length]))

    def start(self, kind: Kind, key: int, number: int, **given: Any) -> Operation:
        placement = Placement(key, Tensor(str(key), 4, "float32"), (Slice(0, 2, 0, 0), Slice(2, 4, 0, 0)))
        operation = Operation(kind, placement, None if kind == Kind.PULL else ONES, round=number, weight=1.0, **given)
        self.queue.start(operation)
        return operation


def test_one_round_of_a_key_is_in_flight_and_the_next_waits_for_all_its_slices() -> None:
    """Also in jobs of parties that do not wait for each other: who pushes again and again waits here."""
    queue = Queue()
    operations = [queue.start(Kind.EXCHANGE, 1, number) for number in (1, 2, 3)]
    queue.start(Kind.EXCHANGE, 2, 1)
    first = [(Kind.EXCHANGE, key, 1, index) for key in (1, 2) for index in (0, 1)]
    assert queue.sent == first, "keys do not wait for each other"
    queue.results[1]()
    assert queue.sent == first
    queue.results[0]()
    assert queue.sent[4:] == [(Kind.EXCHANGE, 1, 2, index) for index in (0, 1)]
    assert [operation.pending.done.done() for operation in operations] == [True, False, False]
    for index in (4, 5, 6, 7):
        queue.results[index]()
    assert all(operation.pending.done.done() for operation in operations)
    queue.start(Kind.EXCHANGE, 1, 4)
    assert queue.sent[-1] == (Kind.EXCHANGE, 1, 4, 1), "nothing is before it"


def test_a_pull_in_turn_is_sent_between_the_rounds_and_any_other_at_once() -> None:
    queue = Queue()
    queue.start(Kind.EXCHANGE, 1, 1)
    queue.start(Kind.PULL, 1, 1, in_turn=True)
    queue.start(Kind.EXCHANGE, 1, 2)
    queue.start(Kind.PULL, 1, 1)
    kinds = [Kind.EXCHANGE, Kind.EXCHANGE, Kind.PULL, Kind.PULL]
    assert [kind for kind, _, _, _ in queue.sent] == kinds, "the last one does not wait"
    for index in (0, 1):
        queue.results[index]()
    assert [kind for kind, _, _, _ in queue.sent[4:]] == [Kind.PULL] * 2
    for index in (4, 5):
        queue.results[index]()
    assert queue.sent[6:] == [(Kind.EXCHANGE, 1, 2, 0), (Kind.EXCHANGE, 1, 2, 1)]
