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


def test_a_slice_that_is_asked_for_goes_first_now_or_when_it_is_queued() -> None:
    queue = SendQueue()
    for request in (1, 2, 3):
        queue.push(exchange(request, key=request), memoryview(bytes(request)))
    assert not queue.asked and queue.ask(2, 0, 1) and queue.ask(2, 0, 1)
    assert queue.asked and queue.next_size() == 2 and exchange(2) in queue
    queue.push(exchange(2, key=2), memoryview(b"a repeat"))
    assert not queue.ask(9, 0, 1)
    queue.push(exchange(8, key=9, round_=2), memoryview(b"x"))
    queue.push(exchange(9, key=9), memoryview(b"x"))
    assert emptied(queue) == [2, 9, 1, 3, 8] and not queue.asked
    queue.push(exchange(10, key=9), memoryview(b"x"))
    assert not queue.asked, "a request holds for one message"


def test_all_parts_of_a_contribution_go_first_that_is_asked_for() -> None:
    queue = SendQueue()
    first, second = exchange(1, key=1), exchange(1, key=1)
    first.kind = second.kind = Kind.PART
    second.priority -= 1
    urgent = exchange(2, key=2, priority=5)
    for part in (second, urgent, first, second):
        queue.push(part, memoryview(b"x"))
    assert queue.ask(1, 0, 1)
    assert [queue.pop()[0].priority for _ in range(3)] == [first.priority, second.priority, urgent.priority]
    assert not queue and not queue.ask(1, 0, 1)
    for part in (urgent, first, second):
        queue.push(part, memoryview(b"x"))
    assert [queue.pop()[0].priority for _ in range(3)] == [first.priority, second.priority, urgent.priority]


def test_a_contribution_is_removed_with_all_its_parts() -> None:
    """Also those that the receiver has asked for; what has the same number there stays."""
    queue = SendQueue()
    parts = [exchange(1, key=1, priority=priority) for priority in (0, -1)]
    for part in parts:
        part.kind = Kind.PART
    result = Header(kind=Kind.RESULT, request=1, key=2, round=1)
    for header in (*parts, result, exchange(2)):
        queue.push(header, memoryview(b"x"))
    queue.remove(exchange(1, key=1))
    assert not any(part in queue for part in parts) and emptied(queue) == [1, 2]
    for header in (parts[0], exchange(2)):
        queue.push(header, memoryview(b"x"))
    assert queue.ask(1, 0, 1)
    queue.remove(exchange(1, key=1))
    assert not queue.asked and emptied(queue) == [2]
    queue.remove(exchange(1, key=1))
    assert not queue
