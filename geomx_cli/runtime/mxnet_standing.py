"""What a script may ask its store about the worker and the job."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from geomx_cli.runtime.algorithms._esync_client import EsyncClient
    from geomx_cli.runtime.keys import Key
    from geomx_cli.runtime.kvstore import Store

__all__ = ["MxnetStanding"]


class MxnetStanding:
    """The properties of MXNet's KVStore, and those that several parties add."""

    def __init__(self, store: "Store") -> None:
        self._store = store

    @property
    def type(self) -> str:
        """The type that the store was created with."""
        return self._store.type

    @property
    def rank(self) -> int:
        """This worker's rank: in its party, or with rank scope global among the training workers of the job."""
        return self._store.rank

    @property
    def num_workers(self) -> int:
        """Workers of this worker's party, or with rank scope global training workers of the job."""
        return self._store.num_workers

    @property
    def num_all_workers(self) -> int:
        """Training workers of the job."""
        return self._store.num_all_workers

    @property
    def is_master_worker(self) -> bool:
        """Whether this worker configures the global servers and gives the initial weights."""
        return self._store.is_master_worker

    @property
    def party(self) -> str:
        """The name of this worker's party."""
        return self._store.party

    @property
    def global_rank(self) -> int:
        """This worker's rank among all training workers; -1 for a master worker that does not train."""
        return self._store.global_rank

    def versions(self, key: "Key") -> tuple[int, int]:
        """Lowest and highest version of the weights at the global servers that the latest pull of the key has got."""
        return self._store.versions(key)

    def pacer(self) -> "EsyncClient":
        """What asks ESync's state server for this worker; for a job with `--algo esync`."""
        return self._store.pacer()
