"""ESync: the slowest worker takes one step per round, the others as many as fit in that time.

After each local step a worker asks the state server whether to take another one or synchronize (during the first
`--min-local-steps` of a round it only reports); it is ready once it could not complete another step before the slowest
does. Then, as in DiLoCo, it pushes the difference to its initial weights, and the roots add the mean of all workers'
differences, times the global learning rate, to the weights. Li et al., "ESync: Accelerating Intra-Domain Federated
Learning in Heterogeneous Data Centers", IEEE Transactions on Services Computing 15(4), 2020.

The state server runs in an existing server. For all workers of the job it is the rank-0 root. With `--esync-scope
party` it is, for the workers of a party, the party's first local server. Workers report ages, never times of day. With
`--esync-query overlapped` a worker continues with the next step while it asks, unless it is the slowest itself:
that one's next step would delay all others.
"""

import time
from typing import TYPE_CHECKING, Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Option
from geomx_cli.runtime.algorithms._esync_client import EsyncClient, StateServer
from geomx_cli.runtime.algorithms._pseudo_gradient import PseudoGradient
from geomx_cli.runtime.algorithms.diloco import MeanServer
from geomx_cli.runtime.training.worker_algorithm import Contributed, PacedWorkerAlgorithm

if TYPE_CHECKING:
    from concurrent.futures import Future

    from geomx_cli.contract.config import NodeSettings
    from geomx_cli.core.plugins import Spec
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.training.model import ModelWeights
    from geomx_cli.runtime.training.train_config import TrainConfig
    from geomx_cli.runtime.training.worker_algorithm import Stopwatch

name = "esync"
title = "ESync"
look = ("#CC79A7", "o", "xx")
own_pace = True
options = (
    Option(
        "esync_scope", "text", "global", "GEOMX_ESYNC_SCOPE",
        "Which worker sets the length of a round (esync). global: the slowest of all workers. party: the slowest worker"
        " of the party.", "synchronisation", choices=("global", "party"),
    ),
    Option(
        "esync_query", "text", "overlapped", "GEOMX_ESYNC_QUERY",
        "Whether a worker that asks the state server waits for the answer (blocking), or continues to compute (esync).",
        "synchronisation", choices=("overlapped", "blocking"),
    ),
    Option(
        "esync_epsilon", "duration", 0.0, "GEOMX_ESYNC_EPSILON",
        "A worker takes another step only if this step would end at least this long before the slowest worker's step"
        " (esync). auto: 5 % of the slowest worker's step, at most 0.5s.",
        "synchronisation", minimum=0, maximum=3600, word="auto",
    ),
    Option(
        "min_local_steps", "int", 1, "GEOMX_MIN_LOCAL_STEPS",
        "Every worker, even the slowest, takes at least this many steps in a round (esync).", "synchronisation",
        minimum=1, maximum=1_000_000,
    ),
    Option(
        "local_lr", "float", 0.0, "GEOMX_LOCAL_LR", "Learning rate of the workers' steps (esync). auto: --lr.",
        "synchronisation", minimum=0, maximum=1e6, word="auto",
    ),
    Option(
        "global_lr", "float", 1.0, "GEOMX_GLOBAL_LR", "Factor for the mean of the workers' weight differences (esync).",
        "synchronisation", minimum=1e-6, maximum=100,
    ),
    Option(
        "esync_http", "text", "", "GEOMX_ESYNC_HTTP",
        "HOST:PORT where a state server answers over HTTP, for workers of the original ESync (esync). Empty: no HTTP."
        " HTTP has no password: an address other than loopback needs GEOMX_INSECURE=1 on this host.",
        "synchronisation",
    ),
)  # fmt: skip


def refuses(spec: "Spec") -> str | None:
    """Local steps between rounds need an optimizer on the workers."""
    if str(spec.options["optimizer"]).startswith("dcasgd"):
        return "its optimizer runs on the workers, where no delay is to be compensated for"
    _, colon, port = str(spec.options["esync_http"]).rpartition(":")
    if spec.options["esync_http"] and not (colon and port.isdecimal() and 0 < int(port) < 65536):
        return f"--esync-http {spec.options['esync_http']} is not HOST:PORT"
    return None


def server(settings: "NodeSettings") -> "EsyncServer":
    """The server part; that of the first root has the HTTP interface, if enabled."""
    epsilon = settings.number("esync_epsilon") or None
    steps = int(settings.number("min_local_steps"))
    part = EsyncServer(settings.text("esync_scope"), epsilon, steps)
    if settings.text("esync_http") and _is_first_root(settings):
        part.open_http(settings.text("esync_http"), insecure=settings.insecure)
    return part


def _is_first_root(settings: "NodeSettings") -> bool:
    plane = settings.upper or settings.local
    only = plane is not None and plane.servers == 1  # a server started by hand may not know its rank
    is_root = settings.role == "global_server" or settings.upper is None
    return is_root and (settings.rank == 0 or (settings.rank is None and only))


class EsyncServer(MeanServer):
    """Adds the mean of the differences, and answers queries to the state server.

    A request contains the worker's rank in the scope and the scope's number of workers, which must be the same in all.
    """

    def __init__(self, scope: str, epsilon: float | None, min_steps: int) -> None:
        super().__init__()
        self._scope = scope
        self._epsilon = epsilon
        self._min_steps = min_steps
        self._state = StateServer()
        self._workers = 0

    def open_http(self, place: str, *, insecure: bool) -> None:
        """Serve workers outside this job on HOST:PORT, with a separate state server.

        Raises InvalidSettings if it cannot listen there, and for non-loopback addresses unless `insecure`.
        """
        from geomx_cli.contract.addresses import is_private
        from geomx_cli.runtime.algorithms._esync_http import serve

        if not insecure and not is_private(f"tcp://{place}"):
            hint = "give an address of its loopback, or set GEOMX_INSECURE=1 there in a network that you trust"
            raise InvalidSettings(f"refusing to answer at {place}: HTTP has no password", hint)

        host, _, port = place.rpartition(":")
        serve(host.strip("[]"), int(port))  # until this process ends

    def on_request(self, topic: str, body: dict[str, Any], is_root: bool) -> dict[str, Any] | None:
        """Handle a worker's request; see EsyncClient."""
        if topic != "esync" or (self._scope == "global" and not is_root):
            return None
        return self._answer(time.monotonic(), int(body["r"]), body)

    def keeps(self, topic: str, body: dict[str, Any]) -> bool:
        """See ServerAlgorithm: who has left. Reports of steps come again and again."""
        return topic == "esync" and body["do"] == "leave"

    def _answer(self, now: float, rank: int, body: dict[str, Any]) -> dict[str, Any]:
        state, workers = self._state, int(body["workers"])
        if self._workers not in (0, workers):
            raise InvalidSettings(f"it counts {workers} workers, and others {self._workers}", "start all anew")
        if not self._workers:
            state.init(workers, self._epsilon, self._min_steps)
            self._workers = workers
        if body["do"] == "leave":
            state.leave(rank)
        elif body["do"] == "enter":
            state.entered(now, rank, int(body["t"]))
        elif body["do"] == "wait":
            return {"ready": state.wait(now, rank, alone=self._scope == "global")}
        else:
            decision = state.query(now, rank, int(body["k"]), float(body["c"]), float(body["age"]))
            return {"ready": decision.ready, "slowest": decision.slowest, "epsilon": state.epsilon}
        return {}


# The worker part for the bundled training job.


def server_optimizer(config: "TrainConfig") -> tuple[str, dict[str, float]] | None:
    """The global update: the mean difference times the global learning rate."""
    return "sgd", {"learning_rate": config.number("global_lr")}


def worker(client: "Client", model: "ModelWeights", config: "TrainConfig") -> "EsyncWorker":
    """The worker part."""
    from dataclasses import replace

    rate = config.number("local_lr")
    if rate:
        config = replace(config, optimizer_params={**config.optimizer_params, "learning_rate": rate})
    return EsyncWorker(client, PseudoGradient(client, model, config))


def depart(client: "Client") -> None:
    """Let the state server decide without this worker."""
    esync = EsyncClient(client)
    esync.leave()
    esync.await_reports()


class EsyncWorker(PacedWorkerAlgorithm):
    """Local steps until the state server ends them; then a round.

    Fast workers finish their data long before the slowest and continue: if only the slowest contributed to the last
    rounds, the model would drift towards its data.
    """

    steps_per_round = 10  # an estimate: unknown in advance
    kept = (*PacedWorkerAlgorithm.kept, "_is_behind")
    parts = ("_pseudo_gradient", "_esync")

    def __init__(self, client: "Client", pseudo_gradient: PseudoGradient) -> None:
        self.separate_comm_phase = True
        self._esync = EsyncClient(client)
        self._pseudo_gradient = pseudo_gradient
        self.optimizer = pseudo_gradient.steps.optimizer
        self._tensors = pseudo_gradient.tensors
        self._is_behind = False  # the model has older weights than the last round gave

    def start(self) -> None:
        """Pull the initial weights from the servers."""
        self._pseudo_gradient.start()
        self._esync.begin()

    def after_step(self, samples: int, watch: "Stopwatch") -> bool:
        """Take a step and ask whether to synchronize."""
        self._pseudo_gradient.steps.step(samples, watch)
        with watch("check ready"):
            ready = self._esync.step()
        if not ready:
            return False
        self.before_round(self.rounds, Contributed(self._esync.steps, "step"))
        self._pseudo_gradient.push(self._tensors)
        return True

    def drain(self) -> None:
        """Take no more steps: push those since the last round, or abstain if there are none."""
        self.before_round(self.rounds, Contributed(self._esync.steps, "drain"))
        self._esync.leave()
        self._is_behind = False
        self._contribute()

    def _contribute(self) -> None:
        if self._pseudo_gradient.steps.count:
            self._pseudo_gradient.push(self._tensors)
        else:
            self._pseudo_gradient.abstain(self._tensors)

    def continue_round(self) -> None:
        """See PacedWorkerAlgorithm."""
        self._esync.continue_round(self.contributed(self.rounds))

    @property
    def must_join(self) -> bool:
        """See PacedWorkerAlgorithm."""
        return self._esync.must_join

    def awaited(self) -> "Future[bool]":
        """See PacedWorkerAlgorithm."""
        return self._esync.awaited()

    def join(self) -> None:
        """See PacedWorkerAlgorithm."""
        self.before_round(self.rounds, Contributed(self._esync.steps, "join"))
        self._is_behind = True
        self._contribute()

    def waited(self, seconds: float) -> None:
        """See PacedWorkerAlgorithm."""
        self._esync.waited(seconds)

    def resume(self) -> None:
        """See PacedWorkerAlgorithm."""
        if self._is_behind:
            self._is_behind = False
            self._pseudo_gradient.return_to_origin()

    def synchronise(self) -> None:
        """Receive the new weights and begin the next round."""
        if self._is_behind:
            self._pseudo_gradient.receive(self._tensors)
        else:
            self._pseudo_gradient.adopt(self._tensors)
        self.recorded = {"epsilon": self._esync.epsilon}
        self._pseudo_gradient.steps.count = 0
        self.rounds += 1
        self._esync.begin(self.contributed(self.rounds))

    def end(self) -> None:
        """Report to the state server that this worker takes no more steps."""
        self._esync.leave()
        self._esync.await_reports()
