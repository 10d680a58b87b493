"""Download sources of data sets: their authors' servers, packages of Debian.

Every source has time limits, files are verified against known digests, and nothing is installed.
"""

import hashlib
import io
import lzma
import queue
import struct
import tarfile
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

__all__ = ["Progress", "SOURCES", "Source", "SourceError", "download", "other_than", "text_of_package"]

# Files of Debian's packages, by name. For another file the functions raise ValueError, SourceError, or an exception of
# tarfile, lzma, zlib or struct.

_FASHION_DATA = "./usr/share/datasets/fashion-mnist"
_NOVELS = "./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
_MAGIC = b"!<arch>\n"
_STRINGS, _STRING = 16, 9  # R's types of a vector of strings, and of a string


def images_of_package(package: bytes) -> dict[str, bytes]:
    """Return the files of Fashion-MNIST."""
    paths = [f"{_FASHION_DATA}/{name}.gz" for name in _FASHION]
    return {
        name: _inflated(packed, f"{name}.gz")
        for name, packed in zip(_FASHION, _contents(package, *paths), strict=True)
    }


def text_of_package(package: bytes) -> dict[str, bytes]:
    """Return Jane Austen's six novels as austen.txt, one after another: UTF-8, with a newline at the end of each line.
    The package is for R, and has R's serialized strings.
    """
    (content,) = _contents(package, _NOVELS)
    return {"austen.txt": b"".join(line + b"\n" for novel in _objects(content) for line in _strings(novel))}


def _contents(package: bytes, *paths: str) -> list[bytes]:
    """Return files that a package of Debian would install."""
    with tarfile.open(fileobj=io.BytesIO(_member(package, b"data.tar"))) as archive:
        members = [archive.extractfile(path) for path in paths]
        return [member.read(_MOST_BYTES) if member is not None else b"" for member in members]


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


Progress = Callable[[str, int, int], None]
"""Called with (activity, bytes done, total bytes); the total is 0 if only the message matters."""

_CONNECT_LIMIT = 5.0
_PIECE = 1 << 18
_SMALL = 1 << 17
_UNPACKING = (lzma.LZMAError, zlib.error, struct.error)
_MOST_BYTES = 256 << 20  # per file, compressed and decompressed


@dataclass(frozen=True)
class Source:
    """The source of a data set.

    packed: the files below `url`; NAME.gz contains NAME, an archive contains all in `folder`; or a package of Debian.
    digests: SHA-256 of each decompressed file, as sources may compress the same bytes differently.
    package: the address of a package of Debian that has the files too; "" for none.
    unpack: returns the files of the package by name.
    """

    url: str
    packed: tuple[str, ...]
    digests: Mapping[str, str]
    folder: str = ""
    package: str = ""
    unpack: Callable[[bytes], Mapping[str, bytes]] | None = None

    @property
    def places(self) -> list[tuple[str, Sequence[str]]]:
        """Where the files are, in the order to try: an address, and the names below it."""
        folder, slash, file = self.package.rpartition("/")
        return [(self.url, self.packed), *([(folder + slash, (file,))] if file else [])]


_FASHION = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
_MNIST = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
_CIFAR10 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
_DEBIAN = "http://deb.debian.org/debian/pool/main/"
SOURCES: Mapping[str, Source] = {
    "fashion-mnist": Source(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", tuple(f"{name}.gz" for name in _FASHION),
        _FASHION, package=f"{_DEBIAN}d/dataset-fashion-mnist/dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
        unpack=images_of_package,
    ),
    "mnist": Source(
        "https://storage.googleapis.com/cvdf-datasets/mnist/", tuple(f"{name}.gz" for name in _MNIST), _MNIST
    ),
    "cifar10": Source(
        "https://www.cs.toronto.edu/~kriz/", ("cifar-10-binary.tar.gz",), _CIFAR10, folder="cifar-10-batches-bin"
    ),
    "austen": Source(
        f"{_DEBIAN}r/r-cran-janeaustenr/", ("r-cran-janeaustenr_1.0.0-1_all.deb",),
        {"austen.txt": "65b434d16a8755142bfa95ba19c5f9abd0d30cf3dffe3b6793e834f9f56dcc96"}, unpack=text_of_package,
    ),
}  # fmt: skip
"""Sources by data set name."""


def other_than(name: str, directory: Path) -> str:
    """Return the other data set whose files are in the directory; "" for none. Checks only the small files."""
    for file in SOURCES[name].digests:
        path = directory / file
        if path.is_file() and path.stat().st_size < _SMALL:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
            for other, source in SOURCES.items():
                if other != name and source.digests.get(file) == found:
                    return other
    return ""


class SourceError(Exception):
    """A source cannot provide the data; the text says why."""


def download(
    source: Source, url: str, files: Sequence[str], scratch: Path, progress: Progress, deadline: float
) -> None:
    """Write the data set's files to the folder `scratch`, from `files` below `url`: a package of Debian (.deb), an
    archive (.tar.gz), or single files (.gz). `deadline`: in time.monotonic seconds. Raises SourceError.
    """
    for file in files:
        try:
            packed = _download(url + file, file, deadline, progress)
        except HTTPError as error:
            error.close()
            raise SourceError(f"{file}: HTTP status {error.code}") from None
        except (OSError, HTTPException) as error:
            raise SourceError(str(getattr(error, "reason", error)) or type(error).__name__) from None
        if file.endswith(".deb"):
            _unpack_package(source, packed, file, scratch)
        elif file.endswith(".tar.gz"):
            _unpack_all(source, packed, file, scratch)
        else:
            _write(source, file, scratch / file.removesuffix(".gz"), _inflated(packed, file))


def _download(url: str, what: str, deadline: float, progress: Progress) -> bytes:
    with _open(url) as answer:
        total = int(answer.headers.get("Content-Length") or 0)
        content = bytearray()
        while piece := answer.read(_PIECE):
            content += piece
            progress(what, len(content), total)
            if len(content) > _MOST_BYTES:
                raise SourceError(f"{what} is larger than it should be")
            if time.monotonic() > deadline:
                raise TimeoutError("not done within the time limit")
    return bytes(content)


def _open(url: str) -> Any:
    # A name lookup has no timeout and may block for half a minute without a network: a separate thread can be
    # abandoned.
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(urllib.request.urlopen(url, timeout=_CONNECT_LIMIT))
        except (OSError, HTTPException) as error:
            answers.put(error)

    threading.Thread(target=ask, name="fetch", daemon=True).start()
    try:
        answer = answers.get(timeout=_CONNECT_LIMIT)
    except queue.Empty:
        raise TimeoutError(f"no answer within {_CONNECT_LIMIT:.0f} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _inflated(packed: bytes, name: str) -> bytes:
    """Return the content of a .gz file."""
    try:
        inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        content = inflate.decompress(packed, _MOST_BYTES)
    except zlib.error as error:
        raise SourceError(f"{name} is damaged: {error}") from None
    if not inflate.eof:
        raise SourceError(f"{name} is damaged: it is cut short, or larger than it should be")
    return content


def _unpack_all(source: Source, packed: bytes, name: str, scratch: Path) -> None:
    """Extract the wanted files of an archive; others are ignored."""
    try:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            for file in source.digests:
                member = archive.extractfile(f"{source.folder}/{file}")
                content = member.read(_MOST_BYTES) if member is not None else b""
                _write(source, f"{name}: {file}", scratch / file, content)
    except (tarfile.TarError, KeyError, OSError, EOFError, zlib.error) as error:
        raise SourceError(f"{name} is damaged: {error}") from None


def _unpack_package(source: Source, package: bytes, name: str, scratch: Path) -> None:
    assert source.unpack is not None
    try:
        contents = source.unpack(package)
    except (ValueError, KeyError, OSError, EOFError, tarfile.TarError, *_UNPACKING) as error:
        raise SourceError(f"{name} is damaged: {error}") from None
    for file in source.digests:
        _write(source, f"{name}: {file}", scratch / file, contents[file])


def _write(source: Source, what: str, target: Path, content: bytes) -> None:
    if hashlib.sha256(content).hexdigest() != source.digests[target.name]:
        raise SourceError(f"{what} is not the file that it should be (SHA-256 differs)")
    target.write_bytes(content)
