"""Runs a script as `python SCRIPT ...` does, and kills its worker with SIGKILL when it reports: KILLS SCRIPT ...

KILLS: RANK:LIFE:REPORT for each, separated by commas; the reports of a life count from 1.
"""

import itertools
import os
import runpy
import signal
import sys
from typing import Any

from geomx_cli.runtime.script.reports import Reporter

kills, sys.argv[:] = sys.argv[1].split(","), sys.argv[2:]
life = f"{os.environ.get('GEOMX_GLOBAL_RANK', '-1')}:{os.environ.get('GEOMX_INCARNATION', '0')}"
report, numbers = Reporter.report, itertools.count(1)


def report_and_die(reporter: Reporter, *values: Any) -> None:
    report(reporter, *values)
    if f"{life}:{next(numbers)}" in kills:
        os.kill(os.getpid(), signal.SIGKILL)


Reporter.report = report_and_die  # type: ignore[method-assign]  # the function may have been imported
runpy.run_path(sys.argv[0], run_name="__main__")
