"""A data set on its way to another host."""

import hashlib
import io
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from geomx_cli.core.errors import CheckFailed, InvalidSettings, TimedOut
from geomx_cli.datasets import fetch
from geomx_cli.datasets.sources import SOURCES, Source
from geomx_cli.hosts.interface import Completed
from geomx_cli.jobs.actions import data as actions

FILES = {"train": b"a" * 3_000_000, "test": b"b"}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: Any) -> Path:
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    monkeypatch.setattr(fetch, "SOURCES", {"mnist": Source("", (), digests)})
    monkeypatch.setattr(fetch.sources, "other_than", lambda name, target: "")
    assert "mnist" in SOURCES
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_it_arrives_whole(source: Path) -> None:
    with fetch.pack("mnist", source) as archive:
        target = fetch.receive("mnist", str(source / "there"), archive)  # type: ignore[arg-type]
    assert {path.name: path.read_bytes() for path in target.iterdir()} == FILES


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"x" + data])
def test_a_damaged_one_leaves_nothing(source: Path, damage: Any) -> None:
    with fetch.pack("mnist", source) as archive:
        data = damage(archive.read())
    with pytest.raises(CheckFailed):
        fetch.receive("mnist", str(source / "there"), io.BytesIO(data))
    assert list((source / "there").iterdir()) == []


def test_only_a_verified_one_is_sent(source: Path) -> None:
    (source / "test").write_bytes(b"c")
    with pytest.raises(CheckFailed, match="its SHA-256 differs"), fetch.pack("mnist", source):
        pass


def test_what_cannot_be_packed_is_reported(source: Path, monkeypatch: Any) -> None:
    def full() -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch.tempfile, "TemporaryFile", full)
    with pytest.raises(CheckFailed, match="No space left"), fetch.pack("mnist", source):
        pass


def test_a_folder_that_must_exist_is_not_made(source: Path) -> None:
    with pytest.raises(InvalidSettings, match="no such directory"):
        fetch.receive("mnist", str(source / "typo"), io.BytesIO(), existing=True)
    assert not (source / "typo").exists()


class Host:
    """A host, and its channel, that receives a data set, or hangs until its connection is closed."""

    def __init__(self, name: str, *, hangs: bool = False) -> None:
        self.name, self.python, self.argv = name, "python", list[str]()
        self._answers = [b"" if hangs else b'{"directory": "/data"}\n']
        self._ready = threading.Event()
        if not hangs:
            self._ready.set()

    def run(self, argv: Sequence[str], *, limit: float) -> Completed:
        """It has no copy."""
        return Completed(1, b"", b"")

    def open(self, argv: Sequence[str]) -> Any:
        self.argv = list(argv)
        return self

    def send(self, data: bytes) -> None:
        """It has a buffer."""

    def receive(self) -> bytes:
        assert self._ready.wait(240)
        return self._answers.pop() if self._answers else b""

    def errors(self) -> str:
        return ""

    def close(self) -> None:
        """Both of the channel and of the connection; only the watchdog's call ends a wait."""
        if threading.current_thread() is not threading.main_thread():
            actions._IDLE = 60.0  # the next host may be slow
            self._ready.set()


def test_a_host_that_hangs_does_not_stop_the_others(source: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(actions, "_IDLE", 0.2)
    hosts: list[Any] = [Host("one", hangs=True), Host("two")]
    pushed = actions.push("mnist", source, hosts, "/data", lambda what, done, total: None, existing=True)
    assert pushed.directories == {"two": "/data"}
    (error,) = pushed.errors
    assert isinstance(error, TimedOut) and "host one" in error.message
    assert hosts[1].argv[-3:] == ["--data-dir", "/data", "--existing"]
