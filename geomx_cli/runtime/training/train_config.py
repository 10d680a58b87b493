"""The configuration of the bundled training job, from the options."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from geomx_cli.core.options import Value

__all__ = ["USUAL_RATES", "TrainConfig"]

USUAL_RATES: Mapping[str, float] = {
    "sgd": 0.05, "nag": 0.05, "adam": 0.001, "adamw": 0.001, "rmsprop": 0.001, "adagrad": 0.01,
    "dcasgd": 0.05, "dcasgd-a": 0.05, "dcasgd-mxnet": 0.05,
}  # fmt: skip
"""Default learning rates by optimizer."""


@dataclass(frozen=True)
class TrainConfig:
    """See the options of the same names. `optimizer_params` are the hyper-parameters of `optimizer`, `options` all
    options by name.

    time_limit: seconds. eval_every, checkpoint_every: steps. For these, and for target_accuracy, 0 means never.
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
    checkpoint_every: int
    time_limit: float
    target_accuracy: float
    optimizer: str
    optimizer_on: str
    optimizer_params: dict[str, float] = field(default_factory=dict)
    options: Mapping[str, Value] = field(default_factory=dict)

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
            checkpoint_every=int(options["checkpoint_every"]),
            time_limit=float(options["time_limit"]),
            target_accuracy=float(options["target_accuracy"]),
            optimizer=str(options["optimizer"]),
            optimizer_on=str(options["optimizer_on"]),
            optimizer_params=_hyper_parameters(options),
            options=dict(options),
        )


def _hyper_parameters(options: Mapping[str, Value]) -> dict[str, float]:
    optimizer = str(options["optimizer"])
    compensated = optimizer.startswith("dcasgd")
    params = {"learning_rate": float(options["lr"]) or USUAL_RATES[optimizer]}
    if optimizer in ("sgd", "nag") or compensated:
        params["momentum"] = float(options["momentum"])
    if compensated and options["dc_lambda"]:
        params["lamda"] = float(options["dc_lambda"])
    if optimizer == "dcasgd-a":
        params["decay"] = float(options["dc_decay"])
    return params
