"""What can be learnt from the records of jobs: trials, summaries, figures.

    record.py       one worker's records of its rounds, as files iter-N.txt
    run_records.py  the workers of one network under one mode, in folders HOST/DEVICE
    metadata.py     what is known of a trial beside its records: whose it is, what went between parties
    process_log.py  what reports take from one process's event log
    job_records.py  the trial that a job was, from its event logs
    collected.py    a folder of collected jobs: their logs and their records
    summary.py      what a trial came to: ESync's JSON, and summary.json with what that lacks
    figures.py      the numbers in the figures of a network's trials
    styles.py       how each algorithm looks; plots.py draws to files, terminal.py as text
"""

from geomx_cli.observe.report.run_records import MODES, RunRecords
from geomx_cli.observe.report.summary import Summary

__all__ = ["MODES", "RunRecords", "Summary"]
