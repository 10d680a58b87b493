"""The scheduler of one plane: assigns ranks, publishes the roster, and monitors the members.

It sends the roster once all members have joined, detects lost members, reports failures to all, and ends when all
members have said goodbye. Training does not involve it.

Scripts that an agent has started may take any time until they join. In a job that no control machine follows, agents
keep a connection for processes that have not joined (runtime/presence.py). So the loss of a host is noticed before they
join.

A member that is restarted joins again, and gets the same roster. If the scheduler has a folder that outlives it, it
keeps the roster, and which members have left, in a file. If it is restarted before the roster exists, it has nothing to
keep: all processes ask again to join. If the folder has no room left, recovery ends with one warning, and the job
continues.
"""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geomx_cli.contract.config import NodeSettings, PlaneSettings
from geomx_cli.contract.security import Identity
from geomx_cli.core.conventions import party_of
from geomx_cli.core.errors import InvalidSettings, PeerLost, TimedOut
from geomx_cli.core.event_log import EventLog
from geomx_cli.core.events import RosterComplete, StateChanged
from geomx_cli.core.state_notes import end_recovery
from geomx_cli.core.units import counted
from geomx_cli.ps.cluster.bodies import Body, blame_in
from geomx_cli.ps.cluster.members import Member, Members
from geomx_cli.ps.cluster.membership import PARTING
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.loop import Timer
from geomx_cli.ps.net.wire import BadMessage, Header

if TYPE_CHECKING:
    from geomx_cli.ps.state_file import StateFile

__all__ = ["PRESENCE", "Scheduler"]

PRESENCE = "presence"
"""The plane in hellos of agents. They dial in the name of a process, which may dial at the same time."""
PENDING_INTERVAL = 2.0
_FILE = "scheduler"
MAX_RANK = 65_535
MAX_ENDPOINTS = 64
ENDPOINT = re.compile(r"tcp://[^\s/]{1,255}:[1-9]\d{0,4}|ipc://[^\0]{1,107}")


@dataclass
class _Host:
    """A host, and its processes that have not joined."""

    name: str
    awaited: set[str]


class Scheduler:
    """`run` returns when all members have ended normally. It raises PeerLost if a member failed or fell silent, and
    TimedOut if not all members have joined in time.
    """

    def __init__(self, settings: NodeSettings, plane: PlaneSettings, events: EventLog) -> None:
        self._plane, self._global = plane, settings.role == "global_scheduler"
        self._members = Members()
        self._joins: dict[Member, Request] = {}  # to be answered with the roster
        self._hosts: dict[Link, _Host] = {}  # by the connection that its agent keeps
        self._unheard: Timer | None = None
        self._complete = False
        self._keeps = bool(settings.state_dir)
        self._saved: StateFile | None = None  # once it is needed: it imports numpy
        self.node = Node(
            settings, events, on_tensor=self._on_tensor, on_request=self._on_request, on_link=self._on_link,
            on_gone=self._on_gone, on_lost=self._lose, members=self._present,
        )  # fmt: skip
        endpoints = settings.bind or plane.to_listen()
        self.node.guard(endpoints)
        self.node.transport.listen(endpoints)
        self.node.loop.call_later(self.node.joining, self._expire)
        self.node.loop.every(PENDING_INTERVAL, self._notify_pending)
        if settings.incarnation:
            self._restore()

    def run(self) -> None:
        """Serve until the plane has ended."""
        self.node.telemetry.state = "serving" if self._complete else "waiting"
        try:
            self.node.run()
        finally:
            self.node.close()
            if self._saved is not None:
                self._saved.close()

    def _on_tensor(self, link: Link, header: Header, payload: memoryview | None) -> None:
        raise BadMessage("a tensor for a scheduler")

    def _on_request(self, request: Request) -> None:
        member = self._members.at(request.link)
        if request.topic == "join":
            self._join(request)
        elif member is None:
            self._on_request_of_agent(request)
        elif request.topic == "bye":
            member.state = "left"
            self._save()
            self.node.shutdown.answer_bye(request)
            self._end_if_over()
        elif request.topic == "fail":
            member.state = "gone"
            self._fail(request, member)
        else:
            raise BadMessage(f"unknown topic {request.topic!r}")

    def _on_request_of_agent(self, request: Request) -> None:
        """An agent reports about its host, in the name of one of the host's processes."""
        of_itself = request.topic in ("fail", "absent") and request.body["process"] == request.link.name
        if request.topic == "absent" and of_itself and request.link.name in self._joined():
            request.answer()
        elif of_itself:
            self._fail(request, None)
        elif request.topic == "awaited":
            self._await(request)
        else:
            raise BadMessage(f"{request.topic!r} from a process that has not joined")

    def _fail(self, request: Request, by: Member | None) -> None:
        request.answer()
        self.node.fail(self._reported(by, request.body))

    def _reported(self, by: Member | None, body: Body) -> PeerLost:
        """The failure that a member reports.

        by: the member; None for the failed process itself, before it has joined.

        A worker knows only its plane and its party, and a local server in the global plane likewise. If such a member
        reports any other process, the report counts as its own failure. A server learns of other processes through its
        other plane.
        """
        peer, message, hint = body["process"], body["message"], body.get("hint", "")
        blame = blame_in(body)
        if by is None:
            return PeerLost(message, hint, **blame)
        of_party = party_of(peer) == party_of(by.process)
        if peer == by.process or by.role == "server" or (of_party and self._global):
            return PeerLost(message, hint, **blame)
        if peer in (*self._joined(), self.node.process) or "/" not in peer or of_party:
            return PeerLost(f"{message} (reported by {by.process})", hint, **blame)
        what = f"{by.process} reported that {peer} failed, of which it cannot know: {message}"
        return PeerLost(what, f"see the log of {by.process}: another program may have its key", peer=by.process)

    def _join(self, request: Request) -> None:
        self._open()
        member = self._members.at(request.link)
        try:
            if member is not None:
                self._check_again(member, request)
            else:
                self._members.add(member := self._checked(request))
        except InvalidSettings as error:
            request.refuse(error)
            return
        if self._complete:
            self._answer(member, request)
            return
        self._joins[member] = request
        for host in self._hosts.values():
            host.awaited.discard(member.process)
        if not self._missing():
            self._announce()

    def _await(self, request: Request) -> None:
        """The agent of a host tells, in the name of one of its processes, which processes have not joined. It sends
        several requests if they are many. A request without any processes says that the agent leaves.
        """
        link, body = request.link, request.body
        for other in [known for known in self._hosts if known.name == link.name and known is not link]:
            self._forget_host(other)  # of a process that has ended
        if not body["processes"]:
            self._forget_host(link)
        elif not self._complete:
            known = self._hosts.get(link) or _Host(body["host"], set())
            awaited = known.awaited.union(body["processes"]) - self._joined()
            if len(awaited) > self._plane.servers + self._plane.workers:
                raise BadMessage(f"{link.name} awaits {len(awaited)} processes, more than the plane has")
            self._hosts[link] = _Host(known.name, awaited)
            self.node.liveness.watch(link)  # also once all its processes have joined: the agent hears that we run
            limit = self.node.settings.number("silence") + self.node.timeout
            self._unheard = self._unheard or self.node.loop.call_later(limit, partial(self._check_unheard, limit))
        request.answer()

    def _forget_host(self, link: Link) -> None:
        """Stop monitoring an agent's connection."""
        if self._hosts.pop(link, None) is not None:
            self.node.liveness.forget(link)

    def _check_unheard(self, limit: float) -> None:
        """All agents have had time to connect. If a missing process's agent has not connected, its host was lost
        before.
        """
        heard = len(self._members) + len({name for host in self._hosts.values() for name in host.awaited})
        if not self._complete and heard < self._plane.servers + self._plane.workers:
            names = ", ".join(sorted({host.name for host in self._hosts.values()}))
            hint = "a host has been lost, which is none of those whose processes have joined"
            hint += f", nor of {names}" * bool(names)
            what = f"waited {limit:g} s for {self._missing()}, and not all of their hosts have been heard of"
            self.node.fail(TimedOut(what, hint))

    def _checked(self, request: Request) -> Member:
        """The record of a process that joins. Raises InvalidSettings for a process that may not join."""
        body, plane = request.body, self._plane
        theirs = (body["servers"], body["workers"])
        if theirs != (plane.servers, plane.workers):
            raise InvalidSettings(
                f"{body['process']} expects {counted(theirs[0], 'server')} and {counted(theirs[1], 'worker')},"
                f" its scheduler {plane.servers} and {plane.workers}",
                "give every process of the plane the same DMLC_NUM_* variables",
            )
        role, wanted = body["role"], body.get("rank")
        self._check_identity(request.link, body["process"], role, wanted)
        limit = plane.servers if role == "server" else plane.workers
        joined = [item for item in self._members if item.role == role]
        if self._complete or len(joined) >= limit:
            message = f"all {limit} {role}s of this plane have joined already"
            raise InvalidSettings(message, "is an old process still running?")
        if wanted is not None and (
            not 0 <= wanted < min(limit, MAX_RANK) or any(item.wanted == wanted for item in joined)
        ):
            raise InvalidSettings(f"{role} rank {wanted} is taken or beyond {limit - 1}", "each rank is given once")
        return Member(
            body["process"], body["party"], body["host"], role, -1, _endpoints(body), wanted, body.get("group", ""),
            link=request.link,
        )  # fmt: skip

    def _check_again(self, member: Member, request: Request) -> None:
        """A member joins again, because either end was restarted. Raises InvalidSettings if its role, rank or endpoints
        differ from before.
        """
        body, wanted = request.body, request.body.get("rank")
        if wanted == member.rank:  # it was told that one
            wanted = member.wanted
        self._check_identity(request.link, body["process"], body["role"], wanted)
        endpoints = _endpoints(body)
        if not self._complete:
            member.endpoints = endpoints  # no process has dialled them yet
        if (body["role"], wanted, endpoints) != (member.role, member.wanted, member.endpoints):
            what = f"{member.process} was restarted as {body['role']} {wanted} on {' '.join(endpoints)}, and was"
            what += f" {member.role} {member.wanted} on {' '.join(member.endpoints)}"
            raise InvalidSettings(what, "restart a process with the variables that it had")

    def _check_identity(self, link: Link, process: str, role: str, rank: int | None) -> None:
        """Raise InvalidSettings if a process joins with an identity that differs from its key's or from its earlier
        one.
        """
        keys, own = self.node.keys, Identity(process, role, -1 if rank is None else rank)
        if process != link.name:
            raise InvalidSettings(f"{link.name} joins as {process}", "start it anew")
        if keys is not None and keys.identity(process) != own:
            what = f"{process} joins as {role} {rank}, for which its key was not made"
            raise InvalidSettings(what, "give each process the key file and the variables that were made for it")

    def _missing(self) -> str:
        present = [member.role for member in self._members]
        parts = []
        for role, count in (("server", self._plane.servers), ("worker", self._plane.workers)):
            if present.count(role) < count:
                parts.append(f"{count - present.count(role)} of {counted(count, role)}")
        return " and ".join(parts)

    def _announce(self) -> None:
        """Assign ranks to members that have none (members of a group get consecutive ranks), and send the roster to
        all.
        """
        self._complete = True
        for link in list(self._hosts):
            self._forget_host(link)
        for role in ("server", "worker"):
            members = [member for member in self._members if member.role == role]
            taken = {member.wanted for member in members}
            groups = list(dict.fromkeys(member.group for member in members))
            free = iter(rank for rank in range(len(members)) if rank not in taken)
            for member in sorted(members, key=lambda member: groups.index(member.group)):
                member.rank = member.wanted if member.wanted is not None else next(free)
                member.state = member.state if member.has_left else "in"
        self._save()
        for member, request in self._joins.items():
            self._answer(member, request)
        self._joins.clear()
        self.node.telemetry.state = "serving"
        roster = self._roster()
        names = ", ".join(member["process"] for member in roster)
        self.node.events.write(RosterComplete(members=roster, message=f"all members have joined: {names}"))

    def _answer(self, member: Member, request: Request) -> None:
        """Send the roster."""
        self.node.liveness.watch(request.link, self._absence(member))
        request.answer({"rank": member.rank, "members": self._roster(), "scheduler": self.node.process})

    def _roster(self) -> list[dict[str, Any]]:
        """Servers, then workers, by rank."""
        return [each.announced() for each in sorted(self._members, key=lambda each: (each.role, each.rank))]

    def _notify_pending(self) -> None:
        if not self._complete:
            for request in self._joins.values():
                request.link.control("pending", {"missing": self._missing()})
                self.node.liveness.watch(request.link)

    def _expire(self) -> None:
        if not self._complete:
            self.node.fail(
                TimedOut(
                    f"waited {self.node.timeout:g} s for {self._missing()}",
                    "see their logs: a script may not have got as far as to join; a process that was started by hand"
                    " needs this scheduler's address and the same counts",
                )
            )

    def _lose(self, link: Link, error: PeerLost) -> PeerLost | None:
        if (host := self._hosts.pop(link, None)) is None:
            self._on_gone(link)
            return error
        if not host.awaited:  # processes that have joined there are monitored separately
            return None
        silence = self.node.settings.number("silence")
        what = f"host {host.name} of {link.name} has been silent for {silence:g} s"
        what += f", and {counted(len(host.awaited), 'process')} there had not joined"
        hint = f"see whether it runs, and its link to host {self.node.settings.host}"
        return PeerLost(what, hint, peer=link.name, missed="silent", seconds=silence)

    def _joined(self) -> set[str]:
        return {member.process for member in self._members}

    def _present(self) -> list[Link]:
        here = [member.link for member in self._members if member.link is not None and not member.has_left]
        return [*here, *self.node.shutdown.leaving]

    # Over a restart.

    def _on_link(self, link: Link) -> None:
        """A process dials. If it is in the roster of this scheduler's earlier life, its membership continues."""
        absent = {member.process for member in self._members if member.link is None}
        if link.name not in absent or link.hello.get("plane") == PRESENCE:
            return
        self._members.add(Member(link.name, link=link))
        member = self._members.at(link)
        if member is not None and member.state != "gone":
            self.node.liveness.watch(link, self._absence(member))
            if member.state == "left":
                self.node.shutdown.expect_gone(link)
        self._end_if_over()

    def _on_gone(self, link: Link) -> None:
        if (member := self._members.at(link)) is not None:
            member.state = "gone"
            self._save()

    def _end_if_over(self) -> None:
        """End if all members have said goodbye, and know that this has arrived."""
        heard = all(member.state == "gone" or member.link is not None for member in self._members)
        if self._complete and heard and all(member.has_left for member in self._members):
            self.node.goodbye()

    def _open(self) -> None:
        if self._keeps and self._saved is None:
            from geomx_cli.ps.state_file import StateFile

            try:
                self._saved = StateFile(Path(self.node.settings.state_dir, _FILE))
            except OSError as error:
                self._end_recovery(error)

    def _save(self) -> None:
        """Save the state that must survive a restart, before any process learns of it."""
        if self._saved is None or not self._complete or self.node.error is not None:
            return
        try:
            self._saved.commit("members", self._members.save(), {})
        except OSError as error:
            self._end_recovery(error)

    def _end_recovery(self, error: OSError) -> None:
        """End recovery: remove the saved state, which no longer matches the answers that members have."""
        self._keeps = False
        if self._saved is not None:
            self._saved.close()
            self._saved = None
        folder = Path(self.node.settings.state_dir)
        end_recovery(folder, [_FILE], error.strerror or str(error), "scheduler", self.node.transport.warn)

    def _restore(self) -> None:
        """Take over the roster of the earlier life, if it had one."""
        self._open()
        for _, saved in self._saved.load() if self._saved is not None else ():
            self._members.load(saved.fields)
            self._complete = True
            message = f"restarted, and has the roster of {counted(len(self._members), 'member')}"
            self.node.events.write(StateChanged(state="serving", message=message))
            self.node.loop.call_later(PARTING, self._miss_leaving)
            silence = self.node.settings.number("silence")
            for limit in {silence, *(max(silence, self._absence(member)) for member in self._members)}:
                self.node.loop.call_later(limit, partial(self._miss, limit))
        self._end_if_over()

    def _miss_leaving(self) -> None:
        """Members that said goodbye before the restart have by now either ended or dialled again."""
        for member in self._members:
            if member.link is None and member.state == "left":
                member.state = "gone"
        self._end_if_over()

    def _absence(self, member: Member) -> float:
        """For how long a member's link may be silent, if it may be longer than others: its party may be left out."""
        return self.node.absence if self._global and member.role == "worker" else 0.0

    def _miss(self, silence: float) -> None:
        """All members that may be silent for no longer have had time to dial again."""
        for member in self._members:
            if member.link is None and not member.has_left and self._absence(member) <= silence:
                what = f"{member.process} has been silent for {silence:g} s, since {self.node.process} was restarted"
                hint = "see its log, whether its machine runs, and the link"
                self.node.fail(PeerLost(what, hint, peer=member.process, missed="silent", seconds=silence))


def _endpoints(body: Body) -> tuple[str, ...]:
    """The endpoints where others may dial a joining process. Raises InvalidSettings if it cannot be dialled."""
    endpoints = tuple(body.get("endpoints", ()))
    if len(endpoints) > MAX_ENDPOINTS or not all(ENDPOINT.fullmatch(item) for item in endpoints):
        raise InvalidSettings(f"{body['process']} listens on {endpoints}, which cannot be dialled", "correct it")
    return endpoints

