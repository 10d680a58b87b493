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
from geomx_cli.agent.control import Message
from geomx_cli.core.conventions import module_command
from geomx_cli.core.jsonlines import decode
from geomx_cli.core.units import format_duration

__all__ = ["Uploads"]

_WORDS = 300  # characters of an unexpected message
_LIMIT = 3600.0  # seconds for an upload, unless who asks for it says another number
_ENDING = 2.0  # seconds for a killed one to disappear; from a hanging file system it never does
_AT_END = 600.0  # seconds that the end of the job waits for an upload


class Uploads:
    """One upload, or record, at a time (stored.py), each in a process, as clients of clouds take a second to import,
    and hang in their own ways. It dies with this one. Not thread-safe.

    A new one takes the place of the present one, whose requester is told. But one for a visitor, which is about to stop
    the job, is not ended by the control machine, whose next checkpoint would end it again and again.

    directory: the agent's. environment: of processes, in which fsspec finds credentials.
    answer: sends a message to the visitor that has asked; 0: the control machine.
    """

    def __init__(
        self, directory: Path, environment: Callable[[], Mapping[str, str]],
        answer: Callable[[int, Message], object],
    ) -> None:  # fmt: skip
        self._directory = directory
        self._environment = environment
        self._answer = answer
        self._running: _Process | None = None
        self._kind = ""
        self._visitor = self._number = 0
        self._over_at = 0.0  # of this host's part of the job
        self._awaits_record = False

    @property
    def number(self) -> int:
        """Of the checkpoint that is being uploaded; 0 for none."""
        return self._number if self._running is not None else 0

    def obey(self, message: Message) -> None:
        """Begin an "upload", or "publish" a checkpoint, unless that goes on already; or "drop" what goes on.

        In the message: number; limit: seconds, after which it is ended; publishes: the record follows here.
        """
        visitor, number, kind = int(message.get("visitor", 0)), int(message.get("number", 0)), str(message["type"])
        if kind == "drop":
            if visitor == self._visitor:
                self.abandon()
            return
        if self._running is not None and (visitor, kind, number) == (self._visitor, self._kind, self._number):
            return
        self.check()
        if self.number and self._visitor and not visitor:
            self._tell(visitor, kind, number, f"checkpoint {self.number} is being uploaded for geomx stop")
            return
        if self.number:
            self._tell(self._visitor, self._kind, self.number, f"the upload of checkpoint {number} has taken its place")
        self.abandon()
        self._visitor, self._kind, self._number = visitor, kind, number
        self._awaits_record = bool(message.get("publishes")) and not visitor
        hosts = [str(host) for host in message.get("hosts", ())]
        words = module_command(sys.executable, "geomx_cli.agent", kind, str(self._directory), str(number), *hosts)
        self._running = _Process(words, dict(self._environment()), float(message.get("limit", _LIMIT)))

    def check(self) -> None:
        """Call regularly."""
        if self._running is None or self._running.answer is None:
            return
        ended, self._running = self._running.answer, None
        self._awaits_record &= ended["done"]
        self._tell(self._visitor, self._kind, self._number, ended["problem"], done=ended["done"])

    def delays_end(self, *, connected: bool) -> bool:
        """Whether the end of this host's part of the job waits for an upload, or for the order to write the record.
        connected: to a control machine, which gives this order.
        """
        self._over_at = self._over_at or time.monotonic()
        waits = self._running is not None or (self._awaits_record and connected)
        return waits and time.monotonic() - self._over_at < _AT_END

    def abandon(self) -> None:
        """End the present upload without a message about it."""
        self._awaits_record = False
        if self._running is not None:
            self._running.end()
            self._running = None

    def _tell(self, visitor: int, kind: str, number: int, problem: str, *, done: bool = False) -> None:
        kind = "uploaded" if kind == "upload" else "published"
        self._answer(visitor, {"type": kind, "number": number, "done": done, "problem": problem})


class _Process:
    """A process of an upload, and a thread that waits for it.

    limit: seconds. answer: the process's answer, or an answer with the problem if it gave none; None while it runs.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], limit: float) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ended = False
        self.answer: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._run, args=(words, environment, limit), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Kill it."""
        self._is_ended = True  # if it begins at this moment, the thread kills it
        if self._process is not None:
            self._process.kill()
        self._thread.join(_ENDING)

    def _run(self, words: Sequence[str], environment: Mapping[str, str], limit: float) -> None:
        try:
            self._process = process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
                start_new_session=True,
                preexec_fn=processes.die_with_parent(os.getpid()),  # noqa: PLW1509 - no lock is held by the other thread
            )  # fmt: skip
        except OSError as error:
            self.answer = {"done": False, "problem": f"{words[0]}: {error.strerror}"}
            return
        if self._is_ended:
            process.kill()
        try:
            output, errors = process.communicate(timeout=limit)
            self.answer = self._read(output, errors, process.returncode)
        except subprocess.TimeoutExpired:
            process.kill()
            what = f"its upload was ended, as it took longer than {format_duration(limit)}"
            self.answer = {"done": False, "problem": what}
            process.communicate()

    @staticmethod
    def _read(output: bytes, errors: bytes, status: int) -> dict[str, Any]:
        with suppress(ValueError, KeyError, IndexError):
            found = decode(output.splitlines()[-1])
            return {"done": bool(found["done"]), "problem": str(found["problem"])}
        lines = errors.decode(errors="replace").strip().splitlines()
        return {"done": False, "problem": lines[-1][-_WORDS:] if lines else f"the upload ended with status {status}"}
