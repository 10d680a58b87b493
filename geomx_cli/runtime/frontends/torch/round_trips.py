"""Warns of collectives that frameworks make by default and could do without: between sites each is a round trip."""

import sys
from collections import Counter
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends import ScriptSession

__all__ = ["RoundTrips"]

_ENOUGH = 10
"""Calls from one place after which there is a warning."""
_LOOKED_AT = 2000
"""Calls of a script whose places are looked for: what happens often happens among them."""


@dataclass(frozen=True)
class _Place:
    """A framework's function in whose calls collectives are avoidable, and the warning."""

    module: str
    function: str
    warning: str


_PLACES = (
    _Place(
        "transformers.trainer", "_get_num_items_in_batch",
        "HF's Trainer counts the tokens of all workers before every step, a round trip between the sites each; if"
        " their batches have about as many, spare it with TrainingArguments(average_tokens_across_devices=False)",
    ),
    _Place(
        "transformers.trainer", "_track_num_input_tokens",
        "HF's Trainer counts the input tokens of all workers in every step, a round trip between the sites each; spare"
        ' it with TrainingArguments(include_num_input_tokens_seen="no")',
    ),
    _Place(
        "transformers.trainer", "evaluation_loop",
        "HF's Trainer gathers the predictions of all workers after each batch of an evaluation, 5 round trips or more"
        " between the sites; take a larger per_device_eval_batch_size, or without compute_metrics"
        " prediction_loss_only=True, which leaves one",
    ),
    _Place(
        "accelerate.data_loader", "_fetch_batches",
        "Accelerate reads an iterable data set in the first worker and sends its batches to the others, over the WAN;"
        " let each worker read its part, with dispatch_batches=False (of Accelerator's DataLoaderConfiguration, or of"
        " TrainingArguments' accelerator_config)",
    ),
    _Place(
        "lightning.pytorch.loops.training_epoch_loop", "_broadcast_sigterm_tensor",
        "Lightning asks the first worker before every batch whether it was told to end, a round trip between the sites"
        " each; spare it with Trainer(strategy=geomx.lightning.Strategy()), or geomx.lightning.Callback()",
    ),
    _Place(
        "lightning.pytorch.callbacks.timer", "_check_time_remaining",
        "Lightning asks the first worker after every batch whether max_time is over, a round trip between the sites"
        ' each; ask once in an epoch, with the callback Timer(duration, interval="epoch"), or give max_steps',
    ),
    _Place(
        "lightning.pytorch.trainer.connectors.logger_connector.result", "update",
        "Lightning reduces a value that is logged in every step, a round trip between the sites each; log it with"
        " sync_dist=False, or on_step=False, which reduces it once in an epoch",
    ),
)  # fmt: skip


class RoundTrips:
    """Counts a script's collectives by the framework's function that makes them, and warns once for each."""

    def __init__(self, session: "ScriptSession", *, warns: bool) -> None:
        self._session = session
        self._left = _LOOKED_AT if warns else 0
        self._counts: Counter[_Place] = Counter()

    def count(self) -> None:
        """Note a collective that the caller's caller begins, outside of a backward pass."""
        if not self._left:
            return
        self._left -= 1
        if (place := _place(sys._getframe(1))) is not None:
            self._counts[place] += 1
            if self._counts[place] == _ENOUGH:
                self._session.warn(place.warning)


def _place(frame: FrameType | None) -> _Place | None:
    """The innermost known function on the stack."""
    while frame is not None:
        for place in _PLACES:
            if frame.f_code.co_name == place.function and frame.f_globals.get("__name__") == place.module:
                return place
        frame = frame.f_back
    return None
