"""Reports from the records of jobs: trials, summaries, figures.

    record.py       one worker's records of its rounds, as files iter-N.txt
    run_records.py  the workers of one network under one mode, in folders HOST/DEVICE
    metadata.py     metadata of a trial: its job, and the traffic between parties
    process_log.py  data for reports from one process's event log
    job_records.py  a job as a trial, from its event logs
    collected.py    a folder of collected jobs: their logs and their records
    summary.py      a trial's results: ESync's JSON, and summary.json with additional data
    figures.py      the numbers in the figures of a network's trials
    styles.py       each algorithm's style; plots.py draws to files, terminal.py as text
"""

from geomx_cli.observe.report.run_records import MODES, RunRecords
from geomx_cli.observe.report.summary import Summary

__all__ = ["MODES", "RunRecords", "Summary"]
