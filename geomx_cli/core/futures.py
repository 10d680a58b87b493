"""Futures that complete after other futures."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["after", "finished", "first", "pass_on"]

_Result = TypeVar("_Result")


def after(futures: Sequence["Future[Any]"], action: Callable[[], _Result]) -> "Future[_Result]":
    """A future that is done when all of `futures` (at least one) are done and `action` has run. `action` runs in the
    thread that completes the last future. The new future gets the result of `action`. If one of `futures` fails, it
    gets that exception at once.
    """
    done: Future[_Result] = Future()
    lock = threading.Lock()
    missing = len(futures)

    def count(future: "Future[Any]") -> None:
        nonlocal missing
        with lock:
            if not missing:
                return
            failed = future.cancelled() or future.exception() is not None
            missing = 0 if failed else missing - 1
            if missing:
                return
        try:
            future.result()
            done.set_result(action())
        except Exception as error:
            done.set_exception(error)

    for future in list(futures):
        future.add_done_callback(count)
    return done


def finished(result: _Result) -> "Future[_Result]":
    """A future that has this result."""
    done: Future[_Result] = Future()
    done.set_result(result)
    return done


def first(futures: Sequence["Future[Any]"]) -> "Future[None]":
    """A future that is done when any of `futures` is done or has failed."""
    done: Future[None] = Future()
    lock = threading.Lock()

    def complete(_: "Future[Any]") -> None:
        with lock:
            if not done.done():
                done.set_result(None)

    for future in futures:
        future.add_done_callback(complete)
    return done


def pass_on(source: "Future[_Result]", target: "Future[_Result]") -> None:
    """Complete `target` with the result or exception of `source`."""

    def complete(_: "Future[_Result]") -> None:
        try:
            target.set_result(source.result())
        except Exception as error:
            target.set_exception(error)

    source.add_done_callback(complete)
