"""One record for each process that a process knows; a server's members; the members' barriers."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from geomx_cli.contract.config import NodeSettings
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import EVERY, BadMessage

__all__ = ["CENTRAL", "Barrier", "Member", "Members", "ServerMembers"]

CENTRAL = 32_768
"""Central workers have ranks from here on among a root's contributors, after all parties."""
_ANNOUNCED = ("process", "party", "host", "role", "rank", "endpoints")


@dataclass(slots=True, eq=False)
class Member:
    """The record of one process.

    process: its name.
    party, host: as planned.
    role: in its plane, "server" or "worker"; at a root, "party" for a party's local server.
    rank: in its plane, -1 until it is assigned; at a server, the rank under which it contributes.
    endpoints: where others dial it; none for workers. The first TCP endpoint is for its party, the last for others.
    wanted: at a scheduler: the rank that it requests.
    group: at a scheduler: the processes that get consecutive ranks with it.
    workers: at a server: the number of workers that contribute through it.
    state: "joining" until its identity is checked against the roster; "in"; "out": its party has fallen silent, and
        rounds do not wait for it; "left": it contributes no more; "gone": it has said goodbye, or was lost.
    out_since, out_round: at a root: when its party was last left out (Unix seconds), and the newest round then; 0 if
        that never happened.
    is_set_up: at a server: see ServerMembers.initializing.
    link: the present link to it; None before it dials. It is not saved.
    """

    process: str
    party: str = ""
    host: str = ""
    role: str = ""
    rank: int = -1
    endpoints: tuple[str, ...] = ()
    wanted: int | None = None
    group: str = ""
    workers: int = 1
    state: Literal["joining", "in", "out", "left", "gone"] = "joining"
    out_since: float = 0.0
    out_round: int = 0
    is_set_up: bool = False
    link: Link | None = None

    def endpoint_for(self, host: str, party: str) -> str:
        """The endpoint for a process of `party` on `host`: a unix socket on the same planned host, otherwise TCP."""
        near = host != "" and host == self.host
        fitting = [item for item in self.endpoints if item.startswith("ipc:") == near] or list(self.endpoints)
        return fitting[0 if party == self.party else -1]

    def announced(self) -> dict[str, Any]:
        """The fields of this process in a roster (bodies.py)."""
        return {name: getattr(self, name) for name in _ANNOUNCED}

    @property
    def has_left(self) -> bool:
        """Whether the process contributes no more."""
        return self.state in ("left", "gone")


class Members:
    """A table of processes, in the order in which they came. `save` and `load` preserve it over a restart."""

    def __init__(self) -> None:
        self._all: list[Member] = []
        self._by_link: dict[Link, Member] = {}

    def add(self, member: Member) -> None:
        """Add a record, or give its link to the loaded record of the same process."""
        assert member.link is not None
        known = next((other for other in self._all if other.link is None and other.process == member.process), None)
        if known is not None:
            known.link = member.link
        else:
            self._all.append(member)
        self._by_link[member.link] = known or member

    def at(self, link: Link) -> Member | None:
        """The record of the process at this link; None if the process has not come."""
        return self._by_link.get(link)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def save(self) -> list[dict[str, Any]]:
        """All records as plain data."""
        saved = [each.name for each in fields(Member) if each.name != "link"]
        return [{name: getattr(member, name) for name in saved} for member in self._all]

    def load(self, saved: Iterable[Mapping[str, Any]]) -> None:
        """Take over the records of `save`, whose processes have no link yet."""
        self._all = [Member(**{**fields, "endpoints": tuple(fields["endpoints"])}) for fields in saved]
        self._by_link = {}


class ServerMembers(Members):
    """The members of one server, by the rank under which they contribute.

    At a local server and in a flat cluster, this is the worker's rank. At a root it is the party's index, which all
    local servers of the party share, or CENTRAL + rank for workers of the central party.
    """

    def __init__(self, settings: NodeSettings, is_root: bool) -> None:
        super().__init__()
        self._two_planes = is_root and settings.upper is not None
        self._planes = {"global"} if self._two_planes else set[str]()
        self._planes |= {"local"} if settings.local is not None else set()
        self._is_flat, self._planned = settings.upper is None, settings.rank is not None
        self._most_workers = settings.num_all_workers if self._planned else 0  # 0: not known
        self._central_train = settings.central_workers
        self._ranks_are_global = settings.upper is None or settings.options.get("rank_scope") == "global"
        self._expected = settings.local.workers if settings.local is not None else 0
        if self._two_planes and settings.upper is not None:
            self._expected += settings.upper.workers
        self._by_rank: dict[int, list[Member]] = {}
        self._required: list[int] | None = None  # kept up to date, because each contribution reads it
        self._out: list[int] = []  # likewise

    def arrive(self, link: Link) -> None:
        """Register a member that has dialled. Raises BadMessage for a second member of the same rank. Also raises it
        for a local server whose number of workers exceeds the plan, or differs from the number that its party's other
        servers claim.
        """
        rank, plane, workers = link.hello.get("rank"), link.hello.get("plane"), link.hello.get("workers", 1)
        if type(rank) is not int or not 0 <= rank < CENTRAL or plane not in self._planes:
            raise BadMessage("an arrival without rank and plane")
        if type(workers) is not int or not 1 <= workers < CENTRAL:
            raise BadMessage(f"an arrival of {workers!r} workers")
        own = rank + CENTRAL if self._two_planes and plane == "local" else rank
        if (known := self._known(link)) is not None:
            self._come_back(known, own, workers if plane == "global" else 1, link)
            return
        others = [other for other in self.of_rank(own) if other.link is not None]
        if plane == "global":
            self._check_workers(link, workers, others)
        elif others:
            raise BadMessage(f"a second worker of rank {rank}")
        self.add(
            Member(
                link.name, str(link.hello.get("party")), str(link.hello.get("host")),
                "party" if plane == "global" else "worker", own, workers=workers if plane == "global" else 1,
                state="in", link=link,
            )
        )  # fmt: skip
        link.hello["workers"] = workers if plane == "global" else 1
        self._index()

    def load(self, saved: Iterable[Mapping[str, Any]]) -> None:
        """See Members."""
        super().load(saved)
        self._index()

    def _known(self, link: Link) -> Member | None:
        """The member of this name that arrived in an earlier life of the server, and has not arrived in this life."""
        return next((member for member in self if member.link is None and member.process == link.name), None)

    def _come_back(self, member: Member, rank: int, workers: int, link: Link) -> None:
        if (member.rank, member.workers) != (rank, workers):
            raise BadMessage(f"{link.name} comes back as rank {rank} with {workers} workers, as which it did not come")
        link.hello["workers"] = workers
        member.link = link
        self._by_link[link] = member

    def _index(self) -> None:
        self._by_rank = {}
        for member in self:
            self._by_rank.setdefault(member.rank, []).append(member)
        self._require()

    def _require(self) -> None:
        """Compute again which members must contribute."""
        self._out = [rank for rank, members in self._by_rank.items() if any(each.state == "out" for each in members)]
        self._required = self.training() if self.complete and not self.initializing() else None

    def _check_workers(self, link: Link, workers: int, others: list[Member]) -> None:
        """Check the number of workers that a local server claims.

        others: the local servers of its party that have joined.
        """
        if others and workers != others[0].workers:
            claimed = f"{others[0].process} of its party {others[0].workers}"
            raise BadMessage(f"{link.name} claims {workers} workers, and {claimed}")
        if self._most_workers and not others and sum(self.workers_by_party()) + workers > self._most_workers:
            raise BadMessage(f"{link.name} claims {workers} workers, more than the plan of {self._most_workers} has")

    def member(self, link: Link) -> Member:
        """The record of the member at this link. Raises BadMessage if it has not arrived."""
        member = self.at(link)
        if member is None:
            raise BadMessage("a message from a process that has not arrived")
        return member

    def rank_of(self, link: Link) -> int:
        """The rank under which this peer contributes. Raises BadMessage if it has not arrived."""
        return self.member(link).rank

    def leave(self, member: Member) -> None:
        """Neither this member nor another server of its party contributes any more."""
        member.state = "gone" if member.state == "gone" else "left"
        self._require()

    def leave_out(self, rank: int, since: float, round_: int) -> None:
        """Rounds and barriers do not wait for this party, until `take_in`. since: in Unix seconds. round_: the newest.
        """
        for member in self.of_rank(rank):
            member.state, member.out_since, member.out_round = "out", since, round_
        self._require()

    def take_in(self, rank: int) -> None:
        """This party takes part again."""
        for member in self.of_rank(rank):
            member.state = "in"
        self._require()

    def has_missed(self, rank: int) -> bool:
        """Whether rounds may have closed without this party."""
        return self.party(rank).out_since > 0

    def may_leave_out(self, ranks: Collection[int]) -> bool:
        """Whether at least half of the parties that have not left remain without these. Central workers are one party.

        Global rank 0 must remain: it evaluates, saves the model, and ends the training in time.
        """
        if 0 in ranks:  # the first party has it
            return False
        present = {min(rank, CENTRAL) for rank in self.training()}
        return 2 * len(present.difference(ranks)) >= len(present) + len(self._out)

    @property
    def out(self) -> list[Member]:
        """One member of each party that is left out."""
        return [self.of_rank(rank)[0] for rank in self._out]

    def party(self, rank: int) -> Member:
        """The first server of this party to arrive."""
        return self.of_rank(rank)[0]

    def share_factor(self, ranks: Collection[int]) -> float:
        """The factor for the sum of a round to which these ranks have contributed. With it, each party that is left out
        counts as the mean of the others, by their workers.
        """
        absent = [rank for rank in self._out if rank not in ranks]
        if not absent:
            return 1.0
        present = sum(self.party(rank).workers for rank in self.training())
        return 1.0 + sum(self.party(rank).workers for rank in absent) / present if present else 1.0

    def set_up(self, rank: int) -> bool:
        """This member has finished setting up the job. Returns True if rounds were waiting for this."""
        waited = rank in self.initializing()
        if waited:
            self._mark_set_up(rank, True)
        return waited

    def set_up_again(self, rank: int) -> None:
        """A master that does not train changes the job: no round closes until it has finished again."""
        self._mark_set_up(rank, False)

    def _mark_set_up(self, rank: int, is_set_up: bool) -> None:
        for member in self.of_rank(rank):
            member.is_set_up = is_set_up
        self._require()

    def part_with(self, member: Member) -> None:
        """This member says goodbye."""
        member.state = "gone"
        self._require()

    @property
    def all_gone(self) -> bool:
        """Whether all members have said goodbye."""
        return sum(member.state == "gone" for member in self) >= self._expected

    @property
    def complete(self) -> bool:
        """Whether all members have arrived, in this life of the server or an earlier one."""
        return len(self) >= self._expected

    def of_rank(self, rank: int) -> list[Member]:
        """The members of one rank: several if a party has several local servers."""
        return self._by_rank.get(rank, [])

    def links(self, rank: int) -> list[Link]:
        """The links of one rank."""
        return [member.link for member in self.of_rank(rank) if member.link is not None]

    def local_servers(self) -> list[Link]:
        """The links to the parties' local servers; none in a flat cluster."""
        return [link for rank in self._by_rank if self.is_party(rank) for link in self.links(rank)]

    def trains(self, rank: int) -> bool:
        """Whether this rank contributes. Only a master worker that does not train never contributes."""
        return rank < CENTRAL or self._central_train

    def may_be_master(self, rank: int, scope: str) -> bool:
        """Whether this rank is the job's master worker, or a party that may have it, as far as this server knows.

        scope: the job's rank scope; "" if it is unknown, as at the later roots of a job started by hand. In that case
            the first root has decided about parties. By hand, any process of the central party may be the master.
        """
        if self._is_flat:
            return rank == 0
        if not self._two_planes:
            return rank == 0 or not (self._planned or scope == "global")
        if scope == "global":
            return rank == 0
        if not self.is_party(rank):
            return rank == CENTRAL or not self._planned
        if any(other >= CENTRAL for other in self._by_rank):
            return not scope
        return rank == max(self._by_rank) or not self._planned  # a central party with a local server is the last one

    def is_party(self, rank: int) -> bool:
        """Whether this rank is a party with local servers, not a worker."""
        return self._two_planes and rank < CENTRAL

    def shard_of(self, rank: int) -> int:
        """The shard of a party's keys that this rank contributes, as a worker does; EVERY for a party at a root."""
        return EVERY if self.is_party(rank) else rank % CENTRAL

    def cohort_of(self, rank: int) -> int:
        """The cohort of this rank if parties complete rounds separately. Central workers share one cohort.

        Starts at 1, because 0 is the cohort of all members together.
        """
        return (CENTRAL if self._two_planes and rank >= CENTRAL else rank) + 1

    def by_party(self, rounds: Mapping[int, int]) -> dict[str, int]:
        """Map values by number of `cohort_of` to the names of parties, or of workers in a flat cluster."""
        names = {
            self.cohort_of(rank): members[0].party if self._two_planes else members[0].process
            for rank, members in self._by_rank.items()
            if self.trains(rank)
        }
        return {name: rounds.get(number, 0) for number, name in names.items()}

    def initializing(self) -> list[int]:
        """The master workers that do not train and have not finished setting up the job.

        A master has finished when it has set an optimizer, pulled, or left. No round closes before that. Otherwise, if
        the others were faster, a first round without the optimizer would replace the weights with sums of gradients.
        """
        return [
            rank for rank, members in self._by_rank.items()
            if not self.trains(rank) and not any(member.is_set_up or member.has_left for member in members)
        ]  # fmt: skip

    def required_contributors(self) -> list[int] | None:
        """The ranks that owe contributions. None while no round may close, because members are missing or one sets up.
        """
        return self._required

    def training(self) -> list[int]:
        """The members that train, and have not left and are not left out."""
        return [rank for rank in self._present() if self.trains(rank) and rank not in self._out]

    def _present(self) -> list[int]:
        """The ranks that have not left."""
        return [rank for rank, members in self._by_rank.items() if not any(member.has_left for member in members)]

    def names(self, ranks: Iterable[int]) -> list[str]:
        """The names of the processes of these ranks."""
        return [member.process for rank in sorted(ranks) for member in self.of_rank(rank)]

    def of_own_plane(self) -> list[int]:
        """The members of a party's barrier: at a root with a global plane, the central party's processes."""
        return [rank for rank in self._present() if (rank >= CENTRAL) == self._two_planes]

    def all_on(self, host: str) -> bool:
        """Whether all members run on this planned host."""
        return all(member.host == host for member in self)

    def workers_by_party(self) -> list[int]:
        """The number of workers of each party; in a flat cluster each worker counts as one."""
        return [members[0].workers for rank, members in sorted(self._by_rank.items()) if rank < CENTRAL]

    def workers(self) -> int:
        """The number of training workers of the job, at a root."""
        return sum(self.workers_by_party()) + self.central_workers()

    def counts_differ(self) -> bool:
        """Whether scripts in different parties see different numbers of workers (rank scope "party")."""
        return not self._ranks_are_global and len(set(self.workers_by_party())) > 1

    def central_workers(self) -> int:
        """The number of training workers of the central party."""
        return sum(rank >= CENTRAL for rank in self._by_rank) if self._central_train else 0


class Barrier:
    """The barriers of one scope, which each rank numbers from 1. So a request that is repeated, or applied again from a
    log, changes nothing.

    A barrier does not wait for a rank that is no member (a master worker that does not train). Such a rank passes with
    the others.

    members: the ranks for which a barrier waits.
    reached: the last barrier that each rank has reached.
    met: the last barrier that all members have reached.
    """

    def __init__(self, members: Callable[[], Collection[int]]) -> None:
        self._members = members
        self.reached: dict[int, int] = {}
        self.met = 0

    def reach(self, rank: int, number: int) -> None:
        """This rank has reached barrier `number`, and so all earlier barriers too."""
        self.reached[rank] = max(number, self.reached.get(rank, 0))
        self.update()

    def update(self) -> None:
        """Members have reached a barrier, or left. If no members are left, barriers wait for no one."""
        everyone = max(self.reached.values(), default=0)
        self.met = max(self.met, min((self.reached.get(rank, 0) for rank in self._members()), default=everyone))

    def state(self) -> dict[str, Any]:
        """What `load` takes, and msgpack can hold."""
        return {"reached": list(self.reached.items()), "met": self.met}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self.reached = {int(rank): int(number) for rank, number in state["reached"]}
        self.met = int(state["met"])

    def missing(self) -> frozenset[int]:
        """The members that have not reached the next barrier."""
        return frozenset(rank for rank in self._members() if self.reached.get(rank, 0) <= self.met)
