"""torch.distributed's store over the job's servers: small values that any worker sets and any worker gets."""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Store

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.cluster.key_values import MAX_VALUE

if TYPE_CHECKING:
    from geomx_cli.ps.cluster.bodies import Body
    from geomx_cli.runtime.frontends.torch.ddp.group_store import GroupStore

__all__ = ["JobStore", "tcp_store"]

_KEY = 900
_AT_ONCE = 256
"""Limit on the keys in one request."""
_stores: list["JobStore"] = []
"""All stores of this process. PrefixStore in C++ does not keep alive the Python object that it calls."""


class JobStore(Store):  # type: ignore[misc, unused-ignore]
    """The values whose names begin with `prefix`. All workers have the same values, wherever they run.

    Waits last at most `timeout`, as set by `set_timeout`, and then raise DistStoreError. If the job fails, they raise
    its error. Errors of the servers, such as for a value of more than 4 MiB, are InvalidSettings.
    """

    def __init__(self, joined: "GroupStore", prefix: str) -> None:
        super().__init__()
        self._joined = joined
        self._prefix = prefix
        _stores.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._ask("set", [key], values=[_bytes(value)])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: str) -> bytes:
        """The value. Waits until the key has one."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys. Waits until all have one."""
        once = list(dict.fromkeys(keys))
        values = [value for body in self._await("get", once, self.timeout) for value in body["values"]]
        found = dict(zip(once, values, strict=True))
        return [found[key] for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have a value."""
        self._await("wait", list(dict.fromkeys(keys)), timeout or self.timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have a value."""
        once = list(dict.fromkeys(keys))
        return all(self._ask("check", once[at : at + _AT_ONCE])["found"] for at in range(0, len(once), _AT_ONCE))

    def add(self, key: str, amount: int) -> int:
        """Add to an integer, which begins with 0. Return the sum."""
        return int(self._ask("add", [key], number=amount)["number"])

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value."""
        self._ask("append", [key], values=[_bytes(value)])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `desired` if the value is `expected`, or if there is no value and `expected` is empty. Return the value.
        """
        found: bytes = self._ask("compare", [key], values=[_bytes(expected), _bytes(desired)])["values"][0]
        return found

    def delete_key(self, key: str) -> bool:
        """Delete a value. Return whether it existed."""
        return bool(self._ask("delete", [key])["number"])

    def num_keys(self) -> int:
        """The number of keys that have a value, including keys of the job's other stores."""
        return int(self._ask("count", [""])["number"])

    def has_extended_api(self) -> bool:
        """Whether `append`, `multi_get` and `multi_set` are available."""
        return True

    def clone(self) -> "JobStore":
        """Another store of the same values."""
        other = JobStore(self._joined, self._prefix)
        other.set_timeout(self.timeout)
        return other

    # Names under which PyTorch's C++ code calls the methods of a store under a PrefixStore.

    deleteKey, getNumKeys, hasExtendedApi = delete_key, num_keys, has_extended_api  # noqa: N815

    def _await(self, op: str, keys: Sequence[str], limit: timedelta) -> "list[Body]":
        seconds = max(limit.total_seconds(), 0.001)
        found = []
        for at in range(0, len(keys), _AT_ONCE):
            found.append(self._ask(op, keys[at : at + _AT_ONCE], seconds=seconds))
            if not found[-1]["found"]:
                missing = ", ".join(keys[:8])
                raise torch.distributed.DistStoreError(f"no worker has set {missing} within {seconds:g} s")
        return found

    def _ask(self, op: str, keys: Sequence[str], **fields: Any) -> "Body":
        _check("key", keys[0], max(map(len, keys), default=0), _KEY)
        _check("value", keys[0], max(map(len, fields.get("values", ())), default=0), MAX_VALUE)
        body = {"op": op, "keys": [self._prefix + key for key in keys], **fields}
        asked = self._joined.control.ask("store", body, fields.get("seconds", 0.0))
        self._joined.while_waiting(asked)
        return asked.result()


def _check(what: str, key: str, size: int, limit: int) -> None:
    if size > limit:
        text = f"a {what} of {size} bytes in the store, at most {limit}: {key[:40]!r}"
        raise InvalidSettings(text, "give what is large to a collective operation, as broadcast")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def tcp_store(original: Any, join: Callable[[], "GroupStore"]) -> type:
    """A class in place of TCPStore. For the workers' common address it makes a store over the job's servers, because
    nothing listens there. For any other address it makes the original store.

    join: joins the job.
    """

    class TCPStore(JobStore):
        """See JobStore. The other arguments of TCPStore have no effect: all workers have joined."""

        def __new__(cls, host_name: str, port: int, world_size: int | None = None, *rest: Any, **options: Any) -> Any:
            if not _is_common(host_name, port, world_size):
                return original(host_name, port, world_size, *rest, **options)
            return super().__new__(cls)

        def __init__(
            self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False,
            timeout: timedelta = timedelta(seconds=300), *_: Any, **__: Any,
        ) -> None:  # fmt: skip
            super().__init__(join(), f"tcp/{port}/")
            self.set_timeout(timeout)
            self.host, self.port = host_name, port

    def _is_common(host: str, port: int, world_size: int | None) -> bool:
        if host != os.environ.get("MASTER_ADDR") or not port:
            return False
        return str(port) == os.environ.get("MASTER_PORT") or str(world_size) == os.environ.get("WORLD_SIZE")

    return TCPStore
