"""Who stands below a server: workers, or the local servers of the parties; who has come, who has left, who is done."""

from collections.abc import Iterable, Mapping

from geomx_cli.ps.cluster.config import NodeSettings
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import BadMessage

__all__ = ["CENTRAL", "Members"]

CENTRAL = 32_768
"""Ranks of central workers among a root's contributors begin here, behind every party's."""


class Members:
    """The members of one server, by the rank under which they contribute.

    At a local server and in a flat cluster that is the worker's rank; at a root the party's index (all local servers
    of a party share it), and CENTRAL + rank for workers of the central party.
    """

    def __init__(self, settings: NodeSettings, is_root: bool) -> None:
        self._two_planes = is_root and settings.upper is not None
        self._central_train = settings.central_workers
        self._expected = settings.local.workers if settings.local is not None else 0
        if self._two_planes and settings.upper is not None:
            self._expected += settings.upper.workers
        self._links: dict[int, list[Link]] = {}
        self._arrived: set[Link] = set()
        self._left: set[int] = set()
        self._settled: set[int] = set()
        self._farewells: set[Link] = set()

    def arrive(self, link: Link) -> None:
        """A member has dialled. Raises BadMessage for a second one of the same rank."""
        rank, plane, workers = link.hello.get("rank"), link.hello.get("plane"), link.hello.get("workers", 1)
        if type(rank) is not int or not 0 <= rank < CENTRAL or plane not in ("local", "global"):
            raise BadMessage("an arrival without rank and plane")
        if type(workers) is not int or not 1 <= workers < CENTRAL:
            raise BadMessage(f"an arrival of {workers!r} workers")
        own = rank + CENTRAL if self._two_planes and plane == "local" else rank
        links = self._links.setdefault(own, [])
        if links and plane == "local":
            raise BadMessage(f"a second worker of rank {rank}")
        link.hello["contributor"] = own
        links.append(link)
        self._arrived.add(link)

    def arrived(self) -> list[Link]:
        """All that have come."""
        return list(self._arrived)

    def knows(self, link: Link) -> bool:
        """Whether this peer has arrived."""
        return link in self._arrived

    def rank_of(self, link: Link) -> int:
        """The rank under which this peer contributes. Raises BadMessage for one that has not arrived."""
        if not self.knows(link):
            raise BadMessage("a message from a process that has not arrived")
        return int(link.hello["contributor"])

    def leave(self, link: Link) -> None:
        """This member owes nothing more."""
        self._left.add(self.rank_of(link))

    def settle(self, rank: int) -> bool:
        """This member is past setting the job up; True if rounds have waited for that."""
        waited = rank in self.setting_up()
        self._settled.add(rank)
        return waited

    def set_up_again(self, rank: int) -> None:
        """A master that does not train changes the job: no round closes until it is settled again."""
        self._settled.discard(rank)

    def goodbye(self, link: Link) -> bool:
        """This member is done; True when all are."""
        self._farewells.add(link)
        return len(self._farewells) >= self._expected

    @property
    def complete(self) -> bool:
        """Whether all members have come."""
        return len(self._arrived) >= self._expected

    def links(self, rank: int) -> list[Link]:
        """The links of one rank: several where a party has several local servers."""
        return self._links.get(rank, [])

    def local_servers(self) -> list[Link]:
        """The parties' local servers; none in a flat cluster."""
        return [link for rank, links in self._links.items() if self.is_party(rank) for link in links]

    def trains(self, rank: int) -> bool:
        """Whether this rank contributes: it is no master worker that does not train."""
        return rank < CENTRAL or self._central_train

    def is_party(self, rank: int) -> bool:
        """Whether a party's local servers stand behind this rank, not a worker."""
        return self._two_planes and rank < CENTRAL

    def alone(self, rank: int) -> int:
        """With which rank this one goes through rounds where parties go by themselves: central workers go together.

        Ranks from 1 on, as 0 stands for all together.
        """
        return (CENTRAL if self._two_planes and rank >= CENTRAL else rank) + 1

    def by_party(self, rounds: Mapping[int, int]) -> dict[str, int]:
        """What is told for each number of `alone`, by the name of the party, or of the worker of a flat cluster."""
        names = {
            self.alone(rank): str(links[0].hello.get("party")) if self._two_planes else links[0].name
            for rank, links in self._links.items()
            if self.trains(rank)
        }
        return {name: rounds.get(number, 0) for number, name in names.items()}

    def setting_up(self) -> list[int]:
        """Master workers that do not train and are not yet past setting the job up.

        That is when one has set an optimizer, pulled, or left. No round closes before: the others may be faster, and a
        first round without the optimizer would put sums of gradients in the place of the weights.
        """
        return [rank for rank in self._links if not self.trains(rank) and rank not in self._settled | self._left]

    def owing(self) -> list[int] | None:
        """All ranks that owe contributions; None while no round may close: not all have come, or one is setting up."""
        return self.training() if self.complete and not self.setting_up() else None

    def training(self) -> list[int]:
        """Members that train and have not left."""
        return [rank for rank in self._links if rank not in self._left and self.trains(rank)]

    def names(self, ranks: Iterable[int]) -> list[str]:
        """The processes behind these ranks."""
        return [link.name for rank in sorted(ranks) for link in self.links(rank)]

    def of_own_plane(self) -> list[int]:
        """Who meets at a barrier of the party: at a root with a global plane, the central party's processes."""
        return [rank for rank in self._links if rank not in self._left and (rank >= CENTRAL) == self._two_planes]

    def all_on(self, host: str) -> bool:
        """Whether all members stand on this planned host."""
        return all(link.hello.get("host") == host for link in self._arrived)

    def workers_by_party(self) -> list[int]:
        """Numbers of workers, by party; in a flat cluster each worker counts as one."""
        parties = [links[0].hello for rank, links in sorted(self._links.items()) if rank < CENTRAL]
        return [int(hello.get("workers", 1)) for hello in parties]

    def central_workers(self) -> int:
        """Training workers of the central party."""
        return sum(rank >= CENTRAL for rank in self._links) if self._central_train else 0
