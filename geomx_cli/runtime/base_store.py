"""What a worker's store reports about the worker and the job, for every framework."""

from typing import TYPE_CHECKING

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.nearest import did_you_mean
from geomx_cli.core.options import Value

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.cluster.config import NodeSettings
    from geomx_cli.runtime.algorithms._esync_client import EsyncClient

__all__ = ["BaseStore", "option_of"]


class BaseStore:
    """Base class of `Store` and of the stores that front ends give to scripts."""

    def __init__(self, client: "Client", kind: str) -> None:
        self._client = client
        self._kind = kind

    @property
    def type(self) -> str:
        """The name that the store was created with, as in "dist_sync"."""
        return self._kind

    @property
    def rank(self) -> int:
        """This worker's rank: in its party, or with rank scope global among the job's training workers."""
        return self._client.global_rank if self._client.ranks_are_global else self._client.rank

    @property
    def num_workers(self) -> int:
        """Number of workers of this worker's party, or with rank scope global of training workers of the job."""
        return self._client.num_all_workers if self._client.ranks_are_global else self._client.num_workers

    @property
    def num_all_workers(self) -> int:
        """Number of training workers of the job."""
        return self._client.num_all_workers

    @property
    def is_master_worker(self) -> bool:
        """Whether this worker configures the global servers and provides the initial values."""
        return self._client.is_master

    @property
    def trains(self) -> bool:
        """Whether this worker contributes; False for a master that only sets the job up."""
        return self._client.trains

    @property
    def party(self) -> str:
        """The name of this worker's party; "" if started by hand without one."""
        return self._client.party

    @property
    def party_ranks(self) -> range | None:
        """The global ranks of this worker's party; None in a flat cluster."""
        first = self._client.global_rank - self._client.rank
        return None if self._client.flat else range(first, first + self._client.num_workers)

    @property
    def global_rank(self) -> int:
        """This worker's rank among the training workers of the job; -1 for a master worker that does not train."""
        return self._client.global_rank

    def option(self, name: str) -> Value:
        """Return the job's value of an option of `geomx launch`, as in option("k1"). Raises InvalidSettings for an
        unknown option.
        """
        return option_of(self._client.settings, name)

    def esync_client(self) -> "EsyncClient":
        """Client of ESync's state server for this worker. Raises InvalidSettings in a job with another algorithm."""
        from geomx_cli.runtime.algorithms._esync_client import EsyncClient

        algorithm = plugins.algorithms()[self._client.settings.text("algo")]
        if not algorithm.own_pace:
            possible = " or ".join(name for name, each in plugins.algorithms().items() if each.own_pace)
            what = f"there is no state server in a job of {algorithm.name}"
            raise InvalidSettings(what, f"launch it with --algo {possible}")
        return EsyncClient(self._client)


def option_of(settings: "NodeSettings", name: str) -> Value:
    """See `BaseStore.option`."""
    if (value := settings.options.get(name)) is None:
        close = did_you_mean(name, settings.options) or "geomx launch --help names them, with - for _"
        raise InvalidSettings(f"there is no option {name!r}", close)
    return value
