"""HFA, hierarchical frequency aggregation: parties average often over the LAN, rarely over the WAN.

Every K1 local optimizer steps the workers of a party push their weights and continue from the party's mean. Every K2-th
of these means, counted per slice, is sent to the roots as a difference to the milestone, the last global model; the
milestone plus the mean of the parties' differences is the next one, from which all continue. Over the WAN that is one
exchange per K1 * K2 steps. Liu, Zhang, Song and Letaief, "Client-Edge-Cloud Hierarchical Federated Learning", ICC 2020.

A script written for HFA divides the weights that it pushes by `kv.num_workers`, so the sum is the mean; the party's
server compensates for workers that have left. An optimizer on the roots applies the mean difference as a gradient
(see diloco.py).
"""

from typing import TYPE_CHECKING, Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Option
from geomx_cli.runtime.training.worker_algorithm import FiniteWorkerAlgorithm

if TYPE_CHECKING:
    from geomx_cli.contract.config import NodeSettings
    from geomx_cli.core.plugins import Spec
    from geomx_cli.ps.aggregation.algorithm import Aggregate, PushUp, ReplyNow, ServerAlgorithm, SliceView
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.operation_queue import PendingExchange
    from geomx_cli.ps.optim.optimizer import Optimizer
    from geomx_cli.runtime.training.model import ModelWeights
    from geomx_cli.runtime.training.train_config import TrainConfig
    from geomx_cli.runtime.training.worker_algorithm import Stopwatch

name = "hfa"
title = "HFA"
look = ("#000000", "X", "oo")
options = (
    Option(
        "k1", "int", 20, "MXNET_KVSTORE_HFA_K1",
        "Steps of a worker between two averages of the weights in its party (hfa).", "synchronisation",
        minimum=1, maximum=1_000_000,
    ),
    Option(
        "k2", "int", 10, "MXNET_KVSTORE_HFA_K2",
        "Averages in a party between two averages over all parties (hfa).", "synchronisation",
        minimum=1, maximum=1_000_000,
    ),
    Option(
        "weight", "text", "parties", "GEOMX_WEIGHT",
        "How parties and workers count in an average (hfa, diloco). parties: all parties count equally, and so do all"
        " workers of a party. samples: a worker counts by the number of samples on which it trained.",
        "synchronisation",
        choices=("parties", "samples"),
    ),
    Option(
        "sync_stats", "bool", False, "GEOMX_SYNC_STATS",
        "Average the running means and variances of batch normalisation too (hfa).", "synchronisation",
    ),
)  # fmt: skip
needs_local_server = True
shards = True
skips = True
ranks_by_party = True  # scripts divide pushed weights by `kv.num_workers`


def refuses(spec: "Spec") -> str | None:
    """Local steps between rounds need an optimizer on the workers."""
    if str(spec.options["optimizer"]).startswith("dcasgd"):
        return "its optimizer runs on the workers, where no delay is to be compensated for"
    divides = spec.script and spec.options["framework"] == "mxnet"
    if divides and spec.options["rank_scope"] == "global":
        return "a script divides its weights by the workers of its party, and --rank-scope global counts all"
    return _refuses_lan(str(spec.options["compress_lan"]))


def _refuses_lan(codec_spec: str) -> str | None:
    if not codec_spec:
        return None
    from geomx_cli.ps.aggregation.codec import parse_codec

    codec = parse_codec(codec_spec)
    if codec is None or codec.keeps_weights:
        return None
    return f"its workers push weights, not gradients, and --compress-lan {codec_spec} leaves too little of these"


def server(settings: "NodeSettings") -> "ServerAlgorithm":
    """The server part."""
    if settings.role == "global_server" and settings.central_workers:
        raise InvalidSettings(
            "central workers need a local server of their own in HFA: the global servers get parties' differences",
            "leave DMLC_ENABLE_CENTRAL_WORKER out and start the central party's workers as those of one more party",
        )
    if reason := _refuses_lan(settings.text("compress_lan")):
        raise InvalidSettings(f"HFA: {reason}", "take fp16, bf16 or int8")
    workers = settings.local.workers if settings.local is not None else 1
    is_flat = settings.upper is None
    return HfaServer(int(settings.number("k2")), workers, settings.text("weight") == "samples", is_flat=is_flat)


class HfaServer:
    """Keeps for each slice at a party the milestone (the slice's shape, fp32 or fp64), the number of means, and the
    total weight since the milestone.

    k2: means of the party between two differences that it sends up.
    workers: of the party, by which they have divided.
    by_samples: whether parties weigh as much as their samples, and not all the same.
    is_flat: whether the members of this root are workers.
    """

    asynchronous = False
    max_staleness = -1
    starts_from_value = True

    def __init__(self, k2: int, workers: int, by_samples: bool, *, is_flat: bool = False) -> None:
        self._k2 = k2
        self._workers = workers
        self._by_samples = by_samples
        self._is_flat = is_flat

    def aggregate_local(self, slot: "SliceView", total: "Aggregate") -> "ReplyNow | PushUp":
        """Return the party's mean; send every K2-th up as its difference to the milestone.

        Abstaining members do not count. A party that has entirely abstained since the milestone has weight 0.
        """
        import numpy as np

        from geomx_cli.ps.aggregation.algorithm import PushUp, ReplyNow

        assert slot.value is not None
        mean = self._mean(total) if total.weight else slot.value.astype(total.array.dtype, copy=False)
        milestone = slot.state.setdefault("milestone", slot.value.astype(mean.dtype))
        count = slot.state.setdefault("means", np.zeros(1, np.int64))
        given = slot.state.setdefault("weight", np.zeros(1, np.float64))
        count += 1
        given += total.weight
        if count[0] % self._k2:
            return ReplyNow(mean)
        weight = float(given[0]) if self._by_samples else float(given[0] > 0)
        given[0] = 0
        return PushUp((mean - milestone) * mean.dtype.type(weight), weight)

    def on_global(self, slot: "SliceView", result: "Array") -> "Array":
        """Store the next milestone."""
        slot.state["milestone"] = result.astype(slot.state["milestone"].dtype)
        return result

    def aggregate_global(self, slot: "SliceView", total: "Aggregate", optimizer: "Optimizer | None") -> "Array":
        """Return the milestone plus the mean of the parties' differences."""
        assert slot.value is not None
        if total.weight == 0:
            return slot.value
        scalar = total.array.dtype.type
        step: Array = self._mean(total) - slot.value if self._is_flat else total.array / scalar(total.weight)
        if optimizer is not None:
            return optimizer.update(slot.optimizer_state, slot.value, -step)
        new: Array = slot.value + step
        return new

    def on_request(self, topic: str, body: dict[str, Any], is_root: bool) -> dict[str, Any] | None:
        """Handles no topics."""
        return None

    def keeps(self, topic: str, body: dict[str, Any]) -> bool:
        """Handles no topics."""
        return False

    def _mean(self, total: "Aggregate") -> "Array":
        if total.weight == self._workers:
            return total.array
        mean: Array = total.array * total.array.dtype.type(self._workers / total.weight)
        return mean


# The worker part for the bundled training job.


def server_optimizer(config: "TrainConfig") -> tuple[str, dict[str, float]] | None:
    """None: the roots average."""
    return None


def worker(client: "Client", model: "ModelWeights", config: "TrainConfig") -> "HfaWorker":
    """The worker part."""
    return HfaWorker(client, model, config)


class HfaWorker(FiniteWorkerAlgorithm):
    """Every K1 local steps: push weights, pull the party's mean or the next milestone."""

    parts = ("_steps",)

    def __init__(self, client: "Client", model: "ModelWeights", config: "TrainConfig") -> None:
        from geomx_cli.runtime.training.tensor_rounds import TensorRounds

        self.separate_comm_phase = True
        self.steps_per_round = int(config.number("k1"))
        self._k2 = int(config.number("k2"))
        self._scale = 1.0 / client.num_workers
        self._by_samples = config.text("weight") == "samples"
        self._usual = self.steps_per_round * config.batch_size
        self._client = client
        self._model = model
        self._steps = model.local_steps(config)
        self.optimizer = self._steps.optimizer
        self._rounds = TensorRounds(client, model)
        self._shares_statistics = bool(config.options["sync_stats"])
        self._statistics: dict[str, tuple[Array, PendingExchange]] = {}

    @property
    def is_global_round(self) -> bool:
        """Whether the last round produced a milestone."""
        return self.rounds % self._k2 == 0

    def start(self) -> None:
        """Pull the initial weights from the servers."""
        self._rounds.pull()
        self._steps.begin()

    def after_step(self, samples: int, watch: "Stopwatch") -> bool:
        """Take a step; the K1-th begins a round."""
        self._steps.step(samples, watch)
        return self._steps.count == self.steps_per_round and self._exchange()

    def drain(self) -> None:
        """Push the weights after less than K1 steps, or abstain and follow the party to its next milestone."""
        if self._steps.count:
            self._exchange()
            return
        for index in range(len(self._rounds.buffers)):
            self._rounds.abstain(index)
        self._exchange_statistics(0.0)

    def skip(self) -> None:
        """See FiniteWorkerAlgorithm."""
        self._steps.count = self._steps.samples = 0
        self.drain()

    def unfinished(self, steps_left: int) -> bool:
        """Return whether steps are left for the rounds after the next milestone.

        Only a milestone can end the job, and its weight at the roots is the total over all rounds leading to it: so a
        worker reports in each of them what will hold at the milestone.
        """
        rounds_before = -(self.rounds + 1) % self._k2
        return steps_left > rounds_before * self.steps_per_round

    def _exchange(self) -> bool:
        weight = max(1, self._steps.samples) / self._usual if self._by_samples else 1.0
        for index, (own, buffer) in enumerate(zip(self._steps.weights, self._rounds.buffers, strict=True)):
            buffer[:] = own * (self._scale * weight)
            self._rounds.push(index, weight)
        self._exchange_statistics(weight)
        return True

    def _exchange_statistics(self, weight: float) -> None:
        """Begin a round of the statistics; with weight 0 this worker abstains."""
        if not self._shares_statistics:
            return
        for key, running in self._model.read_statistics().items():
            buffer = running.reshape(-1) * (self._scale * weight)
            source = buffer if weight else None
            self._statistics[key] = buffer, self._client.exchange(key, source, buffer, weight=weight or 1.0)

    def synchronise(self) -> None:
        """Continue from the mean."""
        self._rounds.wait()
        for index, mean in enumerate(self._rounds.buffers):
            self._steps.put(index, mean)
        for _, exchange in self._statistics.values():
            exchange.done.result()
        self._model.write_statistics({key: mean for key, (mean, _) in self._statistics.items()})
        self._statistics.clear()
        self._steps.count = self._steps.samples = 0
        self.rounds += 1
