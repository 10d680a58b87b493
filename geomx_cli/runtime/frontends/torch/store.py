"""A PyTorch script's part in the job: the optimizers that it has wrapped, and their end."""

import contextlib
import weakref
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.base_store import BaseStore
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.synchronise import synchronise
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["Store"]


class Store(BaseStore):
    """See ScriptStore. For the training thread."""

    def __init__(self, client: "Client") -> None:
        super().__init__(client, "torch")
        self._wrapped: list[Synchroniser] = []
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._finished = False

    @property
    def failure(self) -> BaseException | None:
        """See ScriptStore."""
        return self._client.failure

    @property
    def calls(self) -> int:
        """See ScriptStore; the rounds that the script has begun."""
        return sum(item.rounds for item in self._wrapped)

    @property
    def wraps(self) -> bool:
        """Whether an optimizer is wrapped: then its steps may be local ones."""
        return bool(self._wrapped)

    def wrap(self, model: Any, optimizer: Any, buffers: str) -> None:
        """See geomx_cli.torch.wrap."""
        if self._finished:
            raise InvalidSettings("this worker has finished", "wrap all optimizers before geomx.finish")
        if optimizer in self._optimizers:
            raise InvalidSettings("this optimizer is wrapped already", "wrap each optimizer once")
        prefix = f"{len(self._wrapped) + 1}/" if self._wrapped else ""
        state = ModelState(model, optimizer, prefix)
        self._wrapped.append(synchronise(self._client, state, model, optimizer, buffers))
        self._optimizers.add(optimizer)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """See geomx_cli.torch.no_sync."""
        before = [item.accumulating for item in self._wrapped]
        for item in self._wrapped:
            item.accumulating = True
        try:
            yield
        finally:
            for item, accumulating in zip(self._wrapped, before, strict=True):
                item.accumulating = accumulating

    def settle(self) -> None:
        """See geomx_cli.torch.finish, and ScriptStore."""
        if self._finished:
            return
        self._finished = True
        waiting: dict[Future[None], Iterator[Future[None]]] = {}
        ready = [item.finishing() for item in self._wrapped]
        while ready or waiting:
            for each in ready:
                if (future := next(each, None)) is not None:
                    waiting[future] = each
            ready = [waiting.pop(future) for future in wait(waiting, return_when=FIRST_COMPLETED).done]
        for item in self._wrapped:
            item.conclude()
