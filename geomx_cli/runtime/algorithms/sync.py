"""SSGD, the flat baseline: every worker exchanges its gradient with the servers at every step, synchronously.

FSA in one plane without local servers, as in plain parameter servers.
"""

from geomx_cli.runtime.algorithms.fsa import refuses, server, server_optimizer, worker

__all__ = [
    "exchanges", "forced_options", "look", "name", "options", "refuses", "server", "server_optimizer", "shards",
    "title", "worker",
]  # fmt: skip

name = "sync"
title = "Sync"
look = ("#E69F00", "s", "//")
options = ()
forced_options = {"topology": "flat"}
exchanges = "gradients"
shards = True
