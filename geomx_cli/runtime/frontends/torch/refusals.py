"""Operations of process groups that this one does not have."""

from collections.abc import Sequence
from typing import Any, NoReturn

from geomx_cli.core.errors import InvalidSettings

__all__ = ["Refusals", "check_parts", "check_whole"]

# Checks of the tensors that a script gives a collective operation.


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


class Refusals:
    """Each raises InvalidSettings, with its name."""

    def send(self, *_: Any) -> NoReturn:
        """Between two workers."""
        _refuse("send", "use broadcast or all_gather")

    def recv(self, *_: Any) -> NoReturn:
        """Between two workers."""
        _refuse("recv", "use broadcast or all_gather")

    recv_anysource = recv

    def split_group(self, *_: Any, **__: Any) -> NoReturn:
        """A group of some of the workers."""
        _refuse("split_group", "use the group of all workers")

    merge_remote_group = split_group


def _refuse(name: str, hint: str) -> NoReturn:
    raise InvalidSettings(f"torch.distributed.{name} is not supported under geomx launch", hint)
