"""Warns of elements that are not finite, which exchanges spread to all workers."""

import sys
from typing import TYPE_CHECKING, Any

from geomx_cli.core.events import WarningRaised

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["is_finite", "warn_not_finite"]


def is_finite(tensor: Any) -> bool:
    """Whether all elements of a detached tensor are finite."""
    # A sum takes one pass and no memory, but may overflow where all elements are finite.
    return bool(tensor.sum().isfinite() or tensor.isfinite().all())


def warn_not_finite(client: "Client", where: str, what: str) -> None:
    """Warn the user that elements `where` spoil `what` all workers train with."""
    message = f"{where}, so {what} have them from now on; is the learning rate too high, or a sample damaged?"
    print(f"warning: {message}", file=sys.stderr, flush=True)
    client.events.write(WarningRaised(message=message, affects_result=True))
