"""DiLoCo: many inner steps on every worker, then one outer step with the mean of their differences.

A worker takes H steps with its inner optimizer, then pushes the difference D = (initial weights) - (current weights).
The roots use the mean of all workers' differences as a gradient for the outer optimizer, SGD with Nesterov
momentum: v = mu * v + D, w = w - lr * (D + mu * v). Douillard et al., "DiLoCo: Distributed Low-Communication Training
of Language Models", 2023, arXiv 2311.08105.

With `--fragments F` the tensors are distributed over F fragments, one of which is exchanged every H / F steps, which
evens out network use (Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, arXiv 2501.18512).
With `--overlap` the inner steps continue meanwhile, and the result is applied that many steps later, without losing
them: w = alpha * (pushed) + (1 - alpha) * (global) + (own - pushed), where `pushed` are the worker's weights that the
exchange began with. Streaming DiLoCo has w = alpha * (own) + (1 - alpha) * (global), so of the steps meanwhile only the
part alpha is left. Training ends with the global weights.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from geomx_cli.core.options import Option
from geomx_cli.runtime.algorithms._pseudo_gradient import PseudoGradient
from geomx_cli.runtime.algorithms.fsa import FsaServer
from geomx_cli.runtime.training.worker_algorithm import FiniteWorkerAlgorithm

if TYPE_CHECKING:
    from geomx_cli.contract.config import NodeSettings
    from geomx_cli.core.plugins import Spec
    from geomx_cli.ps.aggregation.algorithm import Aggregate, ServerAlgorithm, SliceView
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.optim.optimizer import Optimizer
    from geomx_cli.runtime.training.model import ModelWeights
    from geomx_cli.runtime.training.train_config import TrainConfig
    from geomx_cli.runtime.training.worker_algorithm import Stopwatch

name = "diloco"
title = "DiLoCo"
outer_step = True
shards = True
skips = True
look = ("#8C6BB1", "*", "||")
options = (
    Option(
        "inner_steps", "int", 100, "GEOMX_INNER_STEPS",
        "Steps of a worker between two exchanges of a tensor (diloco).", "synchronisation",
        minimum=1, maximum=1_000_000,
    ),
    Option(
        "outer_lr", "float", 0.7, "GEOMX_OUTER_LR",
        "Learning rate of the outer step (diloco). With --compress sparseloco the default is 1.", "synchronisation",
        minimum=1e-6, maximum=100,
    ),
    Option(
        "outer_momentum", "float", 0.9, "GEOMX_OUTER_MOMENTUM",
        "Nesterov momentum of the outer step (diloco). With --compress sparseloco the default is 0, because the codec's"
        " residual replaces the momentum.", "synchronisation", minimum=0, below=1,
    ),
    Option(
        "fragments", "int", 1, "GEOMX_FRAGMENTS",
        "Parts into which the model is divided. Workers exchange one part after another, and each part once in"
        " --inner-steps steps (diloco).", "synchronisation", minimum=1, maximum=1024,
    ),
    Option(
        "overlap", "int", 0, "GEOMX_OVERLAP",
        "Steps that a worker takes during an exchange, before it applies the result (diloco).", "synchronisation",
        minimum=0, maximum=1_000_000,
    ),
    Option(
        "mix", "float", 0.5, "GEOMX_MIX",
        "With --overlap a worker mixes the result with the weights that it pushed. --mix is the fraction of the pushed"
        " weights. The worker also keeps the steps that it took since the push (diloco).", "synchronisation",
        minimum=0, maximum=1,
    ),
)  # fmt: skip
shared_options = ("weight",)


def refuses(spec: "Spec") -> str | None:
    """Exchanges must not overlap each other, and the inner optimizer must run on the workers."""
    if str(spec.options["optimizer"]).startswith("dcasgd"):
        return "its inner optimizer runs on the workers, where no delay is to be compensated for"
    steps, fragments = int(spec.options["inner_steps"]), int(spec.options["fragments"])
    if steps % fragments:
        return f"--inner-steps {steps} is no multiple of --fragments {fragments}"
    if int(spec.options["overlap"]) >= steps // fragments:
        return f"--overlap must be less than the {steps // fragments} steps between two exchanges"
    return None


def server(settings: "NodeSettings") -> "ServerAlgorithm":
    """The server part."""
    return MeanServer()


class MeanServer(FsaServer):
    """FSA's, but the roots use the weighted mean of all contributions as the gradient, not their sum.

    Members that have left are excluded. Without an optimizer the roots subtract the mean.
    """

    starts_from_value = True
    takes_rows = False

    def aggregate_global(self, slot: "SliceView", total: "Aggregate", optimizer: "Optimizer | None") -> "Array":
        """Return the new weights."""
        assert slot.value is not None
        if total.weight == 0:
            return slot.value
        mean = total.array / total.array.dtype.type(total.weight)
        return slot.value - mean if optimizer is None else optimizer.update(slot.optimizer_state, slot.value, mean)


# The worker part for the bundled training job.


def server_optimizer(config: "TrainConfig") -> tuple[str, dict[str, float]] | None:
    """The outer optimizer."""
    return "nag", {"learning_rate": config.number("outer_lr"), "momentum": config.number("outer_momentum")}


def worker(client: "Client", model: "ModelWeights", config: "TrainConfig") -> "DilocoWorker":
    """The worker part."""
    return DilocoWorker(PseudoGradient(client, model, config), config)


class DilocoWorker(FiniteWorkerAlgorithm):
    """Inner steps with periodic exchanges of a fragment; plain DiLoCo has a single fragment.

    One exchange is pending at most; the end of training waits for it, and drops what mixing would have kept.
    """

    kept = (*FiniteWorkerAlgorithm.kept, "_samples", "_turn", "_mix")
    parts = ("_pseudo_gradient",)

    def __init__(self, pseudo_gradient: PseudoGradient, config: "TrainConfig") -> None:
        self.separate_comm_phase = True
        self._pseudo_gradient = pseudo_gradient
        self.optimizer = pseudo_gradient.steps.optimizer
        self._fragments = int(config.number("fragments"))
        self._overlap = int(config.number("overlap"))
        self._mix = config.number("mix")
        self.partial_rounds = self._fragments > 1 or self._overlap > 0
        self._by_samples = config.text("weight") == "samples"
        inner_steps = int(config.number("inner_steps"))
        self.steps_per_round = inner_steps // self._fragments
        self._usual = inner_steps * config.batch_size
        self._samples = [0] * self._fragments  # since each fragment's last exchange
        self._turn = 0  # the fragment of the next exchange, or of the pending one
        self._wait = -1  # inner steps until the pending exchange's result is taken; -1 if none is pending

    @property
    def must_wait(self) -> bool:
        """Whether the result of the pending exchange is due."""
        return self._wait == 0

    @property
    def global_weights(self) -> "Sequence[Array] | None":
        """The fragments as of their last exchanges; the model additionally has this worker's local steps."""
        return self._pseudo_gradient.origin if self.partial_rounds else None

    def start(self) -> None:
        """Pull the initial weights from the servers."""
        self._pseudo_gradient.start()

    def after_step(self, samples: int, watch: "Stopwatch") -> bool:
        """Take a step and possibly begin a round; a pending round comes a step closer."""
        steps = self._pseudo_gradient.steps
        steps.step(samples, watch)
        self._samples = [count + samples for count in self._samples]
        self._wait -= int(self._wait > 0)
        return steps.count % self.steps_per_round == 0 and self._exchange()

    def drain(self) -> None:
        """Push the steps since the last exchange of the current fragment, or abstain if there are none."""
        self._mix = 0.0  # no later step will push this worker's part of the weights
        if self._samples[self._turn]:
            self._exchange()
        else:
            self._pseudo_gradient.abstain(self._fragment())

    def skip(self) -> None:
        """See FiniteWorkerAlgorithm."""
        self._samples = [0] * self._fragments
        self._pseudo_gradient.abstain(self._fragment())

    def unfinished(self, steps_left: int) -> bool:
        """Return whether batches are left, or steps that some fragment has not exchanged."""
        return steps_left > 0 or any(self._samples)

    def end(self) -> None:
        """Discard this worker's part that mixing has left in the weights."""
        if self._overlap:
            self._pseudo_gradient.return_to_origin()

    def _exchange(self) -> bool:
        weight = max(1, self._samples[self._turn]) / self._usual if self._by_samples else 1.0
        self._pseudo_gradient.push(self._fragment(), weight, continues=self._overlap > 0)
        self._samples[self._turn] = 0
        self._wait = self._overlap
        return True

    def _fragment(self) -> Sequence[int]:
        """The tensors of the current fragment: every F-th, so that each fragment has tensors of all depths."""
        return self._pseudo_gradient.tensors[self._turn :: self._fragments]

    def synchronise(self) -> None:
        """Receive the result, to which the local steps since the push are added."""
        self._pseudo_gradient.adopt(self._fragment(), self._mix)
        self._turn = (self._turn + 1) % self._fragments
        self._wait = -1
        self.rounds += 1
