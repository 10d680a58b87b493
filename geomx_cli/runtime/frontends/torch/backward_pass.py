"""The backward pass in progress, in which several wrapped optimizers may get gradients."""

import sys
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from geomx_cli.core.errors import InvalidSettings

__all__ = ["BackwardPass", "Participant", "call_at_end", "check_no_pass", "current_pass"]


class Participant(Protocol):
    """An optimizer's part in the end of a backward pass."""

    def contribute_rest(self) -> None:
        """Begin all exchanges of the round that have not begun."""

    def receive(self) -> None:
        """Wait for the round's results."""


def current_pass(begun: int | None) -> int:
    """The number of the backward pass in progress in this thread. Raises InvalidSettings if `begun`, the one whose
    results are still waited for, is another.
    """
    current: int = torch._C._current_graph_task_id()
    if begun not in (None, current):
        what = "a backward pass began before the gradients of the one before it had been exchanged"
        hint = "a pass that has failed cannot be repeated; checkpoint activations with use_reentrant=False"
        raise InvalidSettings(what, hint)
    return current


def call_at_end(callback: Callable[[], None]) -> None:
    """Have autograd call this at the end of the backward pass in progress. Raises InvalidSettings under compiled
    autograd, which would never call it.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled, "in_compiled_autograd_region", False):
        what = "compiled autograd (torch._dynamo.config.compiled_autograd) does not tell when a backward pass has ended"
        raise InvalidSettings(f"{what}, so its gradients cannot be exchanged", "leave it off; torch.compile may stay")
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def check_no_pass() -> None:
    """Raise InvalidSettings within a backward pass: its gradients are still being exchanged."""
    if torch._C._current_graph_task_id() != -1:
        what = "a step of the optimizer within the backward pass, whose gradients are still being exchanged"
        hint = "call step after backward, or train with --algo hfa and without --reduce torch"
        raise InvalidSettings(what, hint)


class BackwardPass:
    """All participants contribute what is left before one of them waits: workers whose gradients arrive in another
    order would wait for each other for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # autograd has a thread for each GPU
        self._participants: list[Participant] = []
        self._task = -1

    def enter(self, participant: Participant) -> None:
        """Have the end of the current pass wait for the participant's round; once for each of its rounds, in autograd's
        thread.
        """
        current = torch._C._current_graph_task_id()
        with self._lock:
            if current != self._task:
                self._task, self._participants = current, []
                call_at_end(self._at_end)
            self._participants.append(participant)

    def _at_end(self) -> None:
        with self._lock:
            participants, self._participants, self._task = self._participants, [], -1
        for participant in participants:
            participant.contribute_rest()
        for participant in participants:
            participant.receive()
