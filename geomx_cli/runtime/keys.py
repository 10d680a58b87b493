"""Keys of a KVStore, and the values passed with them."""

from collections.abc import Sequence
from numbers import Integral
from typing import TypeVar

from geomx_cli.core.errors import InvalidSettings

__all__ = ["Key", "pairs", "plain"]

Key = int | str

T = TypeVar("T")


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
