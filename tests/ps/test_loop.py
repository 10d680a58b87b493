"""The event loop: signals."""

import os
import signal
import sys

import pytest

from geomx_cli.ps.net.loop import Loop


class Signalled:
    """Its destructor gets a signal; Python ignores exceptions there."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        sys.getsizeof(self)  # the handler runs here at the latest


def test_a_signal_during_a_destructor_ends_the_loop() -> None:
    loop = Loop()
    before = signal.signal(signal.SIGUSR1, lambda *_: loop.interrupt(KeyboardInterrupt("SIGUSR1")))
    loop.call_later(0.0, lambda: Signalled() and None)
    loop.call_later(30.0, loop.stop)
    try:
        with pytest.raises(KeyboardInterrupt, match="SIGUSR1"):
            loop.run()
    finally:
        signal.signal(signal.SIGUSR1, before)
        loop.close()
