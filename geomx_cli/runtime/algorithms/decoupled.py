"""Decoupled DiLoCo: parties take local steps and never wait for each other; the roots merge what has arrived.

A party takes `--inner-steps` steps, then pushes the difference D = (global weights last received) - (its weights). A
root answers at once with its present weights, and keeps D. It merges the kept differences once `--quorum` parties have
given one, or once a party gives its next one. So a party that is slow, silent or dead costs the others nothing, and a
late difference is part of the next merge. The outer step is w = w - `--outer-lr` * (merge).

The merge averages lengths and directions separately, so that differences that disagree do not shorten each other:

    merge = s * n * u / |u|     n = sum(weight |D|) / sum(weight)     u = sum(weight D / |D|)

weight: of a difference, the samples behind it, divided by the merges since its party's last difference (at least 1). A
    slow party's difference was computed from older weights.
s: the parties in the merge, as a share of the parties in the last MEMORY merges, with this one. So in the time in
    which each party gives one difference the weights move as far as in one outer step of DiLoCo.

The outer step has no momentum. A worker computes its next difference from weights that lack the merge of its last one,
and momentum would add the same direction again: with the 0.9 of DiLoCo training diverges. Liu et al., "Asynchronous
Local-SGD Training for Language Modeling", 2024, arXiv 2401.09135, found the same. Norms are those of a slice, which for
tensors of up to `--slice-elements` is the whole tensor.
"""

from typing import TYPE_CHECKING

from geomx_cli.core.options import Option
from geomx_cli.runtime.algorithms._pseudo_gradient import PseudoGradient
from geomx_cli.runtime.algorithms.diloco import DilocoWorker
from geomx_cli.runtime.algorithms.diloco import refuses as refuses_for_diloco
from geomx_cli.runtime.algorithms.mixed import MixedServer, depart

if TYPE_CHECKING:
    from geomx_cli.contract.config import NodeSettings
    from geomx_cli.core.plugins import Spec
    from geomx_cli.ps.aggregation.algorithm import Aggregate, ServerAlgorithm, SliceView
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.optim.optimizer import Optimizer
    from geomx_cli.runtime.training.model import ModelWeights
    from geomx_cli.runtime.training.train_config import TrainConfig

__all__ = [
    "asynchronous", "depart", "look", "name", "options", "outer_step", "refuses", "server", "server_optimizer",
    "shared_options", "title", "worker",
]  # fmt: skip

name = "decoupled"
title = "Decoupled DiLoCo"
look = ("#B2182B", "p", "**")
asynchronous = True
outer_step = True
options = (
    Option(
        "quorum", "int", 0, "GEOMX_QUORUM",
        "Parties whose differences the global servers merge at once (decoupled). auto: all but one.", "synchronisation",
        minimum=1, maximum=4096, word="auto",
    ),
)  # fmt: skip
shared_options = ("inner_steps", "outer_lr", "fragments", "overlap", "mix")

MEMORY = 8


def refuses(spec: "Spec") -> str | None:
    """Trains the bundled networks, under DiLoCo's conditions, with a quorum of the parties that there are."""
    if spec.script:
        return "it trains the bundled networks only; for a script use --algo diloco"
    parties, quorum = int(spec.options["parties"]), int(spec.options["quorum"])
    if quorum > parties + bool(spec.options["central_workers"]):
        return f"--quorum {quorum} is more than the parties that train"
    return refuses_for_diloco(spec)


def server(settings: "NodeSettings") -> "ServerAlgorithm":
    """The server part."""
    plane = settings.upper or settings.local
    members = (plane.workers if plane is not None else 1) + int(settings.upper is not None and settings.central_workers)
    return DecoupledServer(int(settings.number("quorum")) or max(1, members - 1))


class DecoupledServer(MixedServer):
    """Keeps the differences to a slice until they are merged, see _Kept.

    quorum: the number of members that make a merge due.
    """

    starts_from_value = True
    takes_rows = False

    def __init__(self, quorum: int) -> None:
        super().__init__()
        self._quorum = quorum

    def aggregate_global(self, slot: "SliceView", total: "Aggregate", optimizer: "Optimizer | None") -> "Array":
        """Keep a party's mean difference, and merge if that is due. A party that only abstains has no more steps. Then
        all that is kept is merged, because nobody may contribute after it.
        """
        assert slot.value is not None
        value, kept = slot.value, _Kept(slot)
        if kept.members and (total.weight == 0 or total.member in kept.members):
            value = kept.merge(value, optimizer)
        if total.weight:
            kept.add(total)
            if len(kept.members) >= self._quorum:
                value = kept.merge(value, optimizer)
        return value


class _Kept:
    """The differences to one slice that are not merged yet. They are in arrays of the slice, which survive its server:

    direction: u, with the slice's length. Absent if it is zero.
    sums: the sums of weight |D| and of the weights. float64.
    given: the members whose differences these are. int64.
    merged: a row for each member: its number, and the number of all merges at its last difference. int64.
    merges: the number of all merges. int64.
    """

    def __init__(self, slot: "SliceView") -> None:
        import numpy as np

        self._slot = slot
        self._state = slot.state
        self._state.setdefault("sums", np.zeros(2))
        self._state.setdefault("given", np.zeros(0, np.int64))
        self._state.setdefault("merged", np.zeros((0, 2), np.int64))
        self._state.setdefault("merges", np.zeros(1, np.int64))

    @property
    def members(self) -> frozenset[int]:
        """The members whose differences are kept."""
        return frozenset(self._state["given"].tolist())

    def add(self, total: "Aggregate") -> None:
        """Add the mean difference of a member."""
        import numpy as np

        state, merges = self._state, int(self._state["merges"][0])
        before = dict(state["merged"].tolist())
        weight = total.weight / max(1, merges - before.get(total.member, merges))
        difference = total.array / total.array.dtype.type(total.weight)
        length = float(np.linalg.norm(difference))
        if length:
            difference *= difference.dtype.type(weight / length)
            state["direction"] = difference if "direction" not in state else state["direction"] + difference
        state["sums"] = state["sums"] + (weight * length, weight)
        state["given"] = np.append(state["given"], total.member)
        state["merged"] = np.array(sorted({**before, total.member: merges}.items()), np.int64)

    def merge(self, value: "Array", optimizer: "Optimizer | None") -> "Array":
        """Return the weights after an outer step with all differences. None is kept then."""
        import numpy as np

        state, (lengths, weights) = self._state, self._state["sums"].tolist()
        factor = self._share() * lengths / weights
        state["sums"], state["given"], state["merges"] = np.zeros(2), np.zeros(0, np.int64), state["merges"] + 1
        step = state.pop("direction", None)
        length = float(np.linalg.norm(step)) if step is not None else 0.0
        if step is None or not length:
            return value
        step *= step.dtype.type(factor / length)
        return value - step if optimizer is None else optimizer.update(self._slot.optimizer_state, value, step)

    def _share(self) -> float:
        """The members in this merge, as a share of the members in the last MEMORY merges."""
        merges = int(self._state["merges"][0])
        recent = [member for member, last in self._state["merged"].tolist() if merges - last < MEMORY]
        return len(self.members) / len(recent)


# The worker part for the bundled training job.


def server_optimizer(config: "TrainConfig") -> tuple[str, dict[str, float]] | None:
    """The outer optimizer."""
    return "sgd", {"learning_rate": config.number("outer_lr")}


def worker(client: "Client", model: "ModelWeights", config: "TrainConfig") -> "DecoupledWorker":
    """The worker part."""
    return DecoupledWorker(PseudoGradient(client, model, config), config)


class DecoupledWorker(DilocoWorker):
    """DiLoCo's, with rounds of the party, and differences that count by their samples.

    After its last steps a party abstains once from each fragment, so that the roots merge what they keep.
    """

    asynchronous = True
    kept = (*DilocoWorker.kept, "_unmerged")

    def __init__(self, pseudo_gradient: PseudoGradient, config: "TrainConfig") -> None:
        super().__init__(pseudo_gradient, config)
        self._by_samples = True
        self._unmerged = [False] * len(self._samples)  # by fragment: whether the roots may keep a difference

    def drain(self) -> None:
        """See DilocoWorker."""
        self._unmerged[self._turn] = False
        super().drain()  # sets it again if it exchanges

    def unfinished(self, steps_left: int) -> bool:
        """See DilocoWorker."""
        return super().unfinished(steps_left) or any(self._unmerged)

    def end(self) -> None:
        """The final weights were pulled when all workers were done. The last exchange's are older."""

    def _exchange(self) -> bool:
        self._unmerged[self._turn] = True
        return super()._exchange()
