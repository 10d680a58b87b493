"""The part in the job of a script that uses torch.distributed."""

import functools
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.cluster.bodies import MAX_PATIENCE
from geomx_cli.runtime.frontends.torch.checks import GradientCheck
from geomx_cli.runtime.frontends.torch.ddp.group_rounds import PREFIX, GroupRounds, LoneRounds
from geomx_cli.runtime.frontends.torch.ddp.made_calls import SkippedBatches
from geomx_cli.runtime.frontends.torch.ddp.parallel import refuse_synchronised
from geomx_cli.runtime.frontends.torch.ddp.process_group import GeomxProcessGroup
from geomx_cli.runtime.frontends.torch.model_watch import Compared, comparable
from geomx_cli.runtime.frontends.torch.reduction import Reduction
from geomx_cli.runtime.frontends.torch.store import Store
from geomx_cli.runtime.frontends.torch.tensors import is_divided
from geomx_cli.runtime.training.worker_algorithm import State

if TYPE_CHECKING:
    from concurrent.futures import Future

    from geomx_cli.ps.client import Client
    from geomx_cli.ps.control_client import ControlClient
    from geomx_cli.runtime.frontends import ScriptSession

__all__ = ["GroupStore"]

_ADVICE = (
    "no worker can go on in the middle of DistributedDataParallel's collective operations. Let the script save and load"
    " a snapshot of its own, as under torchrun, and launch it with --on-worker-loss restart-all; with local steps"
    " (--algo hfa, diloco or esync) geomx starts a killed worker of HF's Trainer or Lightning again"
)


class GroupStore(Store):
    """See ScriptStore. All of the script's process groups share one client. If the algorithm exchanges gradients,
    DistributedDataParallel exchanges them. If it exchanges weights, the optimizers that the script wraps exchange them.
    """

    def __init__(self, client: "Client", session: "ScriptSession") -> None:
        """Raises InvalidSettings in a job that is to continue without a worker that dies."""
        if client.settings.text("on_worker_loss") == "leave":
            what = "--on-worker-loss leave: this script makes a process group, which needs all workers"
            raise InvalidSettings(what, "use --on-worker-loss restart-all, or leave it out: then the job ends")
        super().__init__(session, Reduction(client, session))
        self._client = client
        self._thread = threading.get_ident()  # the thread that trains
        self._taking_part = threading.Lock()  # autograd has a thread for each GPU
        self._groups: list[GeomxProcessGroup] = []  # of all workers
        self._saved: list[Any] = []  # their states in an earlier life
        self._models: list[weakref.ref[Any]] = []
        self._trained: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._encodes = any(client.settings.text(name) not in ("", "none") for name in ("compress", "compress_lan"))
        if self.exchanges_gradients:
            self.recovery.advice = lambda: _ADVICE
        else:
            self.recovery.keep_results(client, PREFIX)

    @property
    def collectives(self) -> int:
        """See Store."""
        return sum(group.calls for group in self._groups)

    def kept(self) -> State:
        """See Store."""
        state = super().kept()
        state.values["groups"] = [group.state() for group in self._groups]
        return state

    def go_on(self, state: State) -> None:
        """See Store."""
        super().go_on(state)
        self._saved = state.values["groups"]
        for group, saved in zip(self._groups, self._saved, strict=False):
            group.load(saved)

    @property
    def control(self) -> "ControlClient":
        """The client's requests other than rounds."""
        return self._client.control

    @property
    def failure(self) -> BaseException | None:
        """See ScriptStore."""
        differences = (group.rounds.difference for group in self._groups)
        return next((error for error in differences if error is not None), self._client.failure)

    @property
    def calls(self) -> int:
        """See ScriptStore. Counts elements that the script has given to collective operations, and rounds of
        optimizers.
        """
        return super().calls + self._exchanged

    @property
    def steps(self) -> int:
        """See ScriptStore. All workers make the same collective operations."""
        return super().steps + self._exchanged

    @property
    def _exchanged(self) -> int:
        return sum(group.exchanged for group in self._groups)

    def be_patient(self, timeout: timedelta | None) -> None:
        """Let collective operations take as long without progress as the script allows, if this is longer than the
        job's limit.
        """
        if timeout is not None:
            self._client.control.be_patient(min(timeout.total_seconds(), MAX_PATIENCE))

    def new_group(self, store: Any, _rank: int, size: int, *_: Any) -> GeomxProcessGroup:
        """A process group of `size` workers: all workers, which make the same operations in the same order, or only
        this one.

        store: a store for the group's values.
        """
        if size == 1 and self._client.num_all_workers > 1:
            return GeomxProcessGroup(LoneRounds(), self._session, store, encodes=False)
        batches = SkippedBatches(self._session, self._client.global_rank)
        repeats = not self.exchanges_gradients and self.recovery.saves
        rounds = GroupRounds(self._client, len(self._groups), batches, self.while_waiting, repeats=repeats)
        adds = self.exchanges_gradients
        finite = GradientCheck(self._reduction.warn, self._trained) if adds else None
        group = GeomxProcessGroup(rounds, self._session, store, encodes=self._encodes, adds=adds, finite=finite)
        self._groups.append(group)
        if len(self._groups) <= len(self._saved):
            group.load(self._saved[len(self._groups) - 1])
        return group

    def wrap(self, model: Any, optimizer: Any, buffers: str) -> None:
        """See Store. If the algorithm exchanges gradients, DistributedDataParallel exchanges them, and this function
        has no effect. Raises InvalidSettings for a model without DistributedDataParallel.
        """
        if not self.exchanges_gradients:
            refuse_synchronised(model, str(self.option("algo")))
            super().wrap(model, optimizer, buffers)
        elif not any(isinstance(item, DistributedDataParallel) for item in model.modules()):
            what = "geomx_cli.torch.wrap of a model without DistributedDataParallel, beside init_process_group"
            raise InvalidSettings(what, "wrap what DistributedDataParallel returns; or leave init_process_group out")

    def wrap_for_loop(self, model: Any, optimizer: Any, buffers: str) -> None:
        """See Store. A process group cannot continue from the middle."""
        self.wrap(model, optimizer, buffers)

    def while_waiting(self, other: "Future[Any]") -> None:
        """Called while the script waits for the other workers, as in a collective operation, until `other` is done.

        Hooks of a backward pass may run in autograd's threads, for which the training thread waits. Other threads have
        no part in the rounds.
        """
        stands_in = torch._C._current_graph_task_id() != -1
        if self.finished or not (stands_in or threading.get_ident() == self._thread):
            return
        with self._taking_part:
            for item in self._wrapped:
                item.while_waiting(other)

    @property
    def passes(self) -> int:
        """See Watchable. A step may follow a pass within no_sync, as in local SGD."""
        return sum(group.passes for group in self._groups)

    def note_models(self, parallel: Any) -> None:
        """Note the models that DistributedDataParallel (the class `parallel`) wraps from now on."""
        original = parallel.__init__

        @functools.wraps(original)
        def build(model: Any, *args: Any, **options: Any) -> None:
            original(model, *args, **options)
            number = f"{len(self._models)}/" if self._models else ""
            self._models.append(weakref.ref(model))
            own = (item for item in model.module.named_parameters() if item[1].requires_grad)
            self._trained.update({f"{number}{name}": tensor for name, tensor in own})

        parallel.__init__ = build

    def updates_common(self, optimizer: Any) -> bool:
        """See Store. Includes parameters of DistributedDataParallel, if gradients are exchanged."""
        common = {id(tensor) for tensor in self._trained.values()}
        updated = (item for group in optimizer.param_groups for item in group["params"])
        return super().updates_common(optimizer) or any(id(item) in common for item in updated)

    def compared(self, optimizer: Any) -> Sequence[Compared]:
        """See Watchable. The parameters of DistributedDataParallel. Includes parameters that are not exchanged because
        they were frozen when it was built.
        """
        if not self.exchanges_gradients:
            return super().compared(optimizer)
        updated = {id(item) for group in optimizer.param_groups for item in group["params"]}
        found: dict[str, Any] = {}
        for number, model in enumerate(filter(None, (reference() for reference in self._models))):
            if not self._is_together(model):
                continue
            own = comparable(model.module, dict(model.module.named_parameters()))
            for name, tensor in own.items():
                if id(tensor) in updated and name not in model.parameters_to_ignore and _is_whole(tensor):
                    updated.discard(id(tensor))
                    found[f"{number}/{name}" if name in found else name] = tensor
        return (Compared(self._reduction.compare, "", self.num_all_workers, found),) if found else ()

    def _is_together(self, model: Any) -> bool:
        """Whether all workers exchange the gradients of a DistributedDataParallel. If its last pass exchanged only for
        synchronised layers, that pass was within no_sync, as in local SGD.
        """
        group = model.process_group
        if not isinstance(group, GeomxProcessGroup) or group.size() != self.num_all_workers:
            return False
        return model.require_forward_param_sync or not any(
            isinstance(layer, torch.nn.SyncBatchNorm) for layer in model.modules()
        )

    def wait_for_operations(self) -> None:
        """See ScriptStore."""
        super().wait_for_operations()
        for group in self._groups:
            group.finish()
        self._client.await_rounds()
        rounds = [group.rounds for group in self._groups if isinstance(group.rounds, GroupRounds)]
        for told in [each.made.leave_behind() for each in rounds]:
            told.result()


def _is_whole(tensor: Any) -> bool:
    return not is_divided(tensor) and tensor.is_floating_point() and tensor.numel() > 0 and not tensor.is_meta
