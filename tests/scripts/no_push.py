"""A script whose worker of the given global rank ("all" for each) does not push; "reads" evaluates in place of it.

"keyless" trains without a key, as with a Trainer that was not given the store; "silent" does not even report that.
"""

import sys

import mxnet as mx

import geomx_cli.mxnet as geomx

idle, what = sys.argv[1:]
kv = mx.kv.create("dist_sync")
kv.option("algo")  # no warning that it may not be written for hfa
if what in ("keyless", "silent") and idle in ("all", str(kv.global_rank)):
    for _ in range(3 * (what == "keyless")):
        geomx.report(samples=8, loss=1.0)
    sys.exit()
weights = mx.nd.zeros(10)
kv.init("w", weights)
if not kv.trains:
    sys.exit()
kv.pull("w", out=weights)
if idle in ("all", str(kv.global_rank)):
    if what == "reads":
        geomx.report(accuracy=0.5)
    elif what == "trains":
        geomx.report(samples=8, loss=1.0)
else:
    kv.push("w", weights)
    kv.pull("w", out=weights)
weights.wait_to_read()
