"""The thread in which servers encode beside the loop."""

import os
import threading
from collections import deque
from collections.abc import Callable

import pytest

from geomx_cli.ps.aggregation.encoder import Encoder

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core beside that of the process")


class LoopCalls:
    """What a loop was asked to call, called by the test; `came` counts them."""

    def __init__(self) -> None:
        self.calls: deque[Callable[[], None]] = deque()
        self.came = threading.Semaphore(0)

    def submit(self, call: Callable[[], None]) -> None:
        self.calls.append(call)
        self.came.release()

    def run_next(self) -> None:
        assert self.came.acquire(timeout=30)
        self.calls.popleft()()


def test_arrays_are_encoded_in_order_in_another_thread_and_taken_in_the_loop() -> None:
    loop = LoopCalls()
    encoder = Encoder(loop.submit, 1)
    threads: list[int] = []
    taken: list[tuple[int, int]] = []

    def encode(number: int) -> int:
        threads.append(threading.get_ident())
        return number

    for number in range(20):
        encoder.run(lambda number=number: encode(number), lambda made: taken.append((made, threading.get_ident())))
    for _ in range(20):
        loop.run_next()
    encoder.close()
    assert taken == [(number, threading.get_ident()) for number in range(20)]
    assert len(set(threads)) == 1 and threading.get_ident() not in threads


def test_what_fails_in_the_thread_fails_in_the_loop() -> None:
    loop = LoopCalls()
    encoder = Encoder(loop.submit, 1)
    taken: list[object] = []
    encoder.run(lambda: 1 // 0, taken.append)
    encoder.run(lambda: 2, taken.append)
    with pytest.raises(ZeroDivisionError):
        loop.run_next()
    loop.run_next()
    encoder.close()
    assert taken == [2]


def test_nothing_is_taken_after_close() -> None:
    loop = LoopCalls()
    encoder = Encoder(loop.submit, 1)
    begun, go = threading.Event(), threading.Event()
    made: list[int] = []
    taken: list[object] = []

    def encode() -> int:
        begun.set()
        assert go.wait(30)
        made.append(1)
        return 1

    encoder.run(encode, taken.append)
    encoder.run(lambda: made.append(2), taken.append)
    assert begun.wait(30)
    threading.Timer(0.1, go.set).start()
    encoder.close()
    while loop.calls:
        loop.run_next()
    assert made == [1] and not taken


@pytest.mark.parametrize("threads", [0, len(os.sched_getaffinity(0))])
def test_without_a_free_core_the_caller_encodes_at_once(threads: int) -> None:
    encoder = Encoder(lambda call: pytest.fail("nothing to submit"), threads)
    taken: list[int] = []
    encoder.run(threading.get_ident, taken.append)
    assert taken == [threading.get_ident()] and not encoder.beside
    encoder.close()
