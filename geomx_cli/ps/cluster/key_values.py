"""Small values under names, by which the workers of a job find each other, like torch.distributed's store."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.cluster.members import Member
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.loop import Loop, Timer

__all__ = ["CHANGING", "KeyValueService", "KeyValues"]

CHANGING = frozenset({"set", "add", "append", "compare", "delete"})
"""The operations that change values."""

_NUMBER = re.compile(rb"-?\d{1,18}")

MAX_HELD = 32 * 2**20
"""Limit on the bytes of names and values that one member may have stored. Each pair counts OVERHEAD bytes more."""
OVERHEAD = 256
MAX_VALUE = 4 * 2**20
MAX_ANSWER = 8 * 2**20
"""Limit on the bytes of values in one answer."""
_ONCE = CHANGING - {"compare"}  # a repeated comparison finds the value that it has set
MAX_CALLS = 512
"""Number of answers kept for one process: more than the number of calls that it may have under way."""
MAX_WAITING = 256
"""Limit on one worker's requests that wait for values."""


class KeyValues:
    """The values of a job, at its first root. Each value belongs to the member (a worker or a party) that stored it
    last.

    A request has `keys` and an operation (`op`):
    "set": set the keys to `values`.
    "get", "wait": wait until all keys have values, at most `seconds`; "get" returns the values.
    "add": add `number` to an integer in decimal.
    "append": append to the present value.
    "compare": if the present value is the first of `values`, set it to the second.
    "check": return whether all keys exist.
    "delete": delete a key.
    "count": count all stored keys.
    """

    def __init__(self) -> None:
        self._values: dict[str, tuple[bytes, str]] = {}  # with the member that has stored each
        self._held: dict[str, int] = {}
        self._answers: dict[str, dict[int, Body]] = {}  # of each process's last calls that changed values
        self._ops: dict[str, Callable[[Body, str], Body]] = {
            "set": self._set, "get": self._get, "add": self._add, "append": self._append, "compare": self._compare,
            "wait": lambda body, _: {"found": not self.missing(body["keys"]), "values": []},
            "check": lambda body, _: {"found": not self.missing(body["keys"])},
            "delete": lambda body, _: {"number": sum(self._remove(key) for key in body["keys"])},
            "count": lambda *_: {"number": len(self._values)},
        }  # fmt: skip

    def apply(self, body: Body, sender: Member) -> Body:
        """Carry out a request, and return the answer. Raises InvalidSettings if a member would store or request too
        much, or lists a key twice (its value would be copied twice). Then nothing has changed.
        """
        if len(set(body["keys"])) < len(body["keys"]):
            raise InvalidSettings("a key is listed twice in one request", "name each key once")
        op = self._ops[body["op"]]
        if body["op"] not in _ONCE or "call" not in body:
            return op(body, sender.process)
        # After a restart of this server, or of a server on the way, a call whose answer was lost is repeated.
        known = self._answers.setdefault(body.get("by", sender.process), {})
        if body["call"] not in known:
            known[body["call"]] = op(body, sender.process)
            if len(known) > MAX_CALLS:
                del known[next(iter(known))]
        return known[body["call"]]

    def state(self) -> Body:
        """What `load` takes, and msgpack can hold."""
        answers = {by: list(known.items()) for by, known in self._answers.items()}
        return {"values": {key: list(value) for key, value in self._values.items()}, "answers": answers}

    def load(self, state: Body) -> None:
        """Go on from a `state`."""
        self._values = {key: (value, by) for key, (value, by) in state["values"].items()}
        self._answers = {by: dict(known) for by, known in state["answers"].items()}
        self._held = {}
        for key, (value, by) in self._values.items():
            self._held[by] = self._held.get(by, 0) + _size(key, value)

    def missing(self, keys: Iterable[str]) -> set[str]:
        """Those of the keys that have no value."""
        return {key for key in keys if key not in self._values}

    def _get(self, body: Body, _: str) -> Body:
        keys = () if self.missing(body["keys"]) else body["keys"]
        values = [self._values[key][0] for key in keys]
        if sum(map(len, values)) > MAX_ANSWER:
            raise InvalidSettings(f"more than {MAX_ANSWER} bytes asked for at once", "get fewer keys")
        return {"found": bool(keys), "values": values}

    def _set(self, body: Body, by: str) -> Body:
        self._put(by, dict(zip(body["keys"], body["values"], strict=True)))
        return {}

    def _add(self, body: Body, by: str) -> Body:
        (key,) = body["keys"]
        present = self._value(key) or b"0"
        if not _NUMBER.fullmatch(present):
            raise InvalidSettings(f"an addition to {key!r}, whose value is no integer of 64 bits", "use another key")
        number = int(present) + body["number"]
        self._put(by, {key: str(number).encode()})
        return {"number": number}

    def _append(self, body: Body, by: str) -> Body:
        given = zip(body["keys"], body["values"], strict=True)
        self._put(by, {key: (self._value(key) or b"") + value for key, value in given})
        return {}

    def _compare(self, body: Body, by: str) -> Body:
        (key,), (expected, desired) = body["keys"], body["values"]
        found = self._value(key)
        if found == expected or (found is None and not expected):
            self._put(by, {key: desired})
            return {"values": [desired]}
        return {"values": [expected if found is None else found]}

    def _put(self, by: str, values: Mapping[str, bytes]) -> None:
        """Store all of these, or none."""
        held = self._held.get(by, 0)
        for key, value in values.items():
            if len(value) > MAX_VALUE:
                what = f"a value of {len(value)} bytes under {key!r}: at most {MAX_VALUE}"
                raise InvalidSettings(what, "use a collective operation, as broadcast")
            before = self._values.get(key)
            held += _size(key, value) - (_size(key, before[0]) if before is not None and before[1] == by else 0)
        if held > MAX_HELD:
            what = f"{by} stores more than {MAX_HELD} bytes of values"
            raise InvalidSettings(what, "delete those that nobody needs; tensors belong into collective operations")
        for key, value in values.items():
            self._remove(key)
            self._values[key] = value, by
            self._held[by] = self._held.get(by, 0) + _size(key, value)

    def _remove(self, key: str) -> bool:
        value = self._values.pop(key, None)
        if value is not None:
            self._held[value[1]] -= _size(key, value[0])
        return value is not None

    def _value(self, key: str) -> bytes | None:
        return self._values[key][0] if key in self._values else None


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request for values that are missing. `timer` answers it after its limit."""

    missing: set[str]
    request: Request
    sender: Member
    timer: Timer


class KeyValueService:
    """Answers requests for KeyValues. Requests for missing values are answered later. Used by the loop's thread only.

    apply: KeyValues.apply, or a function that logs the request and calls it.
    """

    def __init__(self, loop: Loop, values: KeyValues, apply: Callable[[Body, Member], Body]) -> None:
        self._loop = loop
        self._values = values
        self._apply = apply
        self._waiting: list[_Waiting] = []

    def serve(self, request: Request, sender: Member) -> None:
        """Answer now, or when the values are present. Raises InvalidSettings as KeyValues does, and if too many
        requests wait.
        """
        keys, op = request.body["keys"], request.body["op"]
        if op not in ("get", "wait"):
            request.answer(self._apply(request.body, sender))
            self._wake(keys)
            return
        answer = self._apply(request.body, sender)
        if answer["found"] or not request.body.get("seconds"):
            request.answer(answer, keep=False)  # a repeat reads them again
        else:
            self._wait(request, sender)

    def forget_requests(self, link: Link) -> None:
        """The process at this link was restarted, so it asks for everything again."""
        for waiting in [waiting for waiting in self._waiting if waiting.request.link is link]:
            waiting.timer.cancel()
            self._waiting.remove(waiting)

    def _wait(self, request: Request, sender: Member) -> None:
        most = MAX_WAITING * sender.workers
        if sum(other.sender is sender for other in self._waiting) >= most:
            what = f"more than {most} requests of {sender.process} wait for values of other workers"
            raise InvalidSettings(what, "wait for fewer of them at once")

        def expire() -> None:
            self._waiting.remove(waiting)
            request.answer(self._apply(request.body, sender), keep=False)

        missing, seconds = self._values.missing(request.body["keys"]), request.body["seconds"]
        waiting = _Waiting(missing, request, sender, self._loop.call_later(seconds, expire))
        self._waiting.append(waiting)

    def _wake(self, keys: list[str]) -> None:
        """Answer the requests that waited for these values. Other requests are not checked again."""
        for waiting in [waiting for waiting in self._waiting if not waiting.missing.isdisjoint(keys)]:
            waiting.missing = self._values.missing(waiting.request.body["keys"])
            if not waiting.missing:
                waiting.timer.cancel()
                self._waiting.remove(waiting)
                try:
                    waiting.request.answer(self._apply(waiting.request.body, waiting.sender), keep=False)
                except InvalidSettings as error:
                    waiting.request.refuse(error)


def _size(key: str, value: bytes) -> int:
    return len(key) * 4 + len(value) + OVERHEAD
