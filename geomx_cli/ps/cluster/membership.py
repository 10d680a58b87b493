"""How a process joins a plane, and how its membership ends. The plane's scheduler is the other end of a membership.

Without a failure the end takes two requests: a process that is done sends "bye", gets an answer, and sends "gone". An
answer may be lost with its connection, so the answering process stays until it receives "gone". The sender of "gone"
waits for an answer, but only some seconds: if only that answer was lost, the peer has ended. A failing process sends
"fail", and needs only an answer.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from geomx_cli.contract.config import NodeSettings, PlaneSettings
from geomx_cli.core.errors import GeomxError, InvalidSettings, PeerLost, TimedOut
from geomx_cli.core.event_log import EventLog
from geomx_cli.core.events import StateChanged, Telemetry, WarningRaised
from geomx_cli.core.units import counted
from geomx_cli.ps.cluster.bodies import Body, blame_in
from geomx_cli.ps.cluster.liveness import Liveness
from geomx_cli.ps.cluster.members import Member
from geomx_cli.ps.cluster.rpc import Request, Rpc
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.loop import Loop
from geomx_cli.ps.net.transport import Transport
from geomx_cli.ps.net.wire import BadMessage

__all__ = ["Membership", "Shutdown"]

QUIET, UNREACHED = 0.1, 0.9
"""Parts of the option `timeout`. After the first, a node that has received nothing from its scheduler says so. After
the second it gives the scheduler up. This is before the scheduler misses the node, because the node knows which link it
is.
"""
PARTING = 10.0
"""Seconds to wait for the answer to "gone". A peer that does not receive "gone" waits for the option `silence`."""


class MemberNode(Protocol):
    """What a membership requires of its node."""

    process: str
    settings: NodeSettings
    timeout: float
    joining: float
    absence: float
    telemetry: Telemetry
    events: EventLog
    loop: Loop
    rpc: Rpc
    liveness: Liveness
    transport: Transport

    def fail(self, error: GeomxError) -> None:
        """End the node with an error."""


class Membership:
    """A process in one plane, as Node.join makes it.

    rank, members: -1 and none until the roster has arrived.
    over: whether no further message is expected, because the scheduler is gone or ending.
    """

    def __init__(
        self,
        node: MemberNode,
        plane: PlaneSettings,
        role: str,
        facts: dict[str, Any],
        on_roster: Callable[["Membership"], None],
    ) -> None:
        self.rank = -1
        self.members: list[Member] = []
        self.over = False
        self._node = node
        self._on_roster = on_roster
        self._plane = plane
        self._missing = "the others"
        self._heard, self._began = False, time.monotonic()
        settings, wide_area = node.settings, facts.pop("wide_area", False)
        self.link = node.transport.dial(plane.to_dial(), f"the scheduler at {plane.endpoint}", wide_area=wide_area)
        self._silence = node.absence if wide_area else 0.0
        self._facts = {
            "role": role,
            "process": node.process,
            "party": settings.party,
            "host": settings.host,
            "servers": plane.servers,
            "workers": plane.workers,
            **facts,
        }
        self._deadline = node.loop.call_later(node.joining, self._expire)
        node.loop.call_later(QUIET * node.timeout, self._warn)
        node.loop.call_later(UNREACHED * node.timeout, self._give_up)
        node.rpc.ask(self.link, "join", self._facts, self._joined, self._refused, limit=node.joining + 5)

    def servers(self) -> list[Member]:
        """The servers of the plane, by rank."""
        return sorted((item for item in self.members if item.role == "server"), key=lambda item: item.rank)

    def has(self, process: str, role: str, rank: int) -> bool:
        """Whether this process is in the roster as the "worker" of this rank, or as a local server of the "party" with
        this index.
        """
        workers = [member for member in self.members if member.role == "worker"]
        ranks = [member.rank for member in workers if member.process == process]
        if role == "worker":
            return rank in ranks
        # Every party has the same number of local servers, which a root does not know: try all divisors.
        sizes = [size for size in range(1, len(workers) + 1) if len(workers) % size == 0]
        return any(own // size == rank for own in ranks for size in sizes)

    def renew(self) -> None:
        """The scheduler has been restarted: join again if it had answered.

        It has kept the roster, or makes the same roster from the ranks that all members request.
        """
        if self.rank >= 0 and not self.over:
            body = {**self._facts, "rank": self.rank}
            self._node.rpc.ask(self.link, "join", body, self._joined_again, self._refused, limit=self._node.joining + 5)

    def on_request(self, request: Request) -> None:
        """Handle the scheduler's notifications."""
        topic, body = request.topic, request.body
        self._heard = True
        if topic == "pending":
            self._node.liveness.watch(self.link, self._silence)  # as the scheduler does from now on
            known, self._missing = self._missing, body["missing"]
            if self._missing == known:
                return
            self._node.telemetry.state = "waiting"
            self._node.events.write(StateChanged(state="waiting", message=f"waiting for {self._missing}"))
        elif topic == "fail":
            self.over = True
            request.answer()
            self._node.fail(PeerLost(body["message"], body.get("hint", ""), **blame_in(body)))
        else:
            raise BadMessage(f"unknown topic {topic!r} from a scheduler")

    def _joined(self, body: dict[str, Any]) -> None:
        self._deadline.cancel()
        self._heard = True
        self.rank = body["rank"]
        self.link.name = body["scheduler"]
        self._node.liveness.watch(self.link, self._silence)
        self.members = [Member(**{**item, "endpoints": tuple(item["endpoints"])}) for item in body["members"]]
        self._on_roster(self)

    def _joined_again(self, body: dict[str, Any]) -> None:
        if body["rank"] != self.rank:
            what = f"{self.link.name} was restarted, and gives this process rank {body['rank']} instead of {self.rank}"
            self._node.fail(InvalidSettings(what, "restart all processes of the job"))

    def _refused(self, error: GeomxError) -> None:
        self._deadline.cancel()
        self._heard = True
        self.over = True
        self._node.fail(InvalidSettings(f"{self.link.name} refused this process: {error.message}", error.hint))

    def _warn(self) -> None:
        if not self._heard:
            message = f"its scheduler at {self._plane.endpoint} has not answered for {QUIET * self._node.timeout:g} s"
            self._node.events.write(WarningRaised(message=message))

    def _give_up(self) -> None:
        if not self._heard:
            hint = "has it been started, with the same address and port, and does a firewall let them through?"
            self._fail(f"an answer of its scheduler at {self._plane.endpoint}", hint)

    def _expire(self) -> None:
        plane = self._plane
        self._fail(
            self._missing,
            f"check that {counted(plane.servers, 'server')} and {counted(plane.workers, 'worker')} of this plane"
            f" have been started, that all have the same counts, and that {plane.endpoint} can be reached",
        )

    def _fail(self, missing: str, hint: str) -> None:
        self._node.fail(TimedOut(f"waited {time.monotonic() - self._began:.0f} s for {missing}", hint))


class Shutdown:
    """Stops the loop when the process may end. Used by the loop's thread only.

    silence: seconds to wait for an answer to "bye", and for the "gone" of others.
    on_gone: called for each peer that needs nothing more.
    leaving: peers that have sent "bye" but not "gone".
    """

    def __init__(
        self, loop: Loop, rpc: Rpc, liveness: Liveness, silence: float, on_gone: Callable[[Link], None]
    ) -> None:
        self._loop = loop
        self._rpc = rpc
        self._liveness = liveness
        self._silence = silence
        self._on_gone = on_gone
        self.leaving: set[Link] = set()
        self._last_message = ""
        self._pending: set[Link] = set()  # peers that have not answered the last message
        self._waits = False

    @property
    def has_begun(self) -> bool:
        """Whether this process has said goodbye, or has said that it fails."""
        return bool(self._last_message)

    def bye(self, links: Iterable[Link]) -> None:
        """End when all `links` have answered, and all peers that said bye to this process are gone."""
        self._notify("bye", {}, links, self._silence)

    def fail(self, body: Body, links: Iterable[Link], limit: float) -> None:
        """End when all `links` know the reason, or after `limit` seconds. Replaces a `bye`."""
        self._notify("fail", body, links, limit)

    def answer_bye(self, request: Request) -> None:
        """Answer a peer's bye; this process stays until the peer has received the answer."""
        self.expect_gone(request.link)
        request.answer()

    def expect_gone(self, link: Link) -> None:
        """This peer has said bye, to this process or its earlier life."""
        self.leaving.add(link)
        self._liveness.release(link)

    def gone(self, link: Link) -> None:
        """This peer needs nothing more. A repeated "gone" has no effect, and a "gone" without "bye" is ignored."""
        if link not in self.leaving:
            return
        self.leaving.discard(link)
        self._liveness.forget(link)
        self._on_gone(link)
        if self._waits:
            self._stop_when_over()

    def lost(self, link: Link, error: GeomxError) -> bool:
        """This peer is considered dead. Returns whether that was expected because either end was ending."""
        if link in self.leaving:
            self.gone(link)
        elif self._last_message:
            self._answered(link, self._last_message, error)
        else:
            return False
        return True

    def _notify(self, topic: str, body: Body, links: Iterable[Link], limit: float) -> None:
        self._pending, self._last_message = set(links), topic
        for link in list(self._pending):
            answered = partial(self._answered, link, topic)
            self._rpc.ask(link, topic, body, answered, answered, limit, "always")
        self._stop_when_over()

    def _answered(self, link: Link, topic: str, answer: Body | GeomxError) -> None:
        if topic != self._last_message:
            return
        if topic == "bye" and not isinstance(answer, GeomxError):
            # Heartbeats continue. They show the peer that the connection was then closed, not cut.
            over = partial(self._parted, link)
            self._rpc.ask(link, "gone", {}, over, over, PARTING, "always")
        else:
            self._parted(link, answer)

    def _parted(self, link: Link, _: Body | GeomxError) -> None:
        self._pending.discard(link)
        if self._last_message == "bye" and link not in self.leaving:
            self._liveness.forget(link)  # it may have ended while this process waits for others
        self._stop_when_over()

    def _stop_when_over(self) -> None:
        """Stop when no answer is pending and, unless failing, no peer can have missed an answer of ours."""
        if self._pending:
            return
        if self._last_message == "fail" or not self.leaving:
            self._loop.stop()
        elif not self._waits:
            self._waits = True
            self._loop.call_later(self._silence, self._loop.stop)
