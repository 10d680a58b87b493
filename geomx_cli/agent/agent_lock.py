"""The lock of an agent's directory. An agent holds it, its keeper, and a process that starts an agent.

Forked processes inherit the lock, and lose it when they end. So there is at most one agent. If no process holds the
lock, there is none. The lock's file, `agent.lock`, names the agent and its keeper.
"""

import fcntl
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from geomx_cli.agent import processes
from geomx_cli.agent.processes import ProcessId

__all__ = ["holders", "lock", "name_holders"]

_POLL = 0.05


def lock(directory: Path, limit: float = 0.0) -> int | None:
    """Return a descriptor that holds the lock until it is closed; None if another holds it for `limit` seconds.

    Raises OSError if the file cannot be opened, or its file system has no locks.
    """
    descriptor = os.open(directory / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + limit
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return None
            time.sleep(_POLL)
        except OSError:
            os.close(descriptor)
            raise
        else:
            return descriptor


def name_holders(descriptor: int, whom: Sequence[ProcessId | None]) -> None:
    """Write who holds the lock: the keeper, and the agent. Does nothing on a full disk."""
    content = json.dumps([processes.boot_id(), *filter(None, whom)]).encode()
    with suppress(OSError):
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))


def holders(directory: Path) -> list[ProcessId]:
    """Return the agent and the keeper that still run, as far as they are known."""
    try:
        boot, *named = json.loads((directory / "agent.lock").read_bytes())
        found = [ProcessId(int(pid), int(started)) for pid, started in named]
    except (OSError, ValueError, TypeError):
        return []
    return [who for who in found if processes.exists(who)] if boot == processes.boot_id() else []
