"""The probe's request loop: JSON lines on one descriptor, responses on another."""

import errno
import os
import select
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from geomx_cli.core.jsonlines import LineBuffer, decode, encode
from geomx_cli.probe import dialling
from geomx_cli.probe.facts import facts
from geomx_cli.probe.listeners import Listeners
from geomx_cli.probe.ports import ANOTHER, PROBED, Reservations, bind_error, holders

__all__ = ["Service"]

_SILENCE = 60.0
_CHUNK = 1 << 16
_LINE_LIMIT = 1 << 20
_AT_ONCE = 32
_MOST = 1024

Request = Mapping[str, Any]


class Service:
    """Serves requests, each in its own thread, until end of input or `silence` seconds without a request, which a
    request may change.

    Malformed input ends the service; a request that fails gets an error response.
    """

    def __init__(self, source: int, sink: int, silence: float = _SILENCE) -> None:
        self._source, self._sink, self._silence = source, sink, silence
        self._writing = threading.Lock()
        self._slots = threading.BoundedSemaphore(_AT_ONCE)
        self._listeners, self._reservations = Listeners(), Reservations(PROBED)
        self._handlers: Mapping[str, Callable[[Request], Mapping[str, Any]]] = {
            "clock": lambda request: {"clock": time.time()},
            "facts": facts,
            "listen": self._listen,
            "dial": _dial,
            "measure": _measure,
            "release": self._release,
        }

    def run(self) -> int:
        """Serve; return the exit status, 1 after malformed input."""
        requests = LineBuffer(_LINE_LIMIT)
        try:
            while select.select([self._source], [], [], self._silence)[0]:
                data = os.read(self._source, _CHUNK)
                if not data:
                    break
                for line in requests.feed(data):
                    self._begin(decode(line))
        except (ValueError, KeyError, TypeError):
            return 1
        finally:
            self._listeners.close()
        return 0

    def _begin(self, request: Request) -> None:
        number, handler = int(request["id"]), self._handlers[request["do"]]
        self._silence = float(request.get("silence", self._silence))  # here, as the caller waits for input next
        if not self._slots.acquire(blocking=False):
            self._answer({"id": number, "error": f"more than {_AT_ONCE} requests at once"})
            return
        threading.Thread(target=self._handle, args=(number, handler, request), daemon=True).start()

    def _handle(self, number: int, handler: Callable[[Request], Mapping[str, Any]], request: Request) -> None:
        try:
            answer = handler(request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        finally:
            self._slots.release()
        self._answer({"id": number, **answer})

    def _answer(self, answer: Mapping[str, Any]) -> None:
        data = encode(answer)
        with self._writing:
            try:
                while data:
                    data = data[os.write(self._sink, data) :]
            except OSError:
                pass  # the reader has gone, so the input will end too

    def _listen(self, request: Request) -> Mapping[str, Any]:
        token, owner = str(request["token"]), str(request["owner"])
        results = []
        for address, port, protocol in request["binds"][:_MOST]:
            try:
                if not self._reservations.hold(str(address), int(port), owner):
                    results.append({"error": "it is in use", "in_use": True, "holder": ANOTHER})
                    continue
                if protocol == "udp":
                    self._listeners.open_udp(str(address), int(port), token)
                else:
                    self._listeners.open(str(address), int(port), token)
                results.append({"error": "", "in_use": False, "holder": ""})
            except OSError as error:
                in_use = error.errno == errno.EADDRINUSE
                who = holders([int(port)])[int(port)] if in_use and protocol == "tcp" else ""
                results.append({"error": bind_error(error), "in_use": in_use, "holder": who})
        return {"results": results}

    def _release(self, request: Request) -> Mapping[str, Any]:
        """Stop listening; with "hold", the ports stay reserved."""
        if not request.get("hold"):
            self._reservations.release()
        return {"closed": self._listeners.close()}


def _dial(request: Request) -> Mapping[str, Any]:
    return {"results": dialling.dial_all(request["targets"][:_MOST], float(request["limit"]))}


def _measure(request: Request) -> Mapping[str, Any]:
    target = dialling.Target(str(request["address"]), int(request["port"]), str(request["token"]))
    return dialling.measure(target, float(request["seconds"]), float(request["limit"]))
