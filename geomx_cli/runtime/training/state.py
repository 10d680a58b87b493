"""The state of training as data: named arrays and JSON values, that any file or message can hold.

It imports numpy only to convert, as the control machine loads algorithms without it.
"""

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array

__all__ = ["State"]

_VALUES = "values"


@dataclass(slots=True)
class State:
    """What one object keeps. `load` of a new object with the same configuration continues from it, bit for bit.

    values: what JSON has; floats may be infinite or NaN.
    arrays: by name. They may be the object's own memory: read them before it goes on.
    """

    values: dict[str, Any] = field(default_factory=dict)
    arrays: "dict[str, Array]" = field(default_factory=dict)

    def add(self, name: str, part: "State") -> None:
        """Include the state of a part of the object, under a name of its own."""
        self.values[name] = part.values
        self.arrays |= {f"{name}/{key}": array for key, array in part.arrays.items()}

    def part(self, name: str) -> "State":
        """Return what `add` included."""
        return State(self.values[name], self.named(name))

    def named(self, name: str) -> "dict[str, Array]":
        """Return the arrays NAME/KEY by KEY."""
        start = f"{name}/"
        return {key.removeprefix(start): array for key, array in self.arrays.items() if key.startswith(start)}

    def to_bytes(self) -> bytes:
        """Return all as one safetensors file."""
        import numpy as np
        from safetensors.numpy import save

        values = np.frombuffer(json.dumps(self.values).encode(), np.uint8)
        arrays = {f"arrays/{key}": np.ascontiguousarray(array) for key, array in self.arrays.items()}
        return save({_VALUES: values, **arrays})

    @classmethod
    def from_bytes(cls, content: bytes) -> "State":
        """Return the state of which `to_bytes` made this content."""
        from safetensors.numpy import load

        state = cls(arrays=load(content))
        values: dict[str, Any] = json.loads(state.arrays[_VALUES].tobytes())
        return cls(values, state.named("arrays"))
