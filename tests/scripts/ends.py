"""A worker of a flat cluster of two: rank 0 ends as the argument says, rank 1 continues until it is notified."""

import sys

import mxnet as mx

kv = mx.kv.create("dist_sync")
weight = mx.nd.ones((64, 64))
kv.init(0, weight)
if sys.argv[1] == "pending":  # at the script's end many exchanges are pending, some of them unsent
    many = [mx.nd.ones((700, 300)) for _ in range(24)]
    kv.init(list(range(1, 25)), many)
    for _ in range(2):
        kv.push(list(range(1, 25)), many)
        kv.pull(list(range(1, 25)), out=many)
    sys.exit(0)
for step in range(3 if sys.argv[1] in ("early", "caught") else 1000):
    if kv.rank == 0 and step == 2:
        if sys.argv[1] == "raise":
            raise ValueError("no such label")
        if sys.argv[1] == "exit":
            sys.exit(3)
        if sys.argv[1] == "exit-with-text":
            sys.exit("no --data")
        if sys.argv[1] == "caught":
            try:
                sys.exit(4)
            except SystemExit:
                print("goes on")
        if sys.argv[1] == "early":
            break
    kv.push(0, weight)
    kv.pull(0, out=weight)
    if sys.argv[1] != "early":
        mx.nd.waitall()
