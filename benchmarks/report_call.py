"""Measures what a call of geomx_cli.mxnet.report costs a script, with an event log in a temporary folder.

    python benchmarks/report_call.py            numbers
    python benchmarks/report_call.py --mxnet    also an MXNet array of one element
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from geomx_cli.core.event_log import EventLog
from geomx_cli.runtime.script.reports import Reporter

CALLS, PAUSE = 2000, 0.001


def measure(name: str, reporter: Reporter, loss: Any, metrics: dict[str, Any]) -> None:
    """Print the median time of a call, and that of the slowest of a hundred, at some hundred calls a second."""
    seconds = []
    for step in range(CALLS):
        begin = time.perf_counter()
        reporter.report(step, 64, loss, None, metrics)
        seconds.append(time.perf_counter() - begin)
        time.sleep(PAUSE)
    slow = statistics.quantiles(seconds, n=100)[-1]
    print(f"{name:<28} median {1e6 * statistics.median(seconds):6.1f} us, 99 % below {1e6 * slow:6.1f} us")


def main() -> None:
    """Measure each kind of value."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mxnet", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        reporter = Reporter()
        measure("not begun", reporter, 0.5, {})
        reporter.begin(EventLog(Path(folder, "events.jsonl")))
        measure("float", reporter, 0.5, {})
        measure("float and 4 metrics", reporter, 0.5, {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0})
        measure("numpy", reporter, np.float32(0.5), {})
        if given.mxnet:
            from geomx_cli.runtime.frontends.mxnet.load import load_mxnet

            measure("MXNet", reporter, load_mxnet().nd.ones(1), {})
        reporter.close()


if __name__ == "__main__":
    main()
