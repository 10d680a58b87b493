"""Measures the codecs: encoding and decoding the 62 tensors of ResNet-18 in slices, on one core.

    python benchmarks/codec_speed.py                  every codec in numpy
    python benchmarks/codec_speed.py --fast           kernels compiled by numba, and the time to load them
    python benchmarks/codec_speed.py int8 bsc:0.01 --repeat 20

Times are the best CPU time of --repeat passes over all slices, in milliseconds; "copy" is numpy's copy of the same
bytes, to compare runs on machines of different speed.
"""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from tensors import LISTS

from geomx_cli.ps.aggregation.codec import Codec, parse_codec
from geomx_cli.ps.cluster.partition import Partition, Tensor
from geomx_cli.ps.net.memory import keep_freed_memory

SPECS = ["fp16", "bf16", "int8", "q4", "topk:0.01", "bsc:0.01", "sparseloco", "2bit:0.5", "1bit:0"]


def slices(name: str, servers: int) -> "list[npt.NDArray[np.float32]]":
    """Normal gradients, a scale for each tensor, cut as over these servers."""
    partition, random = Partition(0, servers), np.random.default_rng(0)
    cut = []
    for number, size in enumerate(LISTS[name]):
        scale = np.float32(np.exp(random.normal(-5, 2)))
        array = random.standard_normal(size, np.float32) * scale
        placed = partition.declare(Tensor(str(number), size, "float32")).slices
        cut += [array[item.offset : item.end].copy() for item in placed]
    return cut


def best(work: Callable[[], object], repeat: int) -> float:
    """The least CPU time of one call, in milliseconds."""
    times = []
    for _ in range(repeat):
        begun = time.thread_time()
        work()
        times.append(time.thread_time() - begun)
    return 1e3 * min(times)


def measure(codec: Codec, arrays: "list[npt.NDArray[np.float32]]", repeat: int) -> tuple[float, float, int]:
    """Milliseconds to encode and to decode, and bytes."""
    payloads = [codec.encode(array) for array in arrays]
    encoding = best(lambda: [codec.encode(array) for array in arrays], repeat)
    both = list(zip(payloads, map(len, arrays), strict=True))
    decoding = best(lambda: [codec.decode(payload, length) for payload, length in both], repeat)
    return encoding, decoding, sum(map(len, payloads))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", metavar="SPEC", default=SPECS, help="codecs, as for --compress")
    parser.add_argument("--tensors", choices=list(LISTS), default="resnet18")
    parser.add_argument("--servers", type=int, default=1, help="servers to cut for (default 1)")
    parser.add_argument("--repeat", type=int, default=10, help="passes over all slices (default 10)")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--fast", action="store_true", help="compile with numba")
    chosen = parser.parse_args()
    if chosen.fast and importlib.util.find_spec("numba") is None:
        parser.error("--fast needs numba: install geomx with the extra `fast`")
    keep_freed_memory()
    arrays = slices(chosen.tensors, chosen.servers)
    before = sum(array.nbytes for array in arrays)
    copying = best(lambda: [array.copy() for array in arrays], chosen.repeat)
    print(f"{len(arrays)} slices, {before} bytes; copy {copying:.1f} ms", file=sys.stderr)
    if not chosen.json:
        print("| codec | encode | decode | bytes | ratio |\n|---|---|---|---|---|")
    found = []
    for spec in chosen.specs:
        codec = parse_codec(spec)
        assert codec is not None
        if chosen.fast and (prepare := getattr(codec, "prepare", None)):
            begun = time.process_time()
            prepare()
            print(f"{spec} prepared in {1e3 * (time.process_time() - begun):.0f} ms", file=sys.stderr)
        encoding, decoding, size = measure(codec, arrays, chosen.repeat)
        ratio = before / size
        found.append({"codec": spec, "encode_ms": encoding, "decode_ms": decoding, "bytes": size, "ratio": ratio})
        if not chosen.json:
            print(f"| `{spec}` | {encoding:.1f} | {decoding:.1f} | {size} | {ratio:.1f} |", flush=True)
    if chosen.json:
        print(json.dumps({"schema_version": 1, "results": found}))


if __name__ == "__main__":
    main()
