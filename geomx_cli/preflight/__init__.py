"""Checks of hosts and network: `examine` before a launch, and in full for `geomx doctor`.

    check.py               one finding, and the aggregation of several
    requirements.py        a job's requirements for each host
    probe_pool.py          a probe on each host, and the facts it collects
    complete_inventory.py  adds paths, addresses and ports to an inventory, from facts
    hosts.py               checks of a host's facts
    connect.py             the planned dials between hosts, and their results
    links.py               binds ports and dials them from the planned hosts
    diagnose.py            diagnosis of failed dials
    wan.py                 round trip and bandwidth between parties
    report.py              the whole examination
"""

from geomx_cli.preflight.diagnose import Check, exit_code, refuse
from geomx_cli.preflight.links import Measured
from geomx_cli.preflight.report import Report, examine, examine_inventory

__all__ = ["Check", "Measured", "Report", "examine", "examine_inventory", "exit_code", "refuse"]
