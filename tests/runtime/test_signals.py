"""Signal handlers of processes that are started by hand."""

import signal
import threading

from reentry import reentered

from geomx_cli.runtime.signals import Signals


def test_what_calls_itself_under_a_lock_does_not_return() -> None:
    assert not reentered(threading.Event().set, 0.2)


def test_a_signal_within_the_handler_of_another() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        signals, seen = Signals(), list[KeyboardInterrupt]()
        signals.deliver_to(seen.append)
        handler = signal.getsignal(signal.SIGTERM)
        assert callable(handler)
        assert reentered(lambda: handler(signal.SIGTERM, None))
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
    assert len(seen) > 1
    assert signals.interruption is not None
    assert signals.interruption.exit_code == 143
