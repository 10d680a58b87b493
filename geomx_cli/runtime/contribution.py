"""Whether a script's worker has contributed to the training, and the warning of one that has trained without others."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from geomx_cli.core.events import Contribution
    from geomx_cli.ps.client import Client

__all__ = ["of"]

_ALONE = (
    "this worker has contributed to no round: what it has trained, it has trained alone; push gradients (or, in hfa,"
    " weights)"
)
_IN_PARTY = (
    "this worker has exchanged with its own party only: its script ended before the first exchange between parties,"
    " which in hfa is after K1 x K2 steps"
)


def of(client: "Client", *, trained: bool) -> "Contribution":
    """Return what a script's worker has contributed at its end, and warn on stderr if it has trained alone, or with its
    party only.

    trained: whether the script has reported training. See ProcessFinished for the values; "" for a master that does
    not train. Call before the client leaves.
    """
    tensors = list(client.tensors.values())
    if not client.trains:
        return ""
    if not tensors and not trained:  # it may have trained, as with a Trainer without the store, or only asked for ranks
        return "keyless"
    begun = [tensor.placement.tensor.name for tensor in tensors if tensor.round]
    if begun and all(client.versions(name)[1] == 0 for name in begun):  # no update at the roots
        print(f"warning: {_IN_PARTY}", file=sys.stderr, flush=True)
        return "party"
    if begun:
        return "rounds"
    pulls = max((tensor.pulls for tensor in tensors), default=0)
    if trained or not pulls:
        print(f"warning: {_ALONE}", file=sys.stderr, flush=True)  # launch warns once, for all workers
        return "alone"
    return "reads" if pulls > 1 else "none"
