"""Gradients that scripts must leave alone while they are exchanged."""

from typing import Any

from geomx_cli.core.errors import InvalidSettings

__all__ = ["SentGradient"]


class SentGradient:
    """The gradient of a tensor as it was sent, which stays as it is until the mean takes its place."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self._version = tensor._version  # of a DTensor its own: that of its shard tells nothing of changes through it

    def check(self, key: str, present: Any) -> None:
        """Raise InvalidSettings if `present`, the tensor's gradient now, is another, or has been changed in place. A
        change through its `data` is not seen: that has no version, and a comparison would need a copy.
        """
        if present is not self.tensor or present._version != self._version:
            what = f"the gradient of {key} was changed while it was exchanged"
            hint = "register the script's own gradient hooks before wrap, or change gradients after backward"
            raise InvalidSettings(what, hint)
