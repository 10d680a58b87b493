"""IDX files of unsigned bytes, MNIST's format: plain ones are memory-mapped, so that a worker reads only its part."""

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geomx_cli.core.errors import InvalidSettings

__all__ = ["damaged", "read_bytes", "read_idx"]

Bytes = npt.NDArray[np.uint8]
_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, dimensions: int) -> Bytes:
    """Return the array of an IDX file of unsigned bytes: mapped read-only, or decompressed if the name ends in `.gz`.

    Raises InvalidSettings if the file cannot be read, is not an IDX file, or its length does not match its header.
    """
    content = read_bytes(path)
    header = 4 + 4 * dimensions
    if content[:4].tobytes() != bytes((0, 0, _UNSIGNED_BYTE, dimensions)):
        raise damaged(path, f"it is no IDX file of unsigned bytes with {dimensions} dimension(s)")
    if len(content) < header:
        raise damaged(path, "its header is cut short")
    shape = [int(extent) for extent in content[4:header].view(">u4")]
    expected = header + math.prod(shape)
    if len(content) != expected:
        what = "cut short" if len(content) < expected else "too long"
        raise damaged(path, f"it is {what}: {len(content)} bytes (unpacked) where its header says {expected}")
    return content[header:].reshape(shape)


def read_bytes(path: Path) -> Bytes:
    """Return a file's bytes, mapped or decompressed. Raises InvalidSettings if it cannot be read."""
    try:
        return np.frombuffer(_unpack(path), np.uint8) if path.suffix == ".gz" else _map(path)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, f"it cannot be read: {error}") from None


def damaged(path: Path, what: str) -> InvalidSettings:
    """Return the error for a damaged data file."""
    return InvalidSettings(f"{path}: {what}", "remove it and run geomx data fetch, or give --data-dir")


def _unpack(path: Path) -> bytes:
    with gzip.open(path) as file:
        return file.read()


def _map(path: Path) -> npt.NDArray[Any]:
    if path.stat().st_size == 0:
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, mode="r")
