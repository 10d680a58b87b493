"""The members below a server, workers or local servers of the parties: arrived, training, left, done."""

from collections.abc import Iterable, Mapping

from geomx_cli.ps.cluster.config import NodeSettings
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import EVERY, BadMessage

__all__ = ["CENTRAL", "ServerMembers"]

CENTRAL = 32_768
"""Ranks of central workers among a root's contributors begin here, behind every party's."""


class ServerMembers:
    """The members of one server, by the rank under which they contribute.

    At a local server and in a flat cluster that is the worker's rank; at a root the party's index (all local servers of
    a party share it), and CENTRAL + rank for workers of the central party.
    """

    def __init__(self, settings: NodeSettings, is_root: bool) -> None:
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
        self._links: dict[int, list[Link]] = {}
        self._arrived: set[Link] = set()
        self._left: set[int] = set()
        self._settled: set[int] = set()
        self._farewells: set[Link] = set()

    def arrive(self, link: Link) -> None:
        """Register a member that has dialled. Raises BadMessage for a second one of the same rank, and for a local
        server whose number of workers differs from that of its party's others, or exceeds the plan.
        """
        rank, plane, workers = link.hello.get("rank"), link.hello.get("plane"), link.hello.get("workers", 1)
        if type(rank) is not int or not 0 <= rank < CENTRAL or plane not in self._planes:
            raise BadMessage("an arrival without rank and plane")
        if type(workers) is not int or not 1 <= workers < CENTRAL:
            raise BadMessage(f"an arrival of {workers!r} workers")
        own = rank + CENTRAL if self._two_planes and plane == "local" else rank
        others = self.links(own)
        if plane == "global":
            self._check_workers(link, workers, others)
        elif others:
            raise BadMessage(f"a second worker of rank {rank}")
        link.hello |= {"contributor": own, "workers": workers if plane == "global" else 1}
        self._links.setdefault(own, []).append(link)
        self._arrived.add(link)

    def _check_workers(self, link: Link, workers: int, others: list[Link]) -> None:
        """Check the number of workers that a local server claims; `others`: those of its party that have arrived."""
        told = [other.hello["workers"] for other in others]
        if told and workers != told[0]:
            raise BadMessage(f"{link.name} claims {workers} workers, and {others[0].name} of its party {told[0]}")
        if self._most_workers and not told and sum(self.workers_by_party()) + workers > self._most_workers:
            raise BadMessage(f"{link.name} claims {workers} workers, more than the plan of {self._most_workers} has")

    def arrived(self) -> list[Link]:
        """All members that have arrived."""
        return list(self._arrived)

    def knows(self, link: Link) -> bool:
        """Whether this peer has arrived."""
        return link in self._arrived

    def rank_of(self, link: Link) -> int:
        """The rank under which this peer contributes. Raises BadMessage if it has not arrived."""
        if not self.knows(link):
            raise BadMessage("a message from a process that has not arrived")
        return int(link.hello["contributor"])

    def leave(self, link: Link) -> None:
        """This member owes no more contributions."""
        self._left.add(self.rank_of(link))

    def settle(self, rank: int) -> bool:
        """This member has finished setting up the job; True if rounds were waiting for that."""
        waited = rank in self.initializing()
        self._settled.add(rank)
        return waited

    def set_up_again(self, rank: int) -> None:
        """A master that does not train changes the job: no round closes until it has settled again."""
        self._settled.discard(rank)

    def goodbye(self, link: Link) -> bool:
        """This member is done; True when all are."""
        self._farewells.add(link)
        return len(self._farewells) >= self._expected

    @property
    def complete(self) -> bool:
        """Whether all members have arrived."""
        return len(self._arrived) >= self._expected

    def links(self, rank: int) -> list[Link]:
        """The links of one rank: several if a party has several local servers."""
        return self._links.get(rank, [])

    def local_servers(self) -> list[Link]:
        """The links to the parties' local servers; none in a flat cluster."""
        return [link for rank, links in self._links.items() if self.is_party(rank) for link in links]

    def trains(self, rank: int) -> bool:
        """Whether this rank contributes, that is, is not a master worker that does not train."""
        return rank < CENTRAL or self._central_train

    def may_be_master(self, rank: int, scope: str) -> bool:
        """Whether this rank is the job's master worker, or a party that may have it, as far as this server knows.

        scope: the job's rank scope; "" if it is not known, as at the later roots of a job started by hand. Then the
        first root has decided about parties. By hand, any process of the central party may be the master.
        """
        if self._is_flat:
            return rank == 0
        if not self._two_planes:
            return rank == 0 or not (self._planned or scope == "global")
        if scope == "global":
            return rank == 0
        if not self.is_party(rank):
            return rank == CENTRAL or not self._planned
        if any(other >= CENTRAL for other in self._links):
            return not scope
        return rank == max(self._links) or not self._planned  # a central party with a local server is the last one

    def is_party(self, rank: int) -> bool:
        """Whether this rank is a party with local servers, not a worker."""
        return self._two_planes and rank < CENTRAL

    def shard_of(self, rank: int) -> int:
        """The shard of a party's keys that this rank contributes, as a worker does; EVERY for a party at a root."""
        return EVERY if self.is_party(rank) else rank % CENTRAL

    def cohort_of(self, rank: int) -> int:
        """The cohort of this rank if parties complete rounds separately; central workers share one.

        Starts at 1, as 0 is the cohort of all members together.
        """
        return (CENTRAL if self._two_planes and rank >= CENTRAL else rank) + 1

    def by_party(self, rounds: Mapping[int, int]) -> dict[str, int]:
        """Map values by number of `cohort_of` to the names of parties, or of workers in a flat cluster."""
        names = {
            self.cohort_of(rank): str(links[0].hello.get("party")) if self._two_planes else links[0].name
            for rank, links in self._links.items()
            if self.trains(rank)
        }
        return {name: rounds.get(number, 0) for number, name in names.items()}

    def initializing(self) -> list[int]:
        """The master workers that do not train and have not finished setting up the job.

        One has finished when it has set an optimizer, pulled, or left. No round closes before: the others may be
        faster, and a first round without the optimizer would replace the weights with sums of gradients.
        """
        done = self._settled | self._left
        return [rank for rank in self._links if rank not in done and not self.trains(rank)]

    def required_contributors(self) -> list[int] | None:
        """All ranks that owe contributions; None while no round may close: members are missing, or one is setting up.
        """
        return self.training() if self.complete and not self.initializing() else None

    def training(self) -> list[int]:
        """The members that train and have not left."""
        return [rank for rank in self._links if rank not in self._left and self.trains(rank)]

    def names(self, ranks: Iterable[int]) -> list[str]:
        """The names of the processes of these ranks."""
        return [link.name for rank in sorted(ranks) for link in self.links(rank)]

    def of_own_plane(self) -> list[int]:
        """The members of a party's barrier: at a root with a global plane, the central party's processes."""
        return [rank for rank in self._links if rank not in self._left and (rank >= CENTRAL) == self._two_planes]

    def all_on(self, host: str) -> bool:
        """Whether all members run on this planned host."""
        return all(link.hello.get("host") == host for link in self._arrived)

    def workers_by_party(self) -> list[int]:
        """The number of workers of each party; in a flat cluster each worker counts as one."""
        parties = [links[0].hello for rank, links in sorted(self._links.items()) if rank < CENTRAL]
        return [int(hello["workers"]) for hello in parties]

    def workers(self) -> int:
        """The number of training workers of the job, at a root."""
        return sum(self.workers_by_party()) + self.central_workers()

    def counts_differ(self) -> bool:
        """Whether scripts in different parties are told different numbers of workers (rank scope "party")."""
        return not self._ranks_are_global and len(set(self.workers_by_party())) > 1

    def central_workers(self) -> int:
        """The number of training workers of the central party."""
        return sum(rank >= CENTRAL for rank in self._links) if self._central_train else 0
