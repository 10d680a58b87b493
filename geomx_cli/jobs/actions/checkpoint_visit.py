"""A checkpoint before `geomx stop` ends a job, even if no `geomx launch` or `attach` follows the job."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from queue import Empty, SimpleQueue

from geomx_cli.agent.checkpoints import BUSY, NO_STATE
from geomx_cli.core.agent_protocol import Frozen, Kept, Message, Published, Uploaded, parse
from geomx_cli.core.errors import GeomxError
from geomx_cli.core.jsonlines import decode
from geomx_cli.hosts import Connector, everywhere
from geomx_cli.jobs.actions.agent_connection import JsonObject
from geomx_cli.jobs.actions.checkpoint_round import CheckpointRound
from geomx_cli.jobs.actions.checkpoint_upload import CheckpointUpload
from geomx_cli.jobs.actions.streams import HostStream
from geomx_cli.jobs.store.registry import KnownJob

__all__ = ["checkpoint_before_stop"]

_SHOWN = 400  # characters of a problem
_BUSY, _PAUSE = 20.0, 0.3  # seconds to wait for the end of a checkpoint that others take, and between attempts
_UPLOADING = 600.0  # seconds, and for the record as many
_TURN = 0.25


def checkpoint_before_stop(
    job: KnownJob, hosts: Mapping[str, Connector], note: Callable[[str], object]
) -> int | None:
    """Take a checkpoint of a job on all its hosts, and upload it if the job does that. Return its number; None if there
    is none, as the job takes none, or its agents do not all run.

    note: gets why there is none in a job that could have one, or why it is not uploaded.
    """
    options = job.plan.spec.options
    if not options["restarts"] or not options["checkpoint_every"]:
        return None
    try:
        streams = everywhere(lambda name: HostStream(hosts[name], "checkpoint", job.directory_on(name)), hosts)
        with closing(_Visit(dict(zip(hosts, streams, strict=True)))) as visit:
            number = visit.take(note)
            if number is not None and (place := str(options.get("checkpoint_to", ""))):
                visit.upload(number, job.plan.hosts[0], place, note)
            return number
    except (GeomxError, OSError):  # `geomx stop` itself reports hosts that cannot be reached
        return None


class _Visit:
    """Connections to all agents of a job, as a visitor: whoever follows the job goes on. A thread reads each."""

    def __init__(self, streams: Mapping[str, HostStream]) -> None:
        self._streams = streams
        self._inbox = SimpleQueue[tuple[str, Message | None]]()  # None: the connection has ended
        self._lost = set[str]()
        for host in streams:
            threading.Thread(target=self._read, args=(host,), name=f"visit to {host}", daemon=True).start()

    def take(self, note: Callable[[str], object]) -> int | None:
        """Take a checkpoint. Return its number; None if there is none."""
        number, until = int(time.time()), time.monotonic() + _BUSY
        while not self._lost:
            taken = CheckpointRound(self._streams, self._send, number)
            while taken.outcome is None:
                for host, message in self._messages():
                    if message is None:
                        taken.on_lost(host, "its agent does not answer any more")
                    elif isinstance(message, Frozen | Kept):
                        taken.on_message(host, message)
                taken.check()
            if not taken.outcome:
                return taken.number
            number = taken.number + 1
            if BUSY not in taken.outcome or time.monotonic() > until:  # else at an interval, or by another `geomx stop`
                if not self._lost and NO_STATE not in taken.outcome:
                    note(f"no checkpoint: {taken.outcome[:_SHOWN]}")
                return None
            time.sleep(_PAUSE)
        return None

    def upload(self, number: int, writer: str, place: str, note: Callable[[str], object]) -> None:
        """Upload the checkpoint of this number, which all hosts have."""

        def tell(problem: str, is_there: bool) -> None:
            what = "" if is_there else f"the checkpoint is on the hosts only, not in {place}: "
            note(f"{what}{problem[:_SHOWN]}")

        upload = CheckpointUpload(self._send, writer, place, tell, _UPLOADING)
        upload.begin(number, list(self._streams))
        for host in self._lost:
            upload.on_end(host)
        until = time.monotonic() + 2 * _UPLOADING + _BUSY
        while upload.is_running and time.monotonic() < until:
            for host, message in self._messages():
                if message is None:
                    upload.on_end(host)
                elif isinstance(message, Uploaded | Published):
                    upload.on_message(host, message)
        if upload.is_running:
            tell("the agents do not answer", is_there=False)

    def close(self) -> None:
        """End the visit."""
        for stream in self._streams.values():
            stream.close()

    def _send(self, host: str, message: JsonObject) -> None:
        with suppress(OSError, GeomxError):  # its reader finds the end
            self._streams[host].send(message)

    def _read(self, host: str) -> None:
        stream = self._streams[host]
        try:
            while True:
                fields = decode(stream.line(objects=True))
                if (message := parse(fields, host, {})) is not None:
                    self._inbox.put((host, message))
        except (EOFError, OSError, ValueError, GeomxError):
            self._inbox.put((host, None))

    def _messages(self) -> list[tuple[str, Message | None]]:
        """Return the pending messages, after a short wait for the first."""
        try:
            found = [self._inbox.get(timeout=_TURN)]
        except Empty:
            return []
        while not self._inbox.empty():
            found.append(self._inbox.get_nowait())
        self._lost.update(host for host, message in found if message is None)
        return found
