"""Processes that are alive are waited for, however long their scripts take to join, evaluate or compute."""

from pathlib import Path

import pytest
from cluster import ROOT
from desk import Desk

pytestmark = pytest.mark.processes
SCRIPT = f"""
import runpy, time
from geomx_cli.ps.client import Client
begin = Client.__init__

def begin_patiently(self, *given):
    begin(self, *given)
    self.control.be_patient(60)     # as init_process_group(timeout=) does

Client.__init__ = begin_patiently
time.sleep(18)
runpy.run_path("{ROOT / 'tests' / 'scripts' / 'rounds.py'}", run_name="__main__")
"""
BUSY = """
time.sleep(8)                       # no processor time: within the script's own limit
number = 10**7
began = time.monotonic()
sum(range(number))
sum(range(int(number * 8 / (time.monotonic() - began))))    # one call that holds the interpreter's lock
"""


def test_a_worker_that_starts_late_and_computes_for_long_is_waited_for(desk: Desk, tmp_path: Path) -> None:
    """Its start takes longer than --timeout, a sleep longer than --patience, and a call that lets no heartbeat out
    longer than --silence.
    """
    (tmp_path / "late.py").write_text(SCRIPT)
    job = desk.train(
        "--parties", "2", "--workers", "1", "--timeout", "15s", "--patience", "6s", "--silence", "5s",
        "--", "python", str(tmp_path / "late.py"),
        OUT=str(tmp_path / "{rank}.npz"), ROUNDS="25", SIZES="2000,10", FAULT=BUSY,
    )  # fmt: skip
    assert job.finish() == 0, job.errors
    assert "it has not ended, and is waited for" in job.errors
    assert {path.name for path in tmp_path.glob("*.npz")} >= {"0.npz", "1.npz"}
