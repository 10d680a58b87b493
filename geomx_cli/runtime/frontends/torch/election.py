"""Which worker has the model that all get at the end."""

from typing import TYPE_CHECKING

from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.training.stop_vote import ELECTION, elect

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["elect_newest"]


def elect_newest(client: "Client", state: ModelState, *, is_newest: bool, has_failed: bool) -> int:
    """Return the highest global rank of the workers that contributed to the last round, if possible of those whose
    backward pass has not failed, and so which have taken the step. See `elect`.
    """
    workers = client.num_all_workers
    candidate = client.global_rank + (0 if has_failed else workers) if is_newest else None
    return elect(client, f"{state.prefix}{ELECTION}", candidate, 2 * workers) % workers
