"""Reports from the records of jobs: runs, summaries, figures, comparisons.

sources.py finds the runs that a user names, and run_records.py has one run. groups.py averages runs, for the tables of
comparison.py and the figures of figures.py, which drawing.py and plots.py draw.
"""

from geomx_cli.observe.report.run_records import RunRecords
from geomx_cli.observe.report.summary import Summary

__all__ = ["RunRecords", "Summary"]
