"""What counts as running code: processor time of the script and of what it has started, but not a wait.

Each case is a process of its own, because the runner has other children, which compute for other tests.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping

import pytest

from geomx_cli.ps.cluster import liveness
from geomx_cli.ps.cluster.liveness import Activity

pytestmark = pytest.mark.processes

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


def ran_beside(program: str, spans: int) -> bool:
    """The same of a process that waits for a child with this program."""
    child = subprocess.Popen([sys.executable, "-S", "-c", program])
    try:
        time.sleep(0.5)  # its start uses processor time
        return ran(threading.Event.wait, spans)
    finally:
        child.kill()
        child.wait()


CASES: Mapping[str, tuple[Callable[[], bool], bool]] = {
    "waits": (lambda: ran(threading.Event.wait), False),
    "looks at the clock": (lambda: ran(glance, 200), True),
    "its child waits": (lambda: ran_beside("import time; time.sleep(1000)", 5), False),
    "its child computes": (lambda: ran_beside("while True: pass", 200), True),
}


@pytest.mark.parametrize("case", CASES)
def test_what_counts_as_running(case: str) -> None:
    done = subprocess.run([sys.executable, __file__, case], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout == f"{CASES[case][1]}\n"


if __name__ == "__main__":
    liveness.SPAN = SPAN
    print(CASES[sys.argv[1]][0]())
