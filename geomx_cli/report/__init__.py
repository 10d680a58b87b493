"""What can be learnt from the records of jobs: summaries of trials.

    record.py   one worker's records of its rounds, as files iter-N.txt
    trial.py    the workers of one network under one mode, in folders HOST/DEVICE
    summary.py  what a trial came to: ESync's JSON, and summary.json with what that lacks
"""

from geomx_cli.report.summary import Summary
from geomx_cli.report.trial import MODES, Trial

__all__ = ["MODES", "Summary", "Trial"]
