"""The agent's uploads of checkpoints to a store: in processes of their own, while the job goes on."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from geomx_cli.agent import processes
from geomx_cli.core.conventions import module_command
from geomx_cli.core.jsonlines import decode

__all__ = ["Uploads"]

_WORDS = 300  # characters of an unexpected message
_BEGINNING = 0.05  # seconds
_AT_END = 600.0  # seconds that the end of the job waits for an upload


class Uploads:
    """One upload, or record, at a time (stored.py). A thread waits for its process, which dies with this one: clients
    of clouds take a second to import, hang in their own ways, and can only be killed from outside. Not thread-safe.

    directory: the agent's. environment: of processes, in which fsspec finds credentials.
    """

    def __init__(self, directory: Path, environment: Callable[[], Mapping[str, str]]) -> None:
        self._directory = directory
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._kind = ""
        self._ended: dict[str, Any] | None = None
        self._over_at = 0.0  # of this host's part of the job
        self._awaits_record = False
        self.number = 0

    def begin(self, kind: str, number: int, hosts: Sequence[str] = (), *, publishes: bool = False) -> None:
        """Begin an "upload", or "publish" a checkpoint, unless that goes on already. publishes: it follows here."""
        if self._thread is not None and (kind, number) == (self._kind, self.number):
            return
        self.abandon()
        self._kind, self.number, self._awaits_record = kind, number, publishes
        words = module_command(sys.executable, "geomx_cli.agent", kind, str(self._directory), str(number), *hosts)
        self._ended = self._process = None
        self._thread = threading.Thread(target=self._run, args=(words, dict(self._environment())), daemon=True)
        self._thread.start()

    def check(self) -> dict[str, Any] | None:
        """Call regularly. Return the message about what has ended; None if nothing has."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        ended = self._ended or {"done": False, "problem": "the upload was ended"}
        self._awaits_record &= ended["done"]
        return {"type": "uploaded" if self._kind == "upload" else "published", "number": self.number, **ended}

    def delays_end(self, *, connected: bool) -> bool:
        """Whether this host's part of the job, which is over, waits for an upload, or to be told to write the record.
        connected: somebody is there to tell.
        """
        self._over_at = self._over_at or time.monotonic()
        waits = self._thread is not None or (self._awaits_record and connected)
        return waits and time.monotonic() - self._over_at < _AT_END

    def abandon(self) -> None:
        """End what goes on; nothing is said of it."""
        self._awaits_record = False
        while self._thread is not None:
            if (process := self._process) is not None:  # else it begins at this moment
                process.kill()
            self._thread.join(_BEGINNING)
            if not self._thread.is_alive():
                self._thread = None

    def _run(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
                start_new_session=True,
                preexec_fn=processes.die_with_parent(os.getpid()),  # noqa: PLW1509 - no lock is held by the other thread
            )  # fmt: skip
            output, errors = self._process.communicate()
            self._ended = self._answer(output, errors, self._process.returncode)
        except OSError as error:
            self._ended = {"done": False, "problem": f"{words[0]}: {error.strerror}"}

    @staticmethod
    def _answer(output: bytes, errors: bytes, status: int) -> dict[str, Any]:
        with suppress(ValueError, KeyError, IndexError):
            found = decode(output.splitlines()[-1])
            return {"done": bool(found["done"]), "problem": str(found["problem"])}
        lines = errors.decode(errors="replace").strip().splitlines()
        return {"done": False, "problem": lines[-1][-_WORDS:] if lines else f"the upload ended with status {status}"}
