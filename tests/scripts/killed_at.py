"""Runs a script as `python SCRIPT ...` does, and kills its worker with SIGKILL when it reports: KILLS SCRIPT ...

KILLS: RANK:LIFE:REPORT for each, separated by commas; the reports of a life count from 1.
"""

import itertools
import os
import runpy
import signal
import sys
from typing import Any

from geomx_cli.runtime.script import reports

kills, sys.argv[:] = sys.argv[1].split(","), sys.argv[2:]
life = f"{os.environ.get('GEOMX_GLOBAL_RANK', '-1')}:{os.environ.get('GEOMX_INCARNATION', '0')}"
report, numbers = reports.report, itertools.count(1)


def report_and_die(**values: Any) -> None:
    report(**values)
    if f"{life}:{next(numbers)}" in kills:
        os.kill(os.getpid(), signal.SIGKILL)


reports.report = report_and_die
runpy.run_path(sys.argv[0], run_name="__main__")
