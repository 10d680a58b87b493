"""Rejects server profiling with a clear message: MXNet's profiler cannot access our servers."""

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["refuse_servers"]

_CALLS = ("set_config", "set_state", "dump", "pause", "resume")


def refuse_servers(mx: Any) -> None:
    """Make `mx.profiler` raise MXNetError for profile_process="server"; MXNet's own message is about a null handle."""
    for name in _CALLS:
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
