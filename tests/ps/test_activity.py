"""What counts as running code: processor time of the script and of what it has started, but not a wait."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from geomx_cli.ps.cluster import liveness
from geomx_cli.ps.cluster.liveness import Activity

SPAN = 0.2


def ran(while_: Callable[[threading.Event], object], spans: int = 4) -> bool:
    """Whether this process's code ran in any of several spans, while this thread does something until an event."""
    found, enough = list[float](), threading.Event()

    def measure() -> None:
        measured = Activity()
        while len(found) < spans and (len(found) < 3 or found[-1] == found[2]):
            time.sleep(1.5 * SPAN)
            found.append(measured.last())
        enough.set()

    thread = threading.Thread(target=measure)
    thread.start()
    while_(enough)
    thread.join()
    return found[-1] > found[2]


def glance(enough: threading.Event) -> None:
    while not enough.is_set():
        time.sleep(0.02)


def test_one_that_waits_does_not_run_and_one_that_looks_at_the_clock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "SPAN", SPAN)
    assert not ran(threading.Event.wait)
    assert ran(glance, spans=200)


@pytest.mark.processes
def test_what_it_has_started_runs_for_it_if_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "SPAN", SPAN)
    for program, runs in (("import time; time.sleep(1000)", False), ("while True: pass", True)):
        child = subprocess.Popen([sys.executable, "-S", "-c", program])
        try:
            time.sleep(0.5)  # its start uses processor time
            assert ran(threading.Event.wait, 200 if runs else 5) == runs
        finally:
            child.kill()
            child.wait()
