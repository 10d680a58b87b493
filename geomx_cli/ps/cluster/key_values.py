"""Small values under names, by which the workers of a job find each other, as torch.distributed's store."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.loop import Loop, Timer

__all__ = ["KeyValues"]

_NUMBER = re.compile(rb"-?\d{1,18}")

MAX_HELD = 32 * 2**20
"""Bytes of names and values that one member may have stored; each counts OVERHEAD more."""
OVERHEAD = 256
MAX_VALUE = 4 * 2**20
MAX_ANSWER = 8 * 2**20
"""Bytes of values in one answer."""
MAX_WAITING = 256
"""Requests of one worker that wait for values."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request for values that are missing. `timer` answers it after its limit."""

    missing: set[str]
    request: Request
    timer: Timer


class KeyValues:
    """The values of a job, at its first root. Each belongs to the member that stored it last: a worker, or a party.
    Used by the loop's thread only.

    Requests name `keys` and what to do (`op`): "set" to `values`; "get" and "wait" for all of them, at most `seconds`;
    "add" `number` to an integer in decimal; "append" to what is there; "compare" and set, from the first of `values`
    to the second; "check" whether all exist; "delete"; "count" all that are stored. workers: of a member.
    """

    def __init__(self, loop: Loop, workers: Callable[[Link], int]) -> None:
        self._loop = loop
        self._workers = workers
        self._values: dict[str, tuple[bytes, Link]] = {}
        self._held: dict[Link, int] = {}
        self._waiting: list[_Waiting] = []
        self._ops: dict[str, Callable[[Request], Body]] = {
            "set": self._set, "add": self._add, "append": self._append, "compare": self._compare,
            "check": lambda request: {"found": self._missing(request) == set()},
            "delete": lambda request: {"number": sum(self._remove(key) for key in request.body["keys"])},
            "count": lambda _: {"number": len(self._values)},
        }  # fmt: skip

    def serve(self, request: Request) -> None:
        """Answer now, or when the values are there. Raises InvalidSettings for more than a member may store or ask, and
        for a key that is listed twice: each would be copied as often.
        """
        keys = request.body["keys"]
        if len(set(keys)) < len(keys):
            raise InvalidSettings("a key is listed twice in one request", "name each key once")
        if request.body["op"] in ("get", "wait"):
            self._wait(request)
        else:
            request.answer(self._ops[request.body["op"]](request))

    def _set(self, request: Request) -> Body:
        for key, value in zip(request.body["keys"], request.body["values"], strict=True):
            self._put(request.link, key, value)
        return {}

    def _add(self, request: Request) -> Body:
        (key,) = request.body["keys"]
        present = self._value(key) or b"0"
        if not _NUMBER.fullmatch(present):
            raise InvalidSettings(f"an addition to {key!r}, whose value is no integer of 64 bits", "use another key")
        number = int(present) + request.body["number"]
        self._put(request.link, key, str(number).encode())
        return {"number": number}

    def _append(self, request: Request) -> Body:
        for key, value in zip(request.body["keys"], request.body["values"], strict=True):
            self._put(request.link, key, (self._value(key) or b"") + value)
        return {}

    def _compare(self, request: Request) -> Body:
        (key,), (expected, desired) = request.body["keys"], request.body["values"]
        found = self._value(key)
        if found == expected or (found is None and not expected):
            self._put(request.link, key, desired)
            return {"values": [desired]}
        return {"values": [expected if found is None else found]}

    def _wait(self, request: Request) -> None:
        missing = self._missing(request)
        seconds = request.body.get("seconds", 0.0)
        if not missing or not seconds:
            self._answer(request, found=not missing)
            return
        most = MAX_WAITING * self._workers(request.link)
        if sum(other.request.link is request.link for other in self._waiting) >= most:
            what = f"more than {most} requests of {request.link.name} wait for values of other workers"
            raise InvalidSettings(what, "wait for fewer of them at once")

        def expire() -> None:
            self._waiting.remove(waiting)
            self._answer(request, found=False)

        waiting = _Waiting(missing, request, self._loop.call_later(seconds, expire))
        self._waiting.append(waiting)

    def _answer(self, request: Request, *, found: bool) -> None:
        wanted = request.body["keys"] if found and request.body["op"] == "get" else ()
        values = [self._values[key][0] for key in wanted]
        if sum(map(len, values)) > MAX_ANSWER:
            request.refuse(InvalidSettings(f"more than {MAX_ANSWER} bytes asked for at once", "get fewer keys"))
        else:
            request.answer({"found": found, "values": values}, keep=False)  # a repeat reads them again

    def _put(self, member: Link, key: str, value: bytes) -> None:
        if len(value) > MAX_VALUE:
            what = f"a value of {len(value)} bytes under {key!r}: at most {MAX_VALUE}"
            raise InvalidSettings(what, "use a collective operation, as broadcast")
        before = self._values.get(key)
        freed = _size(key, before[0]) if before is not None and before[1] is member else 0
        held = self._held.get(member, 0) + _size(key, value) - freed
        if held > MAX_HELD:
            what = f"{member.name} stores more than {MAX_HELD} bytes of values"
            raise InvalidSettings(what, "delete those that nobody needs; tensors belong into collective operations")
        self._remove(key)
        self._values[key] = value, member
        self._held[member] = self._held.get(member, 0) + _size(key, value)
        for waiting in [waiting for waiting in self._waiting if key in waiting.missing]:
            waiting.missing.discard(key)
            if not waiting.missing and not self._missing(waiting.request):
                waiting.timer.cancel()
                self._waiting.remove(waiting)
                self._answer(waiting.request, found=True)

    def _remove(self, key: str) -> bool:
        value = self._values.pop(key, None)
        if value is not None:
            self._held[value[1]] -= _size(key, value[0])
        return value is not None

    def _missing(self, request: Request) -> set[str]:
        return {key for key in request.body["keys"] if key not in self._values}

    def _value(self, key: str) -> bytes | None:
        return self._values[key][0] if key in self._values else None


def _size(key: str, value: bytes) -> int:
    return len(key) * 4 + len(value) + OVERHEAD
