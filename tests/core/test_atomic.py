"""Atomic replacement of files."""

import os
from pathlib import Path

import pytest

from geomx_cli.core.files import open_atomic, write_atomic


def test_a_file_is_replaced_at_the_end_only(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, b"old", 0o600)
    with open_atomic(path, 0o640) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640 & ~_umask()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_write_that_fails_changes_and_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, b"old")
    with pytest.raises(error), open_atomic(path) as file:
        file.write(b"ne")
        raise error
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_where_it_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    for path in (tmp_path / "nowhere" / "file", tmp_path / "taken"):
        with pytest.raises(OSError):
            write_atomic(path, b"")
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]


def test_what_lies_there_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"another's")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    write_atomic(tmp_path / "link", b"ours")
    assert (tmp_path / "other").read_bytes() == b"another's"
    assert not (tmp_path / "link").is_symlink() and (tmp_path / "link").read_bytes() == b"ours"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
