"""Client of the probe on one host, over the channel to `python -m geomx_cli.probe`."""

import itertools
import threading
from collections.abc import Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from geomx_cli.core.errors import CheckFailed, HostUnreachable, TimedOut
from geomx_cli.core.jsonlines import decode, encode, object_lines
from geomx_cli.core.untrusted import plain_all
from geomx_cli.hosts import Channel

__all__ = ["ProbeClient"]

_RELEASE_LIMIT = 5.0

Answer = dict[str, Any]


class ProbeClient:
    """Requests and responses over one channel. Thread-safe; a background thread receives."""

    def __init__(self, host: str, channel: Channel) -> None:
        self._host, self._channel = host, channel
        self._numbers = itertools.count(1)
        self._waiting: dict[int, SimpleQueue[Answer | None]] = {}
        self._ended = False
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name=f"answers of {host}", daemon=True)
        self._reader.start()

    def ask(self, what: str, fields: Mapping[str, Any], limit: float) -> Answer:
        """Send a request and return the response.

        Raises HostUnreachable if the probe has ended or the connection broke, TimedOut after `limit` seconds,
        CheckFailed if the probe returns an error.
        """
        box: SimpleQueue[Answer | None] = SimpleQueue()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = box
            if self._ended:
                box.put(None)
        try:
            self._channel.send(encode({"id": number, "do": what, **fields}))
            answer = box.get(timeout=limit)
        except Empty:
            raise TimedOut(
                f"host {self._host}: its probe did not answer within {limit:g} s ({what})",
                "see whether the host is overloaded, and try again",
            ) from None
        except OSError:
            answer = None
        finally:
            with self._lock:
                del self._waiting[number]
        if answer is None:
            raise HostUnreachable(
                f"host {self._host}: the connection ended while it was checked",
                "see that the host runs, and try again",
            )
        if "error" in answer:
            raise CheckFailed(
                f"host {self._host}: its probe failed ({what}): {answer['error']}",
                "install the same version of geomx on all hosts",
            )
        return answer

    def errors(self) -> str:
        """Return the probe's stderr; complete once it has ended."""
        return self._channel.errors()

    def close(self, *, release: bool = True) -> None:
        """End the probe; with `release` its listening ports are free on return, provided that it responds."""
        if release:
            with suppress(HostUnreachable, TimedOut, CheckFailed):
                self.ask("release", {}, _RELEASE_LIMIT)
        self._channel.close()
        self._reader.join(_RELEASE_LIMIT)

    def _read(self) -> None:
        with suppress(CheckFailed):
            for line in object_lines(self._receive, "the checker"):
                self._deliver(line)
        with self._lock:
            self._ended = True
            for box in self._waiting.values():
                box.put(None)

    def _receive(self) -> bytes:
        try:
            return self._channel.receive()
        except OSError:
            return b""

    def _deliver(self, line: bytes) -> None:
        """Deliver a response to its requester. All other messages are ignored."""
        try:
            answer = plain_all(decode(line))
            number = int(answer["id"])
        except (ValueError, KeyError, TypeError):
            return
        with self._lock:
            box = self._waiting.get(number)
        if box is not None:
            box.put(answer)
