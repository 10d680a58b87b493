"""Imports PyTorch, lazily: other modules of this package import it at their top."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from geomx_cli.core.errors import InvalidSettings

if TYPE_CHECKING:
    from geomx_cli.runtime.base_store import BaseStore
    from geomx_cli.runtime.frontends import ScriptStore
    from geomx_cli.runtime.frontends.torch.store import Store
    from geomx_cli.runtime.script import Session

__all__ = ["leave_unless_training", "load_torch", "new_store", "store_of"]

_MASTER_ENDS = "this master worker does not train, and ends here; the worker of global rank 0 sets the weights"


def load_torch() -> Any:
    """Import and return PyTorch. Raises InvalidSettings if it is not installed or cannot be imported."""
    try:
        return importlib.import_module("torch")
    except (ImportError, OSError) as error:
        raise InvalidSettings(f"cannot import torch: {error}", "pip install 'geomx-cli[torch]'") from error


def new_store(session: "Session") -> "Store":
    """Join the job. Raises InvalidSettings without PyTorch, and GeomxError if the job has failed."""
    load_torch()
    from geomx_cli.runtime.frontends.torch.store import Store

    session.attach()
    store = session.store = Store(session.connect())
    leave_unless_training(store)
    return store


def leave_unless_training(store: "BaseStore") -> None:
    """End the process with status 0 in a master worker that does not train."""
    if not store.trains:
        print(_MASTER_ENDS, file=sys.stderr, flush=True)
        raise SystemExit(0)


def store_of(session: "Session") -> "Store | None":
    """The script's store; None before it has joined the job."""
    if session.store is None:
        return None
    from geomx_cli.runtime.frontends.torch.store import Store

    store: ScriptStore = session.store
    return store if isinstance(store, Store) else None
