"""A node's membership of one plane: join, roster, failure, goodbye. The other end is the plane's scheduler."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from geomx_cli.core.errors import GeomxError, InvalidSettings, PeerLost, TimedOut
from geomx_cli.core.event_log import EventLog
from geomx_cli.core.events import StateChanged, Telemetry, WarningRaised
from geomx_cli.core.units import counted
from geomx_cli.ps.cluster.bodies import blame_in
from geomx_cli.ps.cluster.config import NodeSettings, PlaneSettings
from geomx_cli.ps.cluster.liveness import Liveness
from geomx_cli.ps.cluster.rpc import Request, Rpc
from geomx_cli.ps.net.loop import Loop
from geomx_cli.ps.net.transport import Transport
from geomx_cli.ps.net.wire import BadMessage

__all__ = ["MemberNode", "Membership", "RosterEntry"]

QUIET, UNREACHED = 0.1, 0.9
"""Parts of the option `timeout` after which a node says that its scheduler has said nothing at all, and gives it up:
before that one misses the node, for the node knows which link it is."""


@dataclass(frozen=True)
class RosterEntry:
    """A process of a plane, as listed in the roster. `endpoints`: where others dial it (empty for workers); the first
    TCP endpoint is for its own party, the last for other parties.
    """

    process: str
    party: str
    host: str
    role: str
    rank: int
    endpoints: tuple[str, ...] = ()

    def endpoint_for(self, host: str, party: str) -> str:
        """The endpoint for a process of `party` on `host`: a unix socket on the same planned host, else TCP."""
        near = host != "" and host == self.host
        fitting = [item for item in self.endpoints if item.startswith("ipc:") == near] or list(self.endpoints)
        return fitting[0 if party == self.party else -1]


class MemberNode(Protocol):
    """What a membership requires of its node."""

    process: str
    settings: NodeSettings
    timeout: float
    joining: float
    telemetry: Telemetry
    events: EventLog
    loop: Loop
    rpc: Rpc
    liveness: Liveness
    transport: Transport

    def fail(self, error: GeomxError) -> None:
        """End the node with an error."""


class Membership:
    """Created by Node.join. `rank` and `members` are set once the roster has arrived.

    `over`: no further message is expected, because the scheduler is gone or ending.
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
        self.members: list[RosterEntry] = []
        self.over = False
        self._node = node
        self._on_roster = on_roster
        self._plane = plane
        self._missing = "the others"
        self._heard, self._began = False, time.monotonic()
        settings = node.settings
        self.link = node.transport.dial(
            plane.to_dial(), f"the scheduler at {plane.endpoint}", wide_area=facts.pop("wide_area", False)
        )
        body = {
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
        node.rpc.ask(self.link, "join", body, self._joined, self._refused, limit=node.joining + 5)

    def servers(self) -> list[RosterEntry]:
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

    def on_request(self, request: Request) -> None:
        """Handle the scheduler's notifications."""
        topic, body = request.topic, request.body
        self._hear()
        if topic == "pending":
            self._node.liveness.watch(self.link)  # as the scheduler does from now on
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
        self._hear()
        self.rank = body["rank"]
        self.link.name = body["scheduler"]
        self._node.liveness.watch(self.link)
        self.members = [RosterEntry(**{**item, "endpoints": tuple(item["endpoints"])}) for item in body["members"]]
        self._on_roster(self)

    def _refused(self, error: GeomxError) -> None:
        self._deadline.cancel()
        self._hear()
        self.over = True
        self._node.fail(InvalidSettings(f"{self.link.name} refused this process: {error.message}", error.hint))

    def _hear(self) -> None:
        self._heard = True

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
