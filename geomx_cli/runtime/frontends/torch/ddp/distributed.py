"""Makes torch.distributed use the job's servers, in scripts written for torchrun."""

import functools
import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch import load

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends import ScriptSession
    from geomx_cli.runtime.frontends.torch.ddp.group_store import GroupStore

__all__ = ["register"]

_ALL = (
    "under geomx launch a group has all workers or one, and a device mesh one dimension of more than one;"
    " to divide models within each party, launch with --reduce torch --shards N and use geomx_cli.torch.wrap"
)


def register(c10d: Any, session: "ScriptSession") -> None:
    """Replace init_process_group, new_group, monitored_barrier, broadcast_object_list and TCPStore in
    torch.distributed.distributed_c10d. This works before or after scripts can import them from torch.distributed. The
    replacements listen on no port. Rank and size are the job's.
    """
    groups = _Groups(c10d, session)
    for name in ("init_process_group", "new_group", "monitored_barrier", "broadcast_object_list"):
        original = getattr(c10d, name)
        _replace(c10d, name, original, _wrapped(getattr(groups, name), original))
    from torch._C._distributed_c10d import TCPStore

    from geomx_cli.runtime.frontends.torch.ddp.job_store import tcp_store

    _replace(c10d, "TCPStore", TCPStore, tcp_store(TCPStore, groups.join))


def register_saving(saver: Any, session: "ScriptSession") -> None:
    """Give torch.distributed.checkpoint.async_save a separate group. It saves in a thread while training continues, and
    the collectives of one group need one order. For the same reason a save also waits for the previous save.
    """
    original = saver.async_save
    groups: dict[object, Any] = {}
    latest: list[Any] = []

    @functools.wraps(original)
    def async_save(*args: Any, process_group: Any = None, no_dist: bool = False, **options: Any) -> Any:
        from geomx_cli.runtime.frontends.torch.ddp.group_store import GroupStore

        if process_group is not None or no_dist or not isinstance(session.store, GroupStore):
            return original(*args, process_group=process_group, no_dist=no_dist, **options)
        distributed = sys.modules["torch.distributed"]
        if (world := distributed.group.WORLD) not in groups:
            groups[world] = distributed.new_group()
        while latest:
            latest.pop().exception()
        saving = original(*args, process_group=groups[world], **options)
        latest.append(getattr(saving, "upload_completion", saving))
        return saving

    saver.async_save = async_save


def _replace(c10d: Any, name: str, original: Any, replacement: Any) -> None:
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("torch.distributed")]
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
        self._init, self._new, self._monitored = c10d.init_process_group, c10d.new_group, c10d.monitored_barrier
        self._broadcast_objects = c10d.broadcast_object_list
        self._store: GroupStore | None = None
        self._begun = 0

    def join(self) -> "GroupStore":
        """Join the job at the first call. Return the worker's part in the job."""
        if self._store is None:
            self._store = self._join()
        return self._store

    def init_process_group(
        self, backend: Any = None, _init_method: Any = None, timeout: Any = None, world_size: int = -1,
        rank: int = -1, *_: Any, **__: Any,
    ) -> None:  # fmt: skip
        """Make the default group of all training workers, whatever the backend. `geomx launch` has chosen their ranks.

        timeout: a timedelta that limits waits for the group's store. If it is longer than the job's patience, it also
            limits collective operations.

        Blocks until all processes of the job have joined. A `rank` and `world_size`, if given, must be the job's. Other
        arguments have no effect. Raises InvalidSettings for an algorithm whose workers do not take steps together, and
        GeomxError if the job has failed. Ends the process in a master worker that does not train.
        """
        from geomx_cli.runtime.frontends.torch.ddp.job_store import JobStore

        joined = self.join()
        ours = {"rank": joined.global_rank, "world_size": joined.num_all_workers}
        for name, given in (("rank", rank), ("world_size", world_size)):
            if given not in (-1, None, ours[name]):
                what = f"init_process_group({name}={given}), and in this job it is {ours[name]}"
                raise InvalidSettings(what, f"leave {name} out, or take it from the variable {name.upper()}")
        joined.be_patient(timeout)
        store = JobStore(joined, f"c10d/{self._begun}/")  # the same number in all workers
        self._begun += 1
        store.set_timeout(timeout or self._c10d.default_pg_timeout)
        self._init(_backend(self._c10d, joined), store=store, **ours)

    def new_group(self, ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any) -> Any:
        """Make a group of all workers, or of one worker, whatever the backend. Raises InvalidSettings for other groups.
        """
        if self._store is None:
            return self._new(ranks, timeout, backend, *args, **options)
        if ranks is not None and len(ranks) != 1 and sorted(ranks) != list(range(self._store.num_all_workers)):
            what = f"torch.distributed.new_group for the ranks {list(ranks)}"
            raise InvalidSettings(what, _ALL)
        self._store.be_patient(timeout)
        ranks = ranks if ranks is not None and len(ranks) == 1 else None
        return self._new(ranks, timeout, _backend(self._c10d, self._store), *args, **options)

    def monitored_barrier(self, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier with a `timeout`. If workers do not reach it in time, RuntimeError is raised in all workers that
        have reached it. In rank 0 the error names the missing workers: one of them, or all with `wait_all_ranks`.
        """
        if self._store is None:
            self._monitored(group, timeout, wait_all_ranks)
            return
        group = group or self._c10d.group.WORLD
        if group is not self._c10d.GroupMember.NON_GROUP_MEMBER:
            group.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    def broadcast_object_list(
        self, object_list: list[Any], src: Any = None, group: Any = None, *args: Any, **options: Any
    ) -> None:
        """Like PyTorch's. If an earlier life of this worker made this call, the source too gets the object given then.
        """
        own = group or self._c10d.group.WORLD
        source = options.get("group_src") if src is None else src  # the same, because groups have all workers or one
        if self._store is None or not getattr(getattr(own, "rounds", None), "repeats", False):
            self._broadcast_objects(object_list, src, group, *args, **options)
            return
        torch, is_source = sys.modules["torch"], own.rank() == (source or 0)
        content = pickle.dumps(object_list) if is_source else b""
        size = torch.tensor([len(content)], device="cpu")
        self._c10d.broadcast(size, source or 0, group=own)
        given = bytearray(content) if len(content) == int(size) else bytearray(int(size))
        whole = torch.frombuffer(given, dtype=torch.uint8)
        self._c10d.broadcast(whole, source or 0, group=own)
        if bytes(given) != content:
            # PyTorch unpickles here too. The same script has sent it, over authenticated links.
            object_list[:] = pickle.loads(given)

    def _join(self) -> "GroupStore":
        try:
            load.check_process("init_process_group")
        except InvalidSettings as error:
            self._session.abort(error)  # for the user, whatever the process that started this worker does with it
            raise
        if self._session.store is not None:
            what = "init_process_group after geomx_cli.torch.init: this worker has joined the job already"
            if self._c10d.is_initialized():  # by PartyGroup.publish
                raise InvalidSettings(what, "leave it out: init has made the group of the party's workers")
            raise InvalidSettings(what, "use either DistributedDataParallel, or geomx_cli.torch.wrap")
        from geomx_cli.runtime.frontends.torch.ddp.group_store import GroupStore

        self._session.attach()
        client = self._session.connect()
        self._session.store = store = GroupStore(client, self._session)
        load.leave_unless_training(client)
        about = plugins.algorithms()[str(store.option("algo"))]
        if about.asynchronous:
            what = f"torch.distributed with --algo {about.name}, whose parties train independently"
            hint = f"launch with --algo fsa, hfa, diloco or esync, or use geomx_cli.torch.wrap alone for {about.name}"
            raise InvalidSettings(what, hint)
        from geomx_cli.runtime.frontends.torch.data import follow_loaders
        from geomx_cli.runtime.frontends.torch.ddp import parallel as patches

        torch = sys.modules["torch"]
        parallel = torch.nn.parallel.DistributedDataParallel
        patches.refuse_join(parallel)
        if store.exchanges_gradients:
            follow_loaders(torch.utils.data.dataloader._BaseDataLoaderIter)
            patches.replace_buffer_broadcast(parallel, self._session)
            patches.replace_built_in_hooks(parallel)
            store.note_models(parallel)
        else:
            patches.keep_local(parallel, store)
        return store


def _backend(c10d: Any, store: "GroupStore") -> str:
    """Register geomx's backend, and return its name."""
    from geomx_cli.runtime.frontends.torch.ddp.process_group import NAME

    if NAME.upper() not in c10d.Backend._plugins:
        c10d.Backend.register_backend(NAME, store.new_group, devices=["cpu", "cuda"])
    return NAME
