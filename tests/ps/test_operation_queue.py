"""When a worker's operations on a tensor are sent."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.cluster.partition import Placement, Slice, Tensor
from geomx_cli.ps.net.wire import MAX_ROUNDS_AHEAD, Header, Kind
from geomx_cli.ps.operation_queue import Operation, OperationQueue


def test_rounds_ahead_are_counted_from_the_oldest_without_a_result() -> None:
    """As servers do. After a cut, results of later rounds may come first."""
    sent: dict[int, Any] = {}
    delivery: Any = SimpleNamespace(up=lambda server, header, payload, then: sent.update({header.round: then}))
    node: Any = SimpleNamespace(encoded={}, telemetry=SimpleNamespace(round=0))
    queue, array = OperationQueue(node, UpstreamClient(), delivery), np.zeros(4, np.float32)
    placement = Placement(0, Tensor("w", len(array), "float32"), (Slice(0, len(array), 0, 0),))
    for number in range(1, MAX_ROUNDS_AHEAD + 10):
        queue.start(Operation(Kind.EXCHANGE, placement, array, round=number, weight=1.0))
    assert list(sent) == [*range(1, MAX_ROUNDS_AHEAD + 1)]
    for number in (2, 3, 5):
        sent[number](Header(kind=Kind.RESULT, round=number), array)
    assert len(sent) == MAX_ROUNDS_AHEAD
    sent[1](Header(kind=Kind.RESULT, round=1), array)
    assert list(sent) == [*range(1, MAX_ROUNDS_AHEAD + 4)]
