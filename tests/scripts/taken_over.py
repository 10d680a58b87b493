"""A worker with a valid key that attempts attacks on the job and prints their outcomes; otherwise like rounds.py.

Environment: ATTACKS (of EARLY, INITIAL, READY and LATE, with spaces between), OTHER (a process to impersonate), and the
variables of rounds.py.
"""

import os
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.client import Client
from geomx_cli.ps.net.lanes import LANES
from geomx_cli.ps.net.transport import Transport
from geomx_cli.ps.net.wire import Header, Place, encode_body, encode_header

SGD = {"name": "sgd", "params": {"learning_rate": 0.0}, "schedule": None, "multipliers": [], "serial": 0}


def replace_optimizer(client: Client) -> None:
    """In the name of the process that has set it."""
    client.control.request("optimizer", {**SGD, "by": os.environ["OTHER"]}, 0 if client.flat else None)


def read_optimizer_state(client: Client) -> None:
    """In the name of a process that may be reading it."""
    client.control.request("state_open", {"by": os.environ["OTHER"]}, 0)


def compare_as(client: Client) -> None:
    """A model that differs from all others, as that of another worker."""
    row = {"scope": "0", "step": 1, "of": 2, "layout": 0, "names": [], "marks": b"", "sketch": b"", "settings": {}}
    client.control.ask("compare", {**row, "kind": "settings", "platform": "", "by": os.environ["OTHER"]}).result()


def declare_twice(client: Client) -> None:
    """One key in one request, for an answer that is longer than the request."""
    asked = [["large", 20_000_000, "float32", 1, -1]] * 200
    client.control.request("declare", {"tensors": asked, "by": client.process})


def waste(client: Client) -> None:
    """Declare without end, what is too large and what is not, and say hello again and again."""
    node, link = client._worker.node, client._worker.upstream.links[0]

    def ask() -> None:
        for number in range(400):
            for size in (26_000_000_000, 20_000_000):
                body = {"tensors": [[f"{size} {number}", size, "float32", 1, -1]], "by": client.process}
                node.rpc.ask(link, "declare", body, lambda _: None, lambda _: None)
            hello = Header(job=node.transport.job, topic="hello", request=10_000 + number, place=Place.FRAME)
            for lane in LANES:
                link.lanes.write(lane, [encode_header(hello), encode_body({**node.transport.who, "lane": lane})])

    node.loop.submit(ask)
    client.control.request("declare", {"tensors": [["last", 26_000_000_000, "float32", 1, -1]], "by": client.process})


def toil(client: Client) -> None:
    """Small requests, each of which takes a server long, or memory."""
    node, link, by = client._worker.node, client._worker.upstream.links[0], client.process
    marks = {"marks": b"\1", "sketch": bytes(20), "settings": {}, "platform": "p", "of": 4, "step": 1}
    requests = [
        *[(topic, {"by": by}) for topic in ("state_open", "state_close") for _ in range(300)],
        *[("store", {"op": "append", "keys": ["k"] * 256, "values": [bytes(16_000)] * 256}) for _ in range(30)],
        *[("compare", {"by": by, "scope": "x", "layout": at, "names": ["n" * 100], **marks}) for at in range(300)],
        *[("patience", {"seconds": 1.0 + at}) for at in range(100)],
        *[("optimizer", {**SGD, "by": by, "serial": at}) for at in range(1, 200)],
    ]

    def ask() -> None:
        for topic, body in requests:
            node.rpc.ask(link, topic, body, lambda _: None, lambda _: None)

    node.loop.submit(ask)
    client.control.request("store", {"op": "append", "keys": ["k"] * 2, "values": [b"x"] * 2})


def stand_for_others(client: Client) -> None:
    """As an agent, for hosts and processes that are not its own; then say nothing more."""
    node = client._worker.node

    def ask() -> None:
        for number in range(20):
            scheduler = node.settings.local.to_dial()
            link = node.transport.dial(scheduler, "the scheduler", wide_area=False, plane=f"agent {number}")
            body = {"host": f"h{number}", "processes": [f"B/worker:{number}"] * 1000}
            node.rpc.ask(link, "awaited", body, lambda _: None, lambda _: None)

    node.loop.submit(ask)


def report_another(client: Client) -> None:
    """Tell the scheduler that a process has failed of which this one cannot know."""
    node, body = client._worker.node, {"process": os.environ["OTHER"], "message": "its GPU burns", "hint": "run"}
    node.loop.submit(lambda: node.rpc.ask(node.memberships[0].link, "fail", body, lambda _: None, lambda _: None))


def claim_workers(client: Client) -> None:
    """Its hello has done so."""


def switch_to_async(client: Client) -> None:
    """As the master's script may."""
    client.control.train_asynchronously()


def compress(client: Client) -> None:
    """Once there has been a round."""
    client.control.set_compression("1bit")


def push_initial(client: Client) -> None:
    """As the master may."""
    values = {name: np.full(each.placement.tensor.size, 7, np.float32) for name, each in client.tensors.items()}
    client.is_master = True
    init(client, values)
    client.is_master = False


EARLY = {attack.__name__: attack for attack in (switch_to_async,)}
"""Before this worker's first declaration."""
INITIAL = {attack.__name__: attack for attack in (push_initial,)}
"""After it, before the master's initial values are needed."""
READY = {
    attack.__name__: attack
    for attack in (
        replace_optimizer, read_optimizer_state, compare_as, declare_twice, claim_workers, report_another,
        stand_for_others, toil, waste,
    )
}
"""Before its first contribution, when all are set up."""
LATE = {attack.__name__: attack for attack in (compress,)}
"""Before it leaves, after its last round."""
attempts = os.environ["ATTACKS"].split()
declare, init, exchange, leave = Client.declare, Client.init, Client.exchange, Client.leave
dial = Transport.dial


def claim_and_dial(self, *args, **hello):
    """Claim to be 1000 workers."""
    return dial(self, *args, **hello, **({"workers": 1000} if "plane" in hello else {}))


def attack(client: Client, attacks: dict[str, Callable[[Client], None]]) -> None:
    """Perform those of these that are attempted, each once."""
    for name in [name for name in attempts if name in attacks]:
        attempts.remove(name)
        try:
            attacks[name](client)
            print("done", flush=True)
        except InvalidSettings as error:
            print(f"refused: {error}", flush=True)


def attack_and_declare(self, *args):
    attack(self, EARLY)
    return declare(self, *args)


def attack_and_init(self, *args, **named):
    attack(self, INITIAL)
    init(self, *args, **named)


def attack_and_exchange(self, *args, **named):
    attack(self, READY)
    return exchange(self, *args, **named)


def attack_and_leave(self):
    attack(self, LATE)
    leave(self)


Client.declare, Client.init = attack_and_declare, attack_and_init
Client.exchange, Client.leave = attack_and_exchange, attack_and_leave
if "claim_workers" in attempts:
    Transport.dial = claim_and_dial
runpy.run_path(str(Path(__file__).with_name("rounds.py")), run_name="__main__")
