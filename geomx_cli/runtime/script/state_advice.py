"""The lines that a script without saved training has to add, with the script's own variable names."""

import sys
from typing import Any

__all__ = ["StateAdvice"]

_MOST = 8  # objects
_RESERVED = ("batches", "epoch", "epochs", "resumed", "save")


class StateAdvice:
    """A hint about `state` of one front end.

    module: what scripts import, as "geomx_cli.torch".
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._objects: list[tuple[str, Any]] = []

    def add(self, usual: str, given: Any) -> None:
        """The script trains this object. usual: its keyword, if it has no name among the script's globals."""
        if len(self._objects) < _MOST:
            self._objects.append((usual, given))

    def text(self) -> str:
        """Return the hint, once the script has given names to all objects."""
        module = _name_of(sys.modules.get(self._module)) or self._module
        names = [(usual, _name_of(given)) for usual, given in self._objects]
        is_keyword = [name and not name.startswith("_") and name not in _RESERVED for _, name in names]
        objects = {
            name if fits else usual: name or usual for (usual, name), fits in zip(names, is_keyword, strict=True)
        }
        line = f"state = {module}.state({', '.join(f'{key}={name}' for key, name in objects.items())})"
        loops = "`for epoch in state.epochs(COUNT):` and `for batch in state.batches(LOADER):`"
        return f"to go on after such a death, a script needs `{line}`, {loops}; or see --on-worker-loss"


def _name_of(given: Any) -> str:
    """The name of an object among the script's globals; "" if it has none."""
    variables = vars(sys.modules["__main__"])
    return next((name for name, value in list(variables.items()) if value is given and name.isidentifier()), "")
