"""ASGD, the flat asynchronous baseline: the servers apply every worker's gradient as it comes, and nobody waits.

MixedSync in one plane without local servers, where each worker is a party of its own.
"""

from geomx_cli.runtime.algorithms.mixed import refuses, server, server_optimizer, variant, variants, worker

__all__ = [
    "forced_options", "look", "name", "options", "refuses", "server", "server_optimizer", "title", "variant",
    "variants", "worker",
]  # fmt: skip

name = "async"
title = "Async"
look = ("#0072B2", "^", "\\\\")
options = ()
shared_options = ("max_staleness",)
forced_options = {"topology": "flat"}
