"""Types are used by several threads at once, also for the first time."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
import msgspec
from geomx_cli.core.typed import to_type

def use():
    begin.wait()
    to_type({"inner": inner, "more": [inner]}, outer)

sys.setswitchinterval(1e-6)
for _ in range(100):
    kind = msgspec.defstruct("Inner", [(f"x{number}", "int | None") for number in range(30)])
    outer = msgspec.defstruct("Outer", [("inner", kind), ("more", list[kind])])
    inner = {f"x{number}": number for number in range(30)}
    begin = threading.Barrier(4)
    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.processes
def test_threads_may_use_a_new_type_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")
