"""Makes torch.distributed use the job's servers, in scripts written for torchrun."""

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch import load

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends import ScriptSession
    from geomx_cli.runtime.frontends.torch.group_store import GroupStore

__all__ = ["register"]

_ALGORITHMS = ("fsa", "sync")
_ALL = (
    "under geomx launch a group has all workers, and a device mesh one dimension;"
    " to divide models within each party, launch with --reduce torch --shards N and use geomx_cli.torch.wrap"
)


def register(c10d: Any, session: "ScriptSession") -> None:
    """Replace init_process_group and new_group in torch.distributed.distributed_c10d, before or after scripts can
    import them from torch.distributed. Neither listens on a port: rank and size are those of the job.
    """
    groups = _Groups(c10d, session)
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("torch.distributed")]
    for name in ("init_process_group", "new_group"):
        original = getattr(c10d, name)
        replacement = _wrapped(getattr(groups, name), original)
        for module in (c10d, *modules):
            if getattr(module, "__dict__", {}).get(name) is original:  # None blocks an import
                setattr(module, name, replacement)


def _wrapped(method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **options: Any) -> Any:
        return method(*args, **options)

    return replacement


class _Groups:
    """The replaced functions; the first call joins the job."""

    def __init__(self, c10d: Any, session: "ScriptSession") -> None:
        self._c10d = c10d
        self._session = session
        self._init, self._new = c10d.init_process_group, c10d.new_group
        self._store: GroupStore | None = None

    def init_process_group(
        self, backend: Any = None, _init_method: Any = None, _timeout: Any = None, world_size: int = -1,
        rank: int = -1, *_: Any, **__: Any,
    ) -> None:  # fmt: skip
        """Make the default group of all training workers, whatever the backend; `geomx launch` has chosen their ranks.

        Blocks until all processes of the job have joined. A `rank` and `world_size`, if given, must be the job's; other
        arguments have no effect. Raises InvalidSettings for an algorithm that does not exchange gradients, and
        GeomxError if the job has failed. Ends the process in a master worker that does not train.
        """
        if self._store is None:
            self._store = self._join()
        ours = {"rank": self._store.global_rank, "world_size": self._store.num_all_workers}
        for name, given in (("rank", rank), ("world_size", world_size)):
            if given not in (-1, None, ours[name]):
                what = f"init_process_group({name}={given}), and in this job it is {ours[name]}"
                raise InvalidSettings(what, f"leave {name} out, or take it from the variable {name.upper()}")
        local = sys.modules["torch.distributed"].HashStore()  # nothing goes through it to other processes
        self._init(_backend(self._c10d, self._store), store=local, **ours)

    def new_group(self, ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any) -> Any:
        """Make a group of all workers, whatever the backend. Raises InvalidSettings for one of fewer."""
        if self._store is None:
            return self._new(ranks, timeout, backend, *args, **options)
        if ranks is not None and sorted(ranks) != list(range(self._store.num_all_workers)):
            what = f"torch.distributed.new_group for the ranks {list(ranks)}"
            raise InvalidSettings(what, _ALL)
        return self._new(None, timeout, _backend(self._c10d, self._store), *args, **options)

    def _join(self) -> "GroupStore":
        load.check_process("init_process_group")
        if self._session.store is not None:
            what = "init_process_group after geomx_cli.torch.init: this worker has joined the job already"
            if self._c10d.is_initialized():  # by PartyGroup.publish
                raise InvalidSettings(what, "leave it out: init has made the group of the party's workers")
            raise InvalidSettings(what, "use either DistributedDataParallel, or geomx_cli.torch.wrap")
        from geomx_cli.runtime.frontends.torch.group_store import GroupStore

        self._session.attach()
        store = GroupStore(self._session.connect(), self._session)
        self._session.store = store
        load.leave_unless_training(store)
        if (algorithm := str(store.option("algo"))) not in _ALGORITHMS:
            what = f"DistributedDataParallel exchanges gradients, and --algo {algorithm} does not"
            hint = f"launch with --algo fsa, or use geomx_cli.torch.wrap, which takes part in {algorithm}"
            raise InvalidSettings(what, hint)
        from geomx_cli.runtime.frontends.torch.buffer_broadcast import refuse_join, replace_buffer_broadcast

        parallel = sys.modules["torch"].nn.parallel.DistributedDataParallel
        replace_buffer_broadcast(parallel, self._session)
        refuse_join(parallel)
        store.note_models(parallel)
        return store


def _backend(c10d: Any, store: "GroupStore") -> str:
    """Register our backend, and return its name."""
    from geomx_cli.runtime.frontends.torch.process_group import NAME

    if NAME.upper() not in c10d.Backend._plugins:
        c10d.Backend.register_backend(NAME, lambda *_: store.new_group(), devices=["cpu", "cuda"])
    return NAME
