"""Imports PyTorch, lazily: other modules of this package import it at their top."""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from geomx_cli.core.errors import InvalidSettings

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.frontends.torch.store import Store
    from geomx_cli.runtime.script import Session
    from geomx_cli.runtime.script.base_store import ScriptStore

__all__ = ["check_process", "joined", "leave_unless_training", "load_torch", "new_store"]

_LAUNCH = (
    "geomx launch -- python train.py starts a process for each worker, as torchrun does: start none in the script; what"
    ' processes that import it are not to do belongs under if __name__ == "__main__"'
)
_MASTER_ENDS = "this master worker does not train, and ends here; the worker of global rank 0 sets the weights"


def check_process(call: str) -> None:
    """Raise InvalidSettings in any process but the worker's own, such as a DataLoader's: it is no member of the job."""
    data = sys.modules.get("torch.utils.data")
    if data is not None and (loader := data.get_worker_info()) is not None:
        what = f"{call} in worker process {loader.id} of a DataLoader, which is no worker of the job"
        raise InvalidSettings(what, "call it in the script before the loader begins, and give the data set the rank")
    if os.environ.get("GEOMX_SCRIPT_PROCESS", str(os.getpid())) != str(os.getpid()):
        raise InvalidSettings(f"{call} in a process that the script has started", _LAUNCH)


def load_torch() -> Any:
    """Import and return PyTorch. Raises InvalidSettings if it is not installed or cannot be imported."""
    try:
        return importlib.import_module("torch")
    except (ImportError, OSError) as error:
        raise InvalidSettings(f"cannot import torch: {error}", "pip install 'geomx-cli[torch]'") from error


def new_store(session: "Session") -> "Store":
    """Join the job. Raises InvalidSettings without PyTorch, and GeomxError if the job has failed."""
    load_torch()
    from geomx_cli.runtime.frontends.torch.party_reduction import PartyReduction
    from geomx_cli.runtime.frontends.torch.reduction import Reduction
    from geomx_cli.runtime.frontends.torch.shard_reduction import ShardReduction
    from geomx_cli.runtime.frontends.torch.store import Store

    session.attach()
    settings = session.settings
    if settings.group_size:
        made = ShardReduction if settings.number("shards") > 1 else PartyReduction
        store = session.store = Store(session, made(session, settings))
        return store
    client = session.connect()
    store = session.store = Store(session, Reduction(client, session))
    leave_unless_training(client)
    return store


def leave_unless_training(client: "Client") -> None:
    """End the process with status 0 in a master worker that does not train."""
    if not client.trains:
        print(_MASTER_ENDS, file=sys.stderr, flush=True)
        raise SystemExit(0)


def joined(session: "Session") -> "Store":
    """The script's store. Raises InvalidSettings before it has joined the job."""
    if session.store is not None:
        from geomx_cli.runtime.frontends.torch.store import Store

        store: ScriptStore = session.store
        if isinstance(store, Store):
            return store
    raise InvalidSettings("this worker has not joined the job", "call geomx_cli.torch.init first")
