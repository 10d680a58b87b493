"""The order of queued tensors, and slices that the receiver asks for."""

from geomx_cli.ps.net.send_queue import SendQueue
from geomx_cli.ps.net.wire import Header, Kind


def exchange(request: int, *, priority: int = 0, key: int = 0, round_: int = 1) -> Header:
    """A contribution."""
    return Header(kind=Kind.EXCHANGE, request=request, key=key, round=round_, priority=priority)


def emptied(queue: SendQueue) -> list[int]:
    """The requests, in the order in which they are sent."""
    requests = []
    while queue:
        requests.append(queue.pop()[0].request)
    return requests


def test_higher_priorities_go_first_and_equal_ones_by_request() -> None:
    queue = SendQueue()
    for request, priority in ((5, 0), (3, -1), (4, 7), (2, 0), (1, 0)):
        queue.push(exchange(request, priority=priority), memoryview(bytes(request)))
    assert queue.next_size() == 4
    assert emptied(queue) == [4, 1, 2, 5, 3]


def test_a_repeat_is_dropped_only_while_the_first_one_is_queued() -> None:
    queue = SendQueue()
    queue.push(exchange(1), memoryview(b"x"))
    queue.push(exchange(1), memoryview(b"x"))
    assert exchange(1) in queue and emptied(queue) == [1]
    queue.push(exchange(1), memoryview(b"x"))
    assert emptied(queue) == [1]


def test_a_slice_that_is_asked_for_leaves_the_queue_or_is_wanted_once() -> None:
    queue = SendQueue()
    for request in (1, 2, 3):
        queue.push(exchange(request, key=request), memoryview(b"x"))
    taken = queue.take(2, 0, 1)
    assert taken is not None and taken[0].request == 2 and exchange(2) not in queue
    assert queue.take(9, 0, 1) is None
    assert queue.is_wanted(exchange(9, key=9))
    assert not queue.is_wanted(exchange(9, key=9)) and not queue.is_wanted(exchange(9, key=9, round_=2))
    assert emptied(queue) == [1, 3]
