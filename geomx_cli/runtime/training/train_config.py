"""The configuration of the bundled training job, from the options."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from geomx_cli.core.options import OPTIMIZERS, Value, with_usual_rate
from geomx_cli.datasets.catalog import TEXT_NETWORKS

__all__ = ["TrainConfig", "cosine"]


@dataclass(frozen=True)
class TrainConfig:
    """See the options of the same names.

    eval_every, save_every: steps; 0 means never.
    time_limit: seconds; 0 means none, also of target_accuracy.
    optimizer_params: the hyper-parameters of `optimizer`.
    options: all, by name.
    steps: of a worker, by its share of the data; for the schedule.
    """

    algorithm: str
    network: str
    data: str
    data_dir: str
    split: str
    batch_size: int
    epochs: int
    seed: int
    eval_every: int
    save_every: int
    time_limit: float
    target_accuracy: float
    optimizer: str
    optimizer_on: str
    optimizer_params: dict[str, float] = field(default_factory=dict)
    options: Mapping[str, Value] = field(default_factory=dict)
    steps: int = 0

    @property
    def trains_on_text(self) -> bool:
        """Whether the network trains on a text."""
        return self.network in TEXT_NETWORKS

    def schedule(self, updates: float = 1.0) -> tuple[str, dict[str, float | bool]] | None:
        """Return the learning rate's schedule, as name and numbers (ps/optim/schedules.py); None for a constant rate.
        updates: of the optimizer in one step of a worker.
        """
        if self.text("schedule") == "constant":
            return None
        rate, warmup = self.optimizer_params["learning_rate"], self.number("warmup")
        return cosine(rate, self.steps * updates, (self.steps // 20 if warmup < 0 else warmup) * updates)

    def number(self, option: str) -> float:
        """Return the value of an algorithm's own numeric option."""
        return float(self.options[option])

    def text(self, option: str) -> str:
        """Return the value of an algorithm's own text option."""
        return str(self.options[option])

    @classmethod
    def from_options(cls, options: Mapping[str, Value]) -> "TrainConfig":
        """Build the configuration from a process's options."""
        return cls(
            algorithm=str(options["algo"]),
            network=str(options["network"]),
            data=str(options["data"]),
            data_dir=str(options["data_dir"]),
            split=str(options["split"]),
            batch_size=int(options["batch_size"]),
            epochs=int(options["epochs"]),
            seed=int(options["seed"]),
            eval_every=int(options["eval_every"]),
            save_every=int(options["save_every"]),
            time_limit=float(options["time_limit"]),
            target_accuracy=float(options["target_accuracy"]),
            optimizer=str(options["optimizer"]),
            optimizer_on=str(options["optimizer_on"]),
            optimizer_params=_hyper_parameters(options),
            options=dict(options),
        )


def _hyper_parameters(options: Mapping[str, Value]) -> dict[str, float]:
    _, names = OPTIMIZERS[str(options["optimizer"])]
    params = {name: float(options[key]) for key, name in names.items() if options[key] or key != "dc_lambda"}
    return {"learning_rate": float(with_usual_rate(options)["lr"]), **params}


def cosine(rate: float, updates: float, warmup: float) -> tuple[str, dict[str, float | bool]]:
    """Return the schedule in which the learning rate rises to `rate` in the first `warmup` updates, and then falls
    along a cosine to a tenth: its name and numbers.
    """
    warmup = max(1.0, warmup)
    return "cosine", {
        "base_lr": rate, "base_lr_orig": rate, "final_lr": rate / 10, "warmup_steps": warmup, "warmup_begin_lr": 0.0,
        "warmup_final_lr": rate, "warmup_constant": False, "max_update": max(warmup + 1, updates),
    }  # fmt: skip
