"""What a worker's store reports about the worker and the job, for every framework, and the keys that it takes."""

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Protocol, TypeVar

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.option import did_you_mean
from geomx_cli.core.options import Value

if TYPE_CHECKING:
    from geomx_cli.contract.config import NodeSettings
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.algorithms._esync_client import EsyncClient

__all__ = ["BaseStore", "Key", "ScriptStore", "option_of", "pairs", "plain"]

Key = int | str

T = TypeVar("T")


class ScriptStore(Protocol):
    """The interface of a store as used by the script's session."""

    @property
    def failure(self) -> BaseException | None:
        """The background failure, if any."""

    def cause(self, error: BaseException) -> BaseException | None:
        """The failure of the job of which an error that the script raised is a consequence, as far as is known."""

    @property
    def calls(self) -> int:
        """The number of calls by the script."""

    @property
    def steps(self) -> int:
        """How far the script has come, the same in all workers that have taken the same steps; 0 before the first."""

    def should_stop(self, wishes: Callable[[], bool], agrees: Callable[[bool], bool]) -> bool:
        """Whether all workers stop here. wishes: whether this worker has learnt that the job is asked to stop. agrees:
        whether all stop, given whether a worker for which this one speaks has.
        """

    def wait_for_operations(self) -> None:
        """Wait for all operations begun by the script. Raises their failure, as an error of the framework."""


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

    def should_stop(self, wishes: Callable[[], bool], agrees: Callable[[bool], bool]) -> bool:
        """See ScriptStore."""
        return agrees(wishes())

    def option(self, name: str) -> Value:
        """Return the job's value of an option of `geomx launch`, as in option("k1"). Raises InvalidSettings for an
        unknown option.
        """
        return option_of(self._client.settings, name)

    def esync_client(self) -> "EsyncClient":
        """Client of ESync's state server for this worker. Raises InvalidSettings in a job with another algorithm."""
        from geomx_cli.runtime.algorithms._esync_client import EsyncClient

        self._check_paced()
        return EsyncClient(self._client)

    def _check_paced(self) -> None:
        """Raise InvalidSettings in a job of an algorithm without a state server."""
        algorithm = plugins.algorithms()[self._client.settings.text("algo")]
        if not algorithm.own_pace:
            possible = " or ".join(name for name, each in plugins.algorithms().items() if each.own_pace)
            what = f"there is no state server in a job of {algorithm.name}"
            raise InvalidSettings(what, f"launch it with --algo {possible}")


def option_of(settings: "NodeSettings", name: str) -> Value:
    """See `BaseStore.option`."""
    if (value := settings.options.get(name)) is None:
        close = did_you_mean(name, settings.options) or "geomx launch --help names them, with - for _"
        raise InvalidSettings(f"there is no option {name!r}", close)
    return value


def pairs(keys: Key | Sequence[Key], values: T | Sequence[T] | Sequence[Sequence[T]]) -> list[tuple[Key, list[T]]]:
    """Return each distinct key with its values, in the order of the keys.

    A single key takes a value or a list of values (one per device); a list of keys takes a list of equal length of
    either. The values of a repeated key are merged. Raises InvalidSettings if the lengths differ.
    """
    many = isinstance(keys, (list, tuple))
    listed: Sequence[Key] = keys if many else [keys]  # type: ignore[assignment, list-item]
    given = values if many else [values]
    if not isinstance(given, (list, tuple)) or len(given) != len(listed):
        count = len(given) if isinstance(given, (list, tuple)) else 1
        raise InvalidSettings(f"{len(listed)} keys come with {count} values", "give one value, or list, for each key")
    grouped: dict[Key, list[T]] = {}
    for key, value in zip(listed, given, strict=True):
        found = grouped.setdefault(key, [])
        found += value if isinstance(value, (list, tuple)) else [value]
        if not found:
            raise InvalidSettings(f"key {key!r} comes with an empty list of values", "give one for each device")
    return list(grouped.items())


def plain(key: Key) -> Key:
    """Return the key as int or str; numpy integers become int. Raises InvalidSettings for other types."""
    if isinstance(key, str):
        return key
    if isinstance(key, Integral) and not isinstance(key, bool):
        return int(key)
    raise InvalidSettings(f"{key!r} is no key", "a key is an int or a str")
