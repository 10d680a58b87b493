"""Operations of process groups that this one does not have."""

from typing import Any, NoReturn

from geomx_cli.core.errors import InvalidSettings

__all__ = ["Refusals"]


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
