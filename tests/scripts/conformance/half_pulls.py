"""A key of fp16 that is pushed from and pulled into arrays of fp32."""

import mxnet as mx
import numpy as np

kv = mx.kv.create("dist_sync")
kv.init(0, mx.nd.zeros((4, 3), dtype="float16"))
out = mx.nd.zeros((4, 3))
kv.push(0, mx.nd.full((4, 3), 1.5 + kv.rank, dtype="float16"))
kv.pull(0, out=out)
np.savez(f"weights-{kv.rank}.npz", weight=out.asnumpy())
