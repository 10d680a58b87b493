"""Pushes until the job is asked to stop, and saves after how many pushes that was."""

import time
from pathlib import Path

import mxnet as mx

import geomx_cli.mxnet as geomx

kv = geomx.init("dist_sync")
rank, value = geomx.global_rank(), mx.nd.ones((4,))
kv.init(0, value)
step = 0
while not geomx.should_stop():
    kv.push(0, value)
    kv.pull(0, out=value)
    value.wait_to_read()
    step += 1
    if step == 5:
        Path(f"trains-{rank}").touch()
    time.sleep(0.01 * (1 + rank))
Path(f"stopped-{rank}").write_text(str(step))
