"""What a synchronisation algorithm does at a worker, as the bundled training loop sees it."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from geomx_cli.runtime.training.recipe import Recipe
    from geomx_cli.runtime.training.stopwatch import Stopwatch

__all__ = ["Algorithm", "WorkerPart"]


class WorkerPart(Protocol):
    """Made by an algorithm's `worker(client, store, replica, recipe)`. Used by the training thread only.

    The loop calls `start` once, then for every batch one forward and backward pass and `after_step`. Where that began a
    round, and `due` says so, `synchronise` follows before the next batch. When no batch is left, or all stop, it goes
    on with `finish` and `synchronise` until `finish` has nothing more. A failure of the job comes out of any of them as
    a GeomxError.
    """

    rounds: int
    """Rounds completed."""
    gradient_scale: float
    """What the gradient of a batch's mean loss is multiplied by in the backward pass."""
    steps_per_round: int
    """Steps between two rounds, about."""
    exchange_apart: bool
    """Whether a round's record has its exchange behind its steps, and not in the only one."""

    @property
    def due(self) -> bool:
        """Whether the result of the round that has begun is to be taken before the next step."""

    @property
    def everywhere(self) -> bool:
        """Whether the round under way, or the last one, is one of all workers, not of this party alone."""

    def start(self) -> None:
        """Take the initial weights from the servers; blocks until all workers can have them."""

    def after_step(self, samples: int, watch: "Stopwatch") -> bool:
        """The backward pass on a batch of so many samples has been queued. True if the exchange of a round has
        begun; it is not waited for here. `watch` times what the part does itself.
        """

    def synchronise(self) -> None:
        """Wait for the result of the round that has begun and put it into the replica's weights."""

    def finish(self) -> bool:
        """Training ends. True if the exchange of a round has begun that the last steps still need; False when the
        replica's weights are the final ones.
        """


class Algorithm(Protocol):
    """The parts of an algorithm's module that the training job uses."""

    def server_optimizer(self, recipe: "Recipe") -> tuple[str, dict[str, float]] | None:
        """Name and hyper-parameters of the optimizer that the roots are to run; None for none."""

    def worker(self, client: object, store: object, replica: object, recipe: "Recipe") -> WorkerPart:
        """The part in a worker."""
