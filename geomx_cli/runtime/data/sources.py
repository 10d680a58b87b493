"""Download sources of data sets: their authors' servers, a Debian package.

Every source has time limits, files are verified against known digests, and nothing is installed.
"""

import hashlib
import io
import lzma
import os
import queue
import signal
import struct
import subprocess
import tarfile
import tempfile
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

__all__ = ["Progress", "SOURCES", "Source", "SourceError", "other_than", "text_of_package", "ways"]

# The text of Jane Austen's novels, from the package for R that has them: a .deb with R's serialized strings.

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


Progress = Callable[[str, int, int], None]
"""Called with (activity, bytes done, total bytes); the total is 0 if only the message matters."""

_CONNECT_LIMIT = 5.0
_APT_LIMIT = 300.0
_UPDATE_LIMIT = 45.0  # where a mirror answers, the lists come within seconds
_PIECE = 1 << 18
_SMALL = 1 << 17
_UNPACKING = (lzma.LZMAError, zlib.error, struct.error)
_MOST_BYTES = 256 << 20  # per file, compressed and decompressed


@dataclass(frozen=True)
class Source:
    """The source of a data set.

    packed: the files below `url`; NAME.gz contains NAME, an archive contains all in `folder`.
    digests: SHA-256 of each decompressed file, as sources may compress the same bytes differently.
    package: Debian's, "" for none.
    unpack: returns the only file of a package; then the package itself is below `url`.
    """

    url: str
    packed: tuple[str, ...]
    digests: Mapping[str, str]
    folder: str = ""
    package: str = ""
    unpack: Callable[[bytes], bytes] | None = None


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
SOURCES: Mapping[str, Source] = {
    "fashion-mnist": Source(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", tuple(f"{name}.gz" for name in _FASHION),
        _FASHION, package="dataset-fashion-mnist",
    ),
    "mnist": Source(
        "https://storage.googleapis.com/cvdf-datasets/mnist/", tuple(f"{name}.gz" for name in _MNIST), _MNIST
    ),
    "cifar10": Source(
        "https://www.cs.toronto.edu/~kriz/", ("cifar-10-binary.tar.gz",), _CIFAR10, folder="cifar-10-batches-bin"
    ),
    "austen": Source(
        "http://deb.debian.org/debian/pool/main/r/r-cran-janeaustenr/", ("r-cran-janeaustenr_1.0.0-1_all.deb",),
        {"austen.txt": "65b434d16a8755142bfa95ba19c5f9abd0d30cf3dffe3b6793e834f9f56dcc96"},
        package="r-cran-janeaustenr", unpack=text_of_package,
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


def ways(source: Source) -> Iterator[tuple[str, Callable[[Source, Path, Progress, float], None]]]:
    """Yield the sources to try, in order: a name, and a function that writes the files to a folder until a deadline in
    time.monotonic seconds, or raises SourceError.
    """
    yield source.url, _from_authors
    if source.package:
        yield f"Debian's package {source.package}", _from_debian


def _from_authors(source: Source, scratch: Path, progress: Progress, deadline: float) -> None:
    for file in source.packed:
        try:
            packed = _download(source.url + file, file, deadline, progress)
        except HTTPError as error:
            error.close()
            raise SourceError(f"{file}: HTTP status {error.code}") from None
        except (OSError, HTTPException) as error:
            raise SourceError(str(getattr(error, "reason", error)) or type(error).__name__) from None
        if source.unpack is not None:
            _unpack_package(source, packed, file, scratch)
        elif source.folder:
            _unpack_all(source, packed, file, scratch)
        else:
            _unpack(source, packed, scratch / file.removesuffix(".gz"))


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


def _from_debian(source: Source, scratch: Path, progress: Progress, deadline: float) -> None:
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        work = Path(name)
        progress(f"apt-get download {source.package}", 0, 0)
        try:
            _run(work, deadline, "apt-get", "download", source.package)
        except SourceError:
            # Without package lists, as in many containers, apt knows no package: have it download them to a private
            # directory.
            limit = min(_UPDATE_LIMIT, deadline - time.monotonic())
            if limit <= 0:
                raise
            progress(f"apt-get update into a private directory, {limit:.0f} s at most", 0, 0)
            private = _private_apt(work)
            _run(work, time.monotonic() + limit, "apt-get", *private, "update")
            _run(work, deadline, "apt-get", *private, "download", source.package)
        package = next(work.glob(f"{source.package}_*.deb"), None)
        if package is None:
            raise SourceError("apt-get download left no file")
        if source.unpack is not None:
            _unpack_package(source, package.read_bytes(), package.name, scratch)
            return
        _run(work, deadline, "dpkg-deb", "-x", str(package), "content")
        for file in source.digests:
            packed = work / "content/usr/share/datasets" / source.package.removeprefix("dataset-") / f"{file}.gz"
            if not packed.is_file():
                raise SourceError(f"{package.name} has no {file}.gz")
            _unpack(source, packed.read_bytes(), scratch / file)


def _private_apt(work: Path) -> list[str]:
    options = ["-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User=", "-o", "Acquire::Retries=0"]
    options += ["-o", "Acquire::http::Timeout=10", "-o", "Acquire::https::Timeout=10"]
    for directory, path in (
        ("State::lists", "lists"),
        ("Cache", "cache"),
        ("Cache::archives", "cache/archives"),
    ):
        (work / path / "partial").mkdir(parents=True, exist_ok=True)
        options += ["-o", f"Dir::{directory}={work / path}"]
    return options


def _run(work: Path, deadline: float, *command: str) -> None:
    limit = min(_APT_LIMIT, max(0.0, deadline - time.monotonic()))
    try:
        process = subprocess.Popen(
            command,
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise SourceError(f"this machine has no {command[0]}") from None
    with process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            raise SourceError(f"{command[0]} was not done within {limit:.0f} s") from None
        finally:
            # The processes that apt-get downloads with outlive it while they look up a name, and hold the pipe open.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        lines = output.decode(errors="replace").strip().splitlines()
        problems = [line for line in lines if line.startswith("E:")] or lines[-1:]
        raise SourceError(f"{command[0]} failed: {' '.join(problems) or f'status {process.returncode}'}")


def _unpack(source: Source, packed: bytes, target: Path) -> None:
    try:
        inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        content = inflate.decompress(packed, _MOST_BYTES)
    except zlib.error as error:
        raise SourceError(f"{target.name}.gz is damaged: {error}") from None
    if not inflate.eof:
        raise SourceError(f"{target.name}.gz is damaged: it is cut short, or larger than it should be")
    _write(source, f"{target.name}.gz", target, content)


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
    (file,) = source.digests
    try:
        content = source.unpack(package)
    except (ValueError, KeyError, OSError, EOFError, tarfile.TarError, *_UNPACKING) as error:
        raise SourceError(f"{name} is damaged: {error}") from None
    _write(source, f"{name}: {file}", scratch / file, content)


def _write(source: Source, what: str, target: Path, content: bytes) -> None:
    if hashlib.sha256(content).hexdigest() != source.digests[target.name]:
        raise SourceError(f"{what} is not the file that it should be (SHA-256 differs)")
    target.write_bytes(content)
