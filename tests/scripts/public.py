"""A worker that uses only geomx's public API and writes down its results. Arguments: data, results."""

import json
import os
import sys
from pathlib import Path

import mxnet as mx

import geomx_cli.mxnet as geomx

data, results = sys.argv[1:]
try:
    geomx.global_rank()
except geomx.InvalidSettings as error:
    assert "call geomx_cli.mxnet.init first" in str(error)
else:
    raise AssertionError("it has a rank before it has joined the job")
kv = geomx.init()
assert kv is geomx.init("dist_sync") is mx.kv.create("dist_sync") and isinstance(kv, geomx.KVStore)
try:
    geomx.init("local")
except geomx.InvalidSettings as error:
    assert "does not join a job" in str(error)
rank, said = geomx.global_rank(), {"workers": geomx.num_all_workers(), "master": geomx.is_master()}
said["party"] = int(os.environ["DMLC_NUM_WORKER"])
kv.init("w", mx.nd.zeros(1))
samples = geomx.load_data("fashion-mnist", "train", data)
assert isinstance(samples, geomx.Samples)
if rank < 0:
    try:
        geomx.shard(samples)
    except geomx.InvalidSettings as error:
        said["refused"] = str(error)
else:
    parts = {split: geomx.shard(samples, split, seed=7) for split in ("iid", "by-party")}
    said |= {split: [image.tobytes().hex() for image in part.images] for split, part in parts.items()}
    said["labels"] = sorted({int(label) for label in parts["by-party"].labels})
Path(results, f"{rank}.json").write_text(json.dumps(said))
