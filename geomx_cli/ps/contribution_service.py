"""The contributions that a server receives: who may send them, and for which ranks."""

from geomx_cli.core.errors import GeomxError
from geomx_cli.ps.aggregation.aggregator import Aggregator
from geomx_cli.ps.aggregation.delivery_interface import ServerDelivery
from geomx_cli.ps.cluster.config import NodeSettings
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.server_members import ServerMembers
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import BadMessage, Header

__all__ = ["ContributionService"]


class ContributionService:
    """Hands contributions to the aggregator; see ContributionInbox. Used by the loop's thread only."""

    def __init__(
        self,
        settings: NodeSettings,
        node: Node,
        members: ServerMembers,
        delivery: ServerDelivery,
        aggregator: Aggregator,
    ) -> None:
        self._settings = settings
        self._node = node
        self._members = members
        self._delivery = delivery
        self._aggregator = aggregator

    def take(self, link: Link, header: Header, payload: memoryview | None, credit: int | None = None) -> None:
        """Handle an EXCHANGE. Raises BadMessage for one that its sender may not send, or that is invalid."""
        rank = self._check_sender(link, header)
        self._aggregator.on_exchange(link, header, payload, rank, credit)

    def check(self, link: Link, header: Header) -> None:
        """See ContributionInbox.check."""
        self._check_sender(link, header)
        self._aggregator.table.entry(header)

    def hand_in(self, link: Link, header: Header, payload: memoryview, credit: int) -> None:
        """See ContributionInbox.hand_in."""
        try:
            self.take(link, header, payload, credit)
        except BadMessage as error:
            self._node.transport.refuse(link, error, credit)
        except GeomxError as error:
            self._node.fail(error)

    def brought_by(self, link: Link, rank: int) -> set[int]:
        """The ranks for which this member may contribute; some may not have arrived yet."""
        plane, own = str(link.hello["plane"]), int(link.hello["rank"])
        settings = self._settings.local if plane == "local" else self._settings.upper
        count = settings.workers if settings is not None else 0
        return {rank - own + other for other in self._delivery.brings(plane, own) if 0 <= other < count}

    def _check_sender(self, link: Link, header: Header) -> int:
        """The sender's rank. Raises BadMessage unless the contribution is of ranks, in ascending order, that it may
        contribute for: its own, or members of its plane that the delivery allows.
        """
        rank, ranks = self._members.rank_of(link), header.contributors
        may = ranks == (rank,) or (
            bool(ranks) and list(ranks) == sorted({*ranks}.intersection(self.brought_by(link, rank)))
        )
        if not may or not self._members.trains(rank):
            raise BadMessage(f"contributions of ranks {ranks} from rank {rank}")
        return rank
