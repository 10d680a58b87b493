"""Checks of hosts and network: `examine` before a launch, and in full for `geomx doctor`.

probe_pool.py runs a probe on each host. hosts.py checks the facts that it collects, and links.py dials the links that
connect.py derives from the plan. diagnose.py explains failed dials, and report.py combines everything.
"""

from geomx_cli.preflight.diagnose import Check, exit_code, refuse
from geomx_cli.preflight.links import Measured
from geomx_cli.preflight.report import Report, examine, examine_inventory

__all__ = ["Check", "Measured", "Report", "examine", "examine_inventory", "exit_code", "refuse"]
