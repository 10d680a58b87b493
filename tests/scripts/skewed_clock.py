"""Runs `python -P -m MODULE ...` on a host whose clock is SKEW seconds ahead."""

import os
import runpy
import sys
import time
from collections.abc import Callable

real: Callable[[], float] = time.time
time.time = lambda: real() + float(os.environ["SKEW"])
assert sys.argv[1:3] == ["-P", "-m"], sys.argv
sys.argv = sys.argv[3:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
