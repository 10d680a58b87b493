"""FSA, fully synchronous: every round includes every worker's gradient; all continue from the same result.

Workers push gradients; a local server sums its party's and exchanges the sum with the roots; a root sums the
parties' and either lets the optimizer update the weights, or without one answers with the sum itself. Each round costs
one WAN round trip.
"""

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Option
from geomx_cli.runtime.training.worker_algorithm import FiniteWorkerAlgorithm, State

if TYPE_CHECKING:
    from geomx_cli.contract.config import NodeSettings
    from geomx_cli.ps.aggregation.algorithm import Aggregate, PushUp, ServerAlgorithm, SliceView
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.net.payload import Content, Rows
    from geomx_cli.ps.optim.optimizer import LocalOptimizer, Optimizer
    from geomx_cli.runtime.training.model import ModelWeights
    from geomx_cli.runtime.training.train_config import TrainConfig
    from geomx_cli.runtime.training.worker_algorithm import Stopwatch

name = "fsa"
title = "FSA"
look = ("#D55E00", "D", "++")
options: tuple[Option, ...] = ()
shared_options = ("max_staleness",)  # for scripts that ask for dist_async
exchanges = "gradients"
asynchronous_on_request = True
shards = True
skips = True


def refuses(spec: object) -> str | None:
    """Compatible with all settings."""
    return None


def server(settings: "NodeSettings") -> "ServerAlgorithm":
    """The server part; a script may make it asynchronous."""
    leaves = settings.text("on_worker_loss") == "leave"
    workers = settings.num_all_workers if leaves else 0
    return FsaServer(max_staleness=int(settings.number("max_staleness")), workers=workers)


class FsaServer:
    """Keeps no state between rounds.

    asynchronous: see ServerAlgorithm; then a root needs an optimizer, as the sum of a single party's gradients is not a
    meaningful result.
    workers: for as many the scripts scale their gradients, also if some of them have died; 0 if none may.
    """

    starts_from_value = False
    takes_rows = True

    def __init__(self, *, asynchronous: bool = False, max_staleness: int = -1, workers: int = 0) -> None:
        self.asynchronous = asynchronous
        self.max_staleness = max_staleness
        self._workers = workers

    def aggregate_local(self, slot: "SliceView", total: "Aggregate") -> "PushUp":
        """Send the party's sum to the roots."""
        from geomx_cli.ps.aggregation.algorithm import PushUp

        return PushUp(total.array, total.weight)

    def on_global(self, slot: "SliceView", result: "Array") -> "Array":
        """Use the root's result as the value."""
        return result

    def aggregate_global(self, slot: "SliceView", total: "Aggregate", optimizer: "Optimizer | None") -> "Array":
        """Return the new weights, or without an optimizer the sum. If all members abstain there is no update."""
        if slot.value is not None and total.weight == 0 and (optimizer is not None or self.asynchronous):
            return slot.value
        if optimizer is not None and slot.value is not None:
            gradient = total.array
            if (factor := self._factor(total.weight)) != 1:
                gradient = gradient * gradient.dtype.type(factor)
            return optimizer.update(slot.optimizer_state, slot.value, gradient, member=total.member)
        self._check_synchronous()
        slot.state.pop("rows", None)
        return total.array

    def rows_at_root(
        self, slot: "SliceView", total: "Rows", weight: float, member: int, optimizer: "Optimizer | None"
    ) -> "Content | None":
        """Like `aggregate_global`; without an optimizer, rows only in the previous sum become zero."""
        assert slot.value is not None
        if weight == 0 and (optimizer is not None or self.asynchronous):
            return None
        if optimizer is not None:
            if (factor := self._factor(weight)) != 1:
                total = replace(total, values=total.values * total.values.dtype.type(factor))
            return optimizer.update_rows(slot.optimizer_state, slot.value, total, member=member)
        self._check_synchronous()
        before, slot.state["rows"] = slot.state.get("rows"), total.numbers
        return total.with_zeros(total.not_zero(slot.value) if before is None else before)

    def _factor(self, weight: float) -> float:
        """The factor for an optimizer's gradients with which the mean is over the present workers."""
        return self._workers / weight if weight < self._workers and not self.asynchronous else 1.0

    def _check_synchronous(self) -> None:
        if self.asynchronous:
            raise InvalidSettings(
                "asynchronous training needs an optimizer on the global servers, and none is set",
                "call set_optimizer in the master worker before anybody pushes, or train synchronously",
            )

    def on_request(self, topic: str, body: dict[str, Any], is_root: bool) -> dict[str, Any] | None:
        """Handles no topics."""
        return None

    def keeps(self, topic: str, body: dict[str, Any]) -> bool:
        """Handles no topics."""
        return False


# The worker part for the bundled training job.


def server_optimizer(config: "TrainConfig") -> tuple[str, dict[str, float]] | None:
    """The roots' optimizer; None if every worker applies the summed gradient itself."""
    return (config.optimizer, _optimizer_params(config)) if config.optimizer_on == "server" else None


def _optimizer_params(config: "TrainConfig") -> dict[str, float]:
    """The optimizer's hyper-parameters, without momentum if a codec does not bear it."""
    from geomx_cli.contract.codecs import bears_momentum

    bears = bears_momentum(config.text("compress")) and bears_momentum(config.text("compress_lan"))
    own = {} if bears else {"momentum": 0.0}
    return config.optimizer_params | {name: value for name, value in own.items() if name in config.optimizer_params}


def worker(client: "Client", model: "ModelWeights", config: "TrainConfig") -> "FsaWorker":
    """The worker part."""
    return FsaWorker(client, model, client.num_all_workers, optimizer=own_optimizer(config))


def own_optimizer(config: "TrainConfig") -> "LocalOptimizer | None":
    """The optimizer of each worker, where no server runs one."""
    from geomx_cli.ps.optim import optimizers, schedules
    from geomx_cli.ps.optim.optimizer import LocalOptimizer

    if config.optimizer_on == "server":
        return None
    schedule = schedules.optional(config.schedule())
    return LocalOptimizer(optimizers.create(config.optimizer, _optimizer_params(config), schedule))


class FsaWorker(FiniteWorkerAlgorithm):
    """Every step is a round: push gradients, pull weights, or gradient sums for this worker's own optimizer.

    Gradients are divided by the number of workers that contribute to the round, so that their sum is the mean. Workers
    use the same optimizer implementation as servers, so weights are identical bit for bit wherever it runs.

    workers: in the same rounds.
    share: weight of their mean in the sum of all.
    optimizer: this worker's own; None if the servers run one.
    """

    def __init__(
        self,
        client: "Client",
        model: "ModelWeights",
        workers: int,
        share: float = 1.0,
        optimizer: "LocalOptimizer | None" = None,
    ) -> None:
        from geomx_cli.runtime.training.tensor_rounds import TensorRounds

        self._share = share
        self.gradient_scale = share / workers
        self._rounds = TensorRounds(client, model)
        self._model = model
        self.optimizer = optimizer
        self._weights: Array = self._rounds.vector  # the results are the weights, unless this worker runs an optimizer
        # An optimizer here updates all weights at once; parties that do not wait for each other wait for the newest.
        self._p3 = bool(client.settings.options["p3"]) and optimizer is None and not self.asynchronous
        self._tensors = range(len(model.names))

    def start(self) -> None:
        """Pull the initial weights from the servers."""
        self._rounds.pull()
        if self.optimizer is not None:
            self._weights = self._rounds.vector.copy()

    def state(self) -> State:
        """See WorkerAlgorithm."""
        state = super().state()
        if self.optimizer is not None:
            state.arrays["weights"] = self._weights
            state.add("optimizer", State({}, self.optimizer.state))
        return state

    def load(self, state: State) -> None:
        """See WorkerAlgorithm."""
        super().load(state)
        if self.optimizer is not None:
            self._weights = state.arrays["weights"].copy()
            self.optimizer.state = {name: array.copy() for name, array in state.named("optimizer").items()}

    def after_step(self, samples: int, watch: "Stopwatch") -> bool:
        """Begin each tensor's exchange as soon as its gradient is ready, from the output to the input."""
        with watch("forward and backward"):
            for index in reversed(self._tensors):
                self._rounds.reuse(index)
                self._model.read_gradient(index, self._rounds.buffers[index])
                self._rounds.push(index, keeps=self._p3)
        return True

    def drain(self) -> None:
        """Abstain: no local steps are ever pending."""
        for index in self._tensors:
            self._rounds.abstain(index)

    def expect(self, workers: int) -> None:
        """Set the number of gradients in the next round's mean."""
        self.gradient_scale = self._share / max(1, workers)

    def synchronise(self) -> None:
        """Wait for the results, with p3 not before the model uses them; without an optimizer on the servers, apply the
        sums.
        """
        self.rounds += 1
        pending = self._rounds.pending()
        if self._p3 and not all(result.done.done() for result in pending.values()):
            for index in self._tensors:
                pending[index].done.add_done_callback(self._on_result)
                self._model.write_late(index, pending[index])
            return
        self._rounds.wait()
        if self.optimizer is not None:
            self._weights[...] = self.optimizer.update(self._weights, self._rounds.vector)
        self._model.write_weights(self._weights)

    def _on_result(self, _: object) -> None:
        self.arrived = time.monotonic()
