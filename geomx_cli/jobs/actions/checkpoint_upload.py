"""Uploads of a job's checkpoints to the store of --checkpoint-to, by its agents, while the job goes on."""

from collections.abc import Callable, Collection

from geomx_cli.core.agent_protocol import Published, Uploaded
from geomx_cli.jobs.actions.agent_connection import Send

__all__ = ["CheckpointUpload"]

_AT_END = 605.0  # seconds that the end of the job waits for it; agents give up a little earlier


class CheckpointUpload:
    """Uploads one checkpoint at a time; of those that are taken meanwhile the newest is next. For the main thread.

    All hosts upload their parts. Once all have, one of them writes the record, without which nothing counts. If one
    fails, there is none, and the next checkpoint is uploaded as if nothing had been.

    send: to the agent on a host.
    writer: the host that writes the record: it has the job's description.
    place: of --checkpoint-to; "" for none: then nothing is done.
    tell: gets a problem, once until an upload succeeds, and whether the checkpoint is there nevertheless.
    limit: seconds for the uploads, and for the record as many; 0: that of the agents.
    newest: the number of the last one that may be resumed from there; None before.
    """

    def __init__(
        self, send: Send, writer: str, place: str, tell: Callable[[str, bool], object], limit: float = 0.0
    ) -> None:
        self._send = send
        self._writer = writer
        self._place = place
        self._tell = tell
        self._limit = {"limit": limit} if limit else {}
        self._told = set[str]()
        self._hosts: tuple[str, ...] = ()
        self._uploading = set[str]()  # hosts of which an answer is awaited
        self._publishing = False
        self._number = 0
        self._next: tuple[int, tuple[str, ...]] | None = None
        self._problems: list[str] = []
        self._ending_since: float | None = None
        self.newest: int | None = None

    @property
    def is_running(self) -> bool:
        """Whether an upload goes on."""
        return bool(self._uploading or self._publishing)

    def begin(self, number: int, hosts: Collection[str]) -> None:
        """All these hosts have a checkpoint: upload it when the previous upload is done."""
        if not self._place:
            return
        self._next = (number, tuple(hosts))
        if not self.is_running:
            self._begin_next()

    def delays_end(self, now: float) -> bool:
        """Whether the job, which is being stopped, waits for an upload."""
        if self._ending_since is None:
            self._ending_since = now
        return self.is_running and now - self._ending_since < _AT_END

    def on_message(self, host: str, message: Uploaded | Published) -> None:
        """An agent has answered."""
        if message.number != self._number:
            return
        if isinstance(message, Published):
            if self._publishing and host == self._writer:
                self._on_published(message)
        elif host in self._uploading:
            self._uploading.discard(host)
            if message.problem or not message.done:
                self._problems.append(f"host {host}: {message.problem}")
            if not self._uploading:
                self._on_uploaded()

    def on_hello(self, host: str) -> None:
        """An agent is connected: perhaps another one than before, which does not know what it was asked for."""
        if host in self._uploading or (self._publishing and host == self._writer):
            self._ask(host)

    def on_end(self, host: str, *, is_done: bool = False) -> None:
        """A host's part of the job is over, or was given up. is_done: its work is complete, so the job needs no
        checkpoint.
        """
        if is_done:
            self._uploading, self._publishing, self._next = set(), False, None
        elif host in self._uploading:
            self.on_message(host, Uploaded(self._number, False, "it ended before its part was uploaded"))
        elif self._publishing and host == self._writer:
            self.on_message(host, Published(self._number, False, f"host {host} ended before the record was written"))

    def _begin_next(self) -> None:
        if self._next is not None:
            (self._number, self._hosts), self._next = self._next, None
            self._uploading, self._problems = set(self._hosts), []
            for host in self._hosts:
                self._ask(host)

    def _ask(self, host: str) -> None:
        kind = {"type": "publish", "hosts": list(self._hosts)} if self._publishing else {"type": "upload"}
        about = {"number": self._number, "publishes": host == self._writer}
        self._send(host, {**kind, **about, **self._limit})

    def _on_uploaded(self) -> None:
        if self._problems:
            self._send(self._writer, {"type": "drop"})
            self._warn(min(self._problems))
            self._begin_next()
        else:
            self._publishing = True
            self._ask(self._writer)

    def _on_published(self, message: Published) -> None:
        self._publishing = False
        if message.done:
            self.newest = self._number
            self._told.clear()
        if message.problem or not message.done:
            self._warn(message.problem)
        self._begin_next()

    def _warn(self, problem: str) -> None:
        if problem not in self._told:
            self._told.add(problem)
            self._tell(problem, self.newest == self._number)
