"""Reports from the records of jobs: runs, summaries, figures, comparisons.

    record.py       one worker's records of its rounds, as a file DEVICE.jsonl or as files iter-N.txt
    run_records.py  a run: its workers, in files HOST/DEVICE.jsonl or folders HOST/DEVICE
    metadata.py     metadata of a run: its job, and the traffic between parties
    process_log.py  data for reports from one process's event log
    job_records.py  a job as a run, from its event logs
    collected.py    a folder of collected jobs: their logs and their records
    run_folders.py  finds the runs in such a folder; sources.py also reads running jobs
    modes.py        what algorithms and their variants are called
    summary.py      a run's results: ESync's JSON, and summary.json with additional data
    groups.py       which runs are averaged; averages.py how
    comparison.py   groups in one table; sweep_report.py the groups of a sweep
    metric_curves.py  the loss and scripts' own metrics over time
    figures.py      the numbers in figures of groups; timeline.py the numbers of one round; tables.py writes them as CSV
    styles.py       each algorithm's style; axes.py scales and limits
    drawing.py      draws figures: plots.py to files, terminal.py as text
"""

from geomx_cli.observe.report.run_records import RunRecords
from geomx_cli.observe.report.summary import Summary

__all__ = ["RunRecords", "Summary"]
