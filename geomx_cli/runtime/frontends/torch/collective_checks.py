"""Checks of the tensors that a script gives a collective operation."""

from collections.abc import Sequence
from typing import Any

from geomx_cli.core.errors import InvalidSettings

__all__ = ["check_parts", "check_whole"]


def check_parts(call: str, parts: Sequence[Any], size: int, workers: int) -> None:
    """Raise InvalidSettings unless there is a tensor of so many elements for each worker."""
    sizes = [part.numel() for part in parts]
    if sizes != [size] * workers:
        what = f"torch.distributed.{call} of a tensor of {size} elements, with a list of tensors of {sizes}"
        raise InvalidSettings(what, f"give a tensor of {size} elements for each of the {workers} workers")


def check_whole(call: str, whole: Any, size: int, kind: str) -> None:
    """Raise InvalidSettings unless the one tensor for all workers has so many elements."""
    if whole.numel() != size:
        what = f"torch.distributed.{call} with an {kind} of {whole.numel()} elements"
        raise InvalidSettings(what, f"it must have {size}, equally many for each worker")
