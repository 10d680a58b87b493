"""Requests between two processes, executed exactly once even if connections are cut.

The sender repeats unanswered requests, under the same number, on a new connection. The receiver remembers the numbers
that it has received, and answers a repeat with the stored answer. It keeps the answer until a later request
acknowledges it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from geomx_cli.core.errors import GeomxError, InvalidSettings, PeerLost, TimedOut
from geomx_cli.ps.cluster.bodies import TOPICS, Body, Topic, checked_answer, checked_request
from geomx_cli.ps.cluster.liveness import NEWS
from geomx_cli.ps.net.link import LINK_TOPICS, Link
from geomx_cli.ps.net.loop import Loop, Timer
from geomx_cli.ps.net.wire import BadMessage, encode_body, number_base

__all__ = ["Request", "Rpc"]

Answer = Callable[[Body], None]
Failed = Callable[[GeomxError], None]
Counts = Literal["alive", "idle", "always"]

MAX_OPEN = 4096
"""Limit on one peer's requests that are in progress, or whose answers the peer may not have."""
MAX_KEPT = 64 * 2**20
"""Bytes of answers that one peer may leave unacknowledged before its requests are refused."""


class Request:
    """A peer's request, to be answered once, now or later. A notification is a request whose answer is discarded."""

    __slots__ = ("_reply", "body", "link", "topic")

    def __init__(self, link: Link, topic: str, body: Body, reply: Callable[[Body, bool], None]) -> None:
        self.link = link
        self.topic = topic
        self.body = body
        self._reply = reply

    def answer(self, body: Body | None = None, *, keep: bool = True) -> None:
        """Send the answer. With `keep` False (for long, reproducible answers) it is not stored: a repeat executes the
        request again.
        """
        self._reply(body or {}, keep)

    def refuse(self, error: GeomxError) -> None:
        """Answer with an error, which the requesting process raises."""
        self._reply({"error": error.message, "hint": error.hint}, True)


@dataclass(slots=True)
class _Asked:
    """A pending request of this process. `began`: in time.monotonic seconds."""

    link: Link
    topic: str
    body: Body
    answer: Answer
    failed: Failed
    timer: Timer
    began: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _Heard:
    """One peer's requests, by number: those in progress, and encoded answers (`kept` bytes in all). The peer has the
    answers to all requests up to `acked`.
    """

    acked: int = 0
    open: set[int] = field(default_factory=set)
    answers: dict[int, bytes] = field(default_factory=dict)
    kept: int = 0


class _AnswerBody(dict[str, Any]):
    """An answer's body. Reading a missing field raises PeerLost, which names the peer. This check is here because
    bodies.py does not know the answers of algorithms.
    """

    def __init__(self, body: Body, peer: str, topic: str) -> None:
        super().__init__(body)
        self._peer = peer
        self._topic = topic

    def __missing__(self, name: str) -> Any:
        raise _malformed(self._peer, self._topic, f"without {name!r}")


class Rpc:
    """The requests that a process sends and receives. Used by the loop's thread only.

    timeout: in seconds.
    incarnation: of this process.
    """

    def __init__(self, loop: Loop, timeout: float, incarnation: int = 0) -> None:
        self._loop = loop
        self._timeout = timeout
        self._number = number_base(incarnation)
        self._asked: dict[int, _Asked] = {}
        self._open: dict[Link, dict[int, None]] = {}  # per link: the numbers without an answer, ascending
        self._heard: dict[Link, _Heard] = {}
        self._topics = dict(TOPICS)

    def add_topics(self, topics: Mapping[str, Topic]) -> None:
        """Also check requests, notifications and answers of these topics. Call it before any peer is connected.

        Raises InvalidSettings for a topic that has another meaning already.
        """
        for topic in topics:
            if topic in self._topics or topic in LINK_TOPICS or topic == "answer":
                raise InvalidSettings(f"the topic {topic!r} is taken", "a delivery names its topics after itself")
        self._topics |= topics

    def ask(
        self,
        link: Link,
        topic: str,
        body: Body,
        answer: Answer,
        failed: Failed,
        limit: float = 0.0,
        counts: Counts = "alive",
    ) -> None:
        """Send a request; exactly one of `answer` and `failed` is called later.

        limit: seconds; 0 for the option `timeout`.
        counts: when time counts towards the limit. "alive": while the peer is heard (silence has its own limit).
            "idle": since the last progress here or elsewhere, for requests that wait for others. "always": by the
            clock.
        """
        self._number += 1
        number, limit = self._number, limit or self._timeout

        def expire() -> None:
            asked = self._asked[number]
            since = {"always": 0.0, "alive": link.health.whole_since(), "idle": link.health.progress()}[counts]
            rest = max(asked.began, since) + limit + NEWS * (counts == "idle") - time.monotonic()
            if counts != "always" and rest > 0:
                asked.timer = self._loop.call_later(rest, expire)
                return
            self._close(number)
            hint = "see its log; if it is only slow, increase --timeout"
            failed(TimedOut(f"no answer from {link.name} to {topic!r} within {limit:g} s", hint))

        self._asked[number] = _Asked(link, topic, body, answer, failed, self._loop.call_later(limit, expire))
        self._open.setdefault(link, {})[number] = None
        self._send(number)

    def repeat(self, link: Link) -> None:
        """Repeat the pending requests of `link`, which has a new connection."""
        for number in self._open.get(link, ()):
            self._send(number)

    def renew(self, link: Link) -> None:
        """This peer has been restarted. Its requests so far get no answer."""
        self._heard.pop(link, None)

    def receive(self, link: Link, number: int, acked: int, topic: str, body: Body) -> Request | None:
        """The request to execute, or None for a repeat. The peer has the answers to all its requests up to `acked`.

        Raises BadMessage if too many of its requests are in progress. Also raises it for a wrong body, which is
        refused.
        """
        if not number:
            if topic not in self._topics or not self._topics[topic].notifies:
                raise BadMessage(f"a request {topic!r} without a number")
            return Request(link, topic, checked_request(topic, body, self._topics), _nowhere)
        if acked >= number:
            raise BadMessage(f"request {number} of a peer that has its answer")
        heard = self._heard.setdefault(link, _Heard())
        # Numbers ascend, and the peer has the answers up to `acked`. So few answers are kept, and a number up to
        # `acked` that still arrives is a late repeat.
        heard.acked = max(heard.acked, acked)
        for done in [done for done in heard.answers if done <= acked]:
            heard.kept -= len(heard.answers.pop(done))
        if number in heard.answers:
            link.control("answer", heard.answers[number], number)
            return None
        if number in heard.open or number <= heard.acked:
            # Either a repeat of a request in progress, which will be answered, or a late repeat whose answer was
            # received.
            return None
        if len(heard.open) >= MAX_OPEN:
            raise BadMessage(f"more than {MAX_OPEN} requests at once")
        if heard.kept > MAX_KEPT:
            raise BadMessage(f"a request of a peer that does not acknowledge {heard.kept} bytes of answers")
        heard.open.add(number)
        request = Request(link, topic, body, partial(self._reply, link, heard, number))
        try:
            request.body = checked_request(topic, body, self._topics)
        except BadMessage as error:
            what = f"a malformed request {topic!r}: {error}"
            request.refuse(InvalidSettings(what))
            raise BadMessage(what) from None
        return request

    def answered(self, link: Link, number: int, body: Body) -> None:
        """Handle an answer. An answer to a repeated request may arrive twice, and the second is ignored. A wrong body
        fails the request with PeerLost, which names the peer.
        """
        asked = self._asked.get(number)
        if not 0 < number <= self._number or (asked is not None and asked.link is not link):
            raise BadMessage("an unsolicited answer")
        if asked is None:
            return
        self._close(number)
        asked.timer.cancel()
        if "error" in body:
            asked.failed(InvalidSettings(str(body["error"]), str(body.get("hint", ""))))
            return
        try:
            body = checked_answer(asked.topic, body, self._topics)
        except BadMessage as error:
            asked.failed(_malformed(link.name, asked.topic, str(error)))
            return
        asked.answer(_AnswerBody(body, link.name, asked.topic))

    def give_up(self, error: GeomxError) -> None:
        """Fail all pending requests."""
        given_up, self._asked = self._asked, {}
        self._open.clear()
        for asked in given_up.values():
            asked.timer.cancel()
            asked.failed(error)

    def _send(self, number: int) -> None:
        asked = self._asked[number]
        asked.link.control(asked.topic, asked.body, number, next(iter(self._open[asked.link])) - 1)

    def _close(self, number: int) -> None:
        del self._open[self._asked.pop(number).link][number]

    def _reply(self, link: Link, heard: _Heard, number: int, body: Body, keep: bool) -> None:
        if self._heard.get(link) is not heard:
            return  # of an earlier life
        heard.open.discard(number)
        answer = encode_body(body)
        if keep:
            heard.answers[number] = answer
            heard.kept += len(answer)
        # a long-running request holds `acked` back; at most MAX_OPEN run at once, so older answers were received
        if len(heard.answers) > MAX_OPEN:
            heard.kept -= len(heard.answers.pop(next(iter(heard.answers))))
        link.control("answer", answer, number)


def _malformed(peer: str, topic: str, why: str) -> PeerLost:
    what = f"{peer} gave a malformed answer to {topic!r}, {why}"
    return PeerLost(what, "do all processes have the same version of geomx?", peer=peer)


def _nowhere(_body: Body, _keep: bool) -> None:
    """Discard the answer of a notification."""
