"""SSGD, the flat baseline: every worker exchanges its gradient with the servers at every step, and all go on together.

FSA in one plane without local servers, as plain parameter servers do it.
"""

from geomx_cli.runtime.algorithms.fsa import refuses, server, server_optimizer, worker

__all__ = ["forced_options", "look", "name", "options", "refuses", "server", "server_optimizer", "title", "worker"]

name = "sync"
title = "Sync"
look = ("#E69F00", "s", "//")
options = ()
forced_options = {"topology": "flat"}
