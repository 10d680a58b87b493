"""Checks of the hosts and the network, before a job (`quick`) and beside one (`examine`).

check.py          one finding, and what all together come to
requirements.py   what the job needs of each host
probe_pool.py     a probe on each host, and the facts that they tell
resolve.py        facts in the place of what the inventory leaves open
hosts.py          from a host's facts to checks
connect.py        who dials whom between hosts, and how that ended
links.py          ports bound on their hosts, and dialled from where the job will
diagnose.py       what a failed dial looks like
wan.py            round trip and bandwidth between parties
report.py         all of it for `geomx doctor`
"""

from geomx_cli.preflight.check import Check, exit_code, refuse
from geomx_cli.preflight.report import Report, examine, examine_inventory, quick
from geomx_cli.preflight.wan import Measured

__all__ = ["Check", "Measured", "Report", "examine", "examine_inventory", "exit_code", "quick", "refuse"]
