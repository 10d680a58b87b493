"""Registers our store with `mx.kv.create("dist_sync")`."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from geomx_cli.core import plugins
from geomx_cli.core.errors import GeomxError, InvalidSettings
from geomx_cli.core.option import nearest
from geomx_cli.runtime.frontends.mxnet.iterator_place import observe_shuffles
from geomx_cli.runtime.frontends.mxnet.kvstore import KVStore
from geomx_cli.runtime.frontends.mxnet.state_advice import state_advice

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends import ScriptSession

__all__ = ["register"]

KINDS = (
    "dist", "dist_sync", "dist_async", "dist_device", "dist_sync_device", "dist_async_device", "dist_device_sync",
    "dist_device_async",
)  # fmt: skip


def register(mx: Any, session: "ScriptSession") -> None:
    """Make `mx.kv.create` return geomx's store for each of KINDS, one instance for each process.

    The session connects at the first call. As in MXNet, all types are synchronous except those with "_async". The
    master's type decides: "dist_async" turns an FSA job into a MixedSync job; "device" has no effect. Any other type
    with "dist" is rejected. "local", "device" and others remain MXNet's own.
    """
    _refuse_servers(mx)
    base = mx.kvstore.KVStoreBase
    own = {name: made for name, made in base.kv_registry.items() if "dist" not in name}
    made: list[KVStore] = []

    def create(kind: str) -> Any:
        if kind not in KINDS:
            raise mx.base.MXNetError(f"there is no kvstore type {kind!r} ({nearest(kind, KINDS)})")
        if not made:
            made.append(_make(mx, session, kind))
            session.store = made[0]
        return made[0]

    base.kv_registry = _Registry(create, own)
    _observe_trainers(mx.gluon.Trainer)
    observe_shuffles(mx.io.NDArrayIter)


class _Registry(dict[str, Callable[[], Any]]):
    """The lookup table of `mx.kv.create`. It contains every name with "dist", so MXNet handles none of them."""

    def __init__(self, create: Callable[[str], Any], own: dict[str, Callable[[], Any]]) -> None:
        super().__init__(own)
        self._create = create

    def __contains__(self, name: object) -> bool:
        return (isinstance(name, str) and "dist" in name) or super().__contains__(name)

    def __missing__(self, name: str) -> Callable[[], Any]:
        return functools.partial(self._create, name)


def _observe_trainers(trainer: Any) -> None:
    """Make trainers that update on the workers pass their optimizer to geomx's store. MXNet itself does not do this."""
    init = trainer._init_kvstore

    @functools.wraps(init)
    def init_and_show(self: Any) -> None:
        init(self)
        if isinstance(self._kvstore, KVStore) and not self._update_on_kvstore:
            self._kvstore.check_momentum(self._optimizer)

    trainer._init_kvstore = init_and_show


def _make(mx: Any, session: "ScriptSession", kind: str) -> KVStore:
    try:
        client = session.connect()
        algorithm = plugins.algorithms()[client.settings.text("algo")]
        _check_ranks(algorithm, client.settings.text("rank_scope"))
        if client.is_master and "_async" in kind and algorithm.asynchronous_on_request:
            client.control.train_asynchronously()
    except GeomxError as error:
        raise mx.base.MXNetError(str(error)) from None
    store_class = type("GeomxKVStore", (KVStore, mx.kvstore.KVStore), {})
    assert session.recovery is not None  # it has joined
    session.recovery.advice = lambda: state_advice(mx)
    store: KVStore = store_class(mx, client, kind, session.recovery)
    return store


def _check_ranks(algorithm: plugins.Algorithm, rank_scope: str) -> None:
    if rank_scope == "global" and algorithm.ranks_by_party:
        what = f"a script divides its weights by the workers of its party in {algorithm.name}"
        what += ", and GEOMX_RANK_SCOPE=global"
        raise InvalidSettings(f"{what} counts those of all", "leave GEOMX_RANK_SCOPE out")


# Rejects server profiling with a clear message, because MXNet's profiler cannot access geomx's servers.

_PROFILER_CALLS = ("set_config", "set_state", "dump", "pause", "resume")


def _refuse_servers(mx: Any) -> None:
    """Make `mx.profiler` raise MXNetError for profile_process="server"; MXNet's own message is about a null handle."""
    for name in _PROFILER_CALLS:
        call = getattr(mx.profiler, name)
        if not hasattr(call, "__wrapped__"):
            setattr(mx.profiler, name, _for_workers(mx, name, call))


def _for_workers(mx: Any, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if "server" in (kwargs.get("profile_process"), *args):
            raise mx.base.MXNetError(
                f"profiler.{name}: the servers are no MXNet processes and cannot be profiled (profile the workers, and"
                " see geomx status and geomx summarize for the servers)"
            )
        return call(*args, **kwargs)

    return checked
