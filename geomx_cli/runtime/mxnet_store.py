"""MXNet, imported and prepared: its old numpy names, and our store for `mx.kv.create("dist_sync")`.

The only module that imports MXNet, and it does so when asked to.
"""

import functools
import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from geomx_cli.core.errors import GeomxError, InvalidSettings
from geomx_cli.runtime.kvstore import Store
from geomx_cli.runtime.mxnet_kvstore import MxnetStore
from geomx_cli.runtime.mxnet_optimizer import from_mxnet
from geomx_cli.runtime.mxnet_profiler import refuse_servers

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["MxnetStore", "from_mxnet", "load_mxnet", "prepare_import", "register"]

KINDS = (
    "dist", "dist_sync", "dist_async", "dist_device", "dist_sync_device", "dist_async_device", "dist_device_sync",
    "dist_device_async",
)  # fmt: skip
_ALIASES = {"bool": bool, "int": int, "float": float, "object": object, "complex": complex, "str": str}


def prepare_import() -> None:
    """What MXNet 1.9.1 needs before it is imported: the names that numpy 1.24 removed. And its engine gets one thread
    for our operations, which have to take Python's lock, so several would only wait for one another.
    """
    os.environ.setdefault("MXNET_CPU_PRIORITY_NTHREADS", "1")
    for name, kind in _ALIASES.items():
        if name not in vars(np):
            setattr(np, name, kind)


def load_mxnet() -> Any:
    """Import MXNet; returns the module. Raises InvalidSettings if it is not installed or cannot be imported."""
    prepare_import()
    try:
        return importlib.import_module("mxnet")
    except (ImportError, OSError, AttributeError) as error:
        raise InvalidSettings(f"cannot import mxnet: {error}", "pip install 'geomx-cli[mxnet]'") from error


def register(mx: Any, client_factory: "Callable[[], Client]") -> None:
    """Have `mx.kv.create` give our store for each of KINDS, one and the same per process.

    The client is made at the first call. As in MXNet all are synchronous but those with "_async". The master's type
    decides: "dist_async" makes a job that is to train with FSA one of MixedSync; "device" means nothing. Any other type
    with "dist" in it is refused; "local", "device" and others stay MXNet's own. Registering again replaces the factory.
    """
    refuse_servers(mx)
    base = mx.kvstore.KVStoreBase
    own = {name: made for name, made in base.kv_registry.items() if "dist" not in name}
    made: list[Any] = []

    def create(kind: str) -> Any:
        if kind not in KINDS:
            raise mx.base.MXNetError(f"there is no kvstore type {kind!r} (choose one of {', '.join(KINDS)})")
        if not made:
            made.append(_make(mx, client_factory, kind))
        return made[0]

    base.kv_registry = _Registry(create, own)


class _Registry(dict[str, Callable[[], Any]]):
    """What `mx.kv.create` looks names up in; it has every name with "dist", so none of them is left to MXNet."""

    def __init__(self, create: Callable[[str], Any], own: dict[str, Callable[[], Any]]) -> None:
        super().__init__(own)
        self._create = create

    def __contains__(self, name: object) -> bool:
        return (isinstance(name, str) and "dist" in name) or super().__contains__(name)

    def __missing__(self, name: str) -> Callable[[], Any]:
        return functools.partial(self._create, name)


def _make(mx: Any, client_factory: "Callable[[], Client]", kind: str) -> Any:
    try:
        client = client_factory()
        if client.is_master and "_async" in kind and client.settings.text("algo") == "fsa":
            client.tell("mode", {"asynchronous": True}, "train parties asynchronously")
    except GeomxError as error:
        raise mx.base.MXNetError(str(error)) from None
    store_class = type("GeomxKVStore", (MxnetStore, mx.kvstore.KVStore), {})
    return store_class(mx, Store(client, kind))
