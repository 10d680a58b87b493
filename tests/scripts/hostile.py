"""A worker with a key of the job that first sends invalid messages, and then does the same as rounds.py.

Environment: TARGET (its server's endpoint), OTHER (a process to impersonate), and the variables of rounds.py.
"""

import os
import runpy
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

from geomx_cli.contract import security
from geomx_cli.contract.settings import Settings
from geomx_cli.core import event_log, plugins
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps import client
from geomx_cli.ps.net.loop import Loop
from geomx_cli.ps.net.memory import PLACE
from geomx_cli.ps.net.transport import Transport
from geomx_cli.ps.net.wire import Form, Header, Kind, Place, encode_header, job_number

settings = Settings.from_environment(plugins.table())


def pretend() -> None:
    """Say hello with a false identity, and request to leave."""
    loop, other = Loop(), os.environ["OTHER"]
    own = {"process": settings.process, "party": settings.party, "role": "worker", "host": settings.host}
    local = {"plane": "local", "rank": settings.rank}
    hellos = [
        (own | {"process": other}, local | {"rank": 1 - settings.rank}),
        (own | {"process": "A/worker:7"}, local | {"rank": 7}),
        (own, local | {"rank": 7}),
        (own, local | {"rank": True}),
        (own, {"plane": "global", "rank": 0}),
        (own, local | {"workers": 2**60}),
        (own, local | {"workers": "many"}),
        (own | {"host": "x" * 10_000}, local),
    ]
    transports = []
    for who, hello in hellos:
        transport = Transport(
            loop, job=job_number(settings.job), who=who, keys=security.load(settings.key_file),
            on_message=lambda *_: None, on_link=lambda _: None, events=EventLog(None), slice_bytes=2**20,
        )  # fmt: skip
        link = transport.dial(os.environ["TARGET"], "the server", wide_area=False, **hello)
        link.control("leave", {}, 1)
        transports.append(transport)
    end = time.monotonic() + 2
    loop.call_later(2, loop.stop)
    loop.run(until=lambda: time.monotonic() > end)
    for transport in transports:
        transport.close(0)
    loop.close()


def misuse(worker: "client.Worker", rank: int) -> None:
    """Send invalid messages as a regular member; in the loop. Nothing repeats them, so both lanes have to be up."""
    node, link = worker.node, worker.upstream.links[0]
    if not link.lanes.all_up:
        node.loop.call_later(0.01, partial(misuse, worker, rank))
        return
    payload = memoryview(np.ones(10, np.float32)).cast("B")
    good = {"kind": Kind.EXCHANGE, "key": 70_000, "length": 10, "round": 1, "contributors": (rank,), "weight": 1.0}
    changes = [
        {"contributors": (0, 2)}, {"contributors": (1, 0)}, {"contributors": (1, 1)}, {"contributors": (0, 1, 3)},
        {"round": 0}, {"round": 100_000}, {"contributors": (1 - rank,)}, {"contributors": ()}, {"weight": 0.0},
        {"length": 11}, {"round": 2}, {"root": 9}, {"key": 0}, {"kind": Kind.RESULT, "request": 3},
        {"kind": Kind.PUSH, "key": 0}, {"form": Form.ROWS, "rows": 10}, {"form": Form.ROWS, "rows": 2, "row": 5},
        {"kind": Kind.PULL, "form": Form.ROWS, "rows": 10},
        {"hyper": {f"h{number}": 1.0 for number in range(17)}}, {"weight": float("nan")}, {"weight": -1.0},
    ]  # fmt: skip
    for number, change in enumerate(changes):  # while the window is full, one with a number that is queued is dropped
        link.flush()  # a header that cannot be read takes with it what is fused behind it, so none is sent with others
        link.send(Header(**({"request": 2**20 + number} | good | change)), payload)
    link.flush()
    misuse_by_control(node, link, good)


def misuse_by_control(node, link, good) -> None:
    """Send invalid control messages once refusals of tensors have come: a server reports only the first ones, of both
    lanes.
    """
    if len(link.refusals) < 4:
        node.loop.call_later(0.01, partial(misuse_by_control, node, link, good))
        return
    asked = [
        ("declare", {"tensors": 5}), ("declare", {"tensors": [["x", -5, "float32", 1]], "by": "x"}),
        ("declare", {"tensors": [["x", 10**15, "float32", 1]]}), ("declare", {"tensors": [["x", 10, "int7", 1]]}),
        ("optimizer", {"do": 7}), ("barrier", {"scope": "nowhere"}), ("state_read", {"root": 99}), ("nothing", {}),
        ("mode", {}), ("stragglers", {}), ("cluster", {"rank_scope": ["x"]}), ("optimizer", {"by": 7, "hold": 1}),
        ("optimizer", {"by": "x", "name": "sgd", "params": {"momentum": [1]}}), ("compression", {"spec": 7}),
        ("state_write", {"by": "x", "at": 0, "piece": 5}), ("gone", {"x": 1}),
    ]  # fmt: skip
    for topic, body in asked:
        node.rpc.ask(link, topic, body, lambda _: None, lambda _: None)
    link.control("join", {"role": "server"}, 10**6)
    link.control("memory", {"pid": 1, "file": 0, "token": b""})  # an arena of another host
    link.control("mapped")
    link.control("freed", {"blocks": [65_536]})
    there = Header(**good, place=Place.SHARED_MEMORY, request=9, job=node.transport.job)
    link.lanes.write("tensors", [encode_header(there), PLACE.pack(65_536, 40)])  # no arena was mapped here
    link.control("x" * 100, b"\xc1\xc1", 10**6 + 1)


declare, exchange = client.Client.declare, client.Client.exchange


def exchange_and_misuse(self, name, src, out, **rest):
    """Regular contributions with hyper-parameters of an optimizer that nobody has set, and that none has."""
    return exchange(self, name, src, out, hyper={"optimizer": 7.0, "wd": 1.0} if name == "t0" else {"own": 1.0}, **rest)


def declare_and_misuse(self, tensors):
    declare(self, tensors)
    self._worker.node.loop.submit(lambda: misuse(self._worker, self.rank))


pretend()
event_log.EventLog = partial(EventLog, talk=sys.stdout)  # prints its events
client.Client.declare, client.Client.exchange = declare_and_misuse, exchange_and_misuse
runpy.run_path(str(Path(__file__).with_name("rounds.py")), run_name="__main__")
