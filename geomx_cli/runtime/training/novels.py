"""The text of Jane Austen's novels, from the package for R that has them: a .deb with R's serialized strings."""

import io
import struct
import tarfile
import zlib

__all__ = ["text_of_package"]

_DATA = "./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
_MAGIC = b"!<arch>\n"
_STRINGS, _STRING = 16, 9  # R's types of a vector of strings, and of a string


def text_of_package(package: bytes) -> bytes:
    """Return the six novels, one after another, as UTF-8 with a newline at the end of each line.

    Raises ValueError, or an exception of tarfile, lzma, zlib or struct, for a file that is not that package.
    """
    with tarfile.open(fileobj=io.BytesIO(_member(package, b"data.tar"))) as archive:
        member = archive.extractfile(_DATA)
        content = member.read() if member is not None else b""
    return b"".join(line + b"\n" for novel in _objects(content) for line in _strings(novel))


def _member(archive: bytes, prefix: bytes) -> bytes:
    """Return the file of an `ar` archive whose name begins with `prefix`."""
    if not archive.startswith(_MAGIC):
        raise ValueError("it is no package of Debian")
    at = len(_MAGIC)
    while at + 60 <= len(archive):
        name, size = archive[at : at + 16], int(archive[at + 48 : at + 58])
        at += 60
        if name.startswith(prefix):
            return archive[at : at + size]
        at += size + size % 2
    raise ValueError("it has no data")


def _objects(database: bytes) -> list[bytes]:
    """Return the objects of a database of R, in its order: each is compressed, after its size."""
    found, rest = [], database
    while rest:
        inflate = zlib.decompressobj()
        found.append(inflate.decompress(rest[4:]))
        rest = inflate.unused_data
    return found


def _strings(content: bytes) -> list[bytes]:
    """Return the strings of a serialized vector, of R's format 3: big-endian numbers of four bytes."""
    encoding = struct.unpack_from(">i", content, 14)[0]
    at = 18 + encoding
    kind, count = struct.unpack_from(">ii", content, at)
    if not content.startswith(b"X\n") or kind & 0xFF != _STRINGS:
        raise ValueError("its data are no strings")
    at += 8
    found = []
    for _ in range(count):
        kind, size = struct.unpack_from(">ii", content, at)
        if kind & 0xFF != _STRING or size < 0:
            raise ValueError("its data are no strings")
        found.append(content[at + 8 : at + 8 + size])
        at += 8 + size
    return found
