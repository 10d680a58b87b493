"""ASGD, the flat asynchronous baseline: the servers apply every worker's gradient on arrival, without waiting.

MixedSync in one plane without local servers, where each worker is a party by itself.
"""

from geomx_cli.runtime.algorithms.mixed import depart, refuses, server, server_optimizer, variant, variants, worker

__all__ = [
    "asynchronous", "depart", "exchanges", "forced_options", "look", "name", "options", "refuses", "server",
    "server_optimizer", "title", "variant", "variants", "worker",
]  # fmt: skip

name = "async"
title = "Async"
look = ("#0072B2", "^", "\\\\")
options = ()
shared_options = ("max_staleness",)
forced_options = {"topology": "flat"}
exchanges = "gradients"
asynchronous = True
