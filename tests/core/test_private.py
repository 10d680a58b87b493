"""Who may write to the directories that are trusted."""

import grp
import os
import pwd
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.files import is_own_socket, make_folders, require_private


def test_folders_are_made_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_folders(tmp_path / ".local/state/geomx")
        make_folders(tmp_path / ".local/state/geomx")
    finally:
        os.umask(before)
    made = [tmp_path / path for path in (".local", ".local/state", ".local/state/geomx")]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700] * 3
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        make_folders(tmp_path / "file/below")


@pytest.mark.parametrize(
    ("mode", "group", "members", "trusted"),
    [
        (0o755, "staff", ["bob"], True), (0o775, "staff", [], False), (0o777, "me", [], False),
        (0o1777, "staff", ["bob"], True), (0o775, "me", [], True), (0o775, "me", ["bob"], False),
    ],
)  # fmt: skip
def test_a_parent_that_others_may_write_to_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, group: str, members: list[str], trusted: bool
) -> None:
    parent = tmp_path / "parent"
    make_folders(parent / "jobs")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="me"))
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name=group, gr_mem=members))
    monkeypatch.setattr("geomx_cli.core.files._ROOT", -1)
    parent.chmod(mode)
    if trusted:
        require_private(parent / "jobs")
    else:
        with pytest.raises(CheckFailed, match=f"others can write to {parent}"):
            require_private(parent / "jobs")


def test_a_socket_that_others_may_replace_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "s").mkdir()
    monkeypatch.chdir(folder)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("own")
    (folder / "link").symlink_to("own")
    (folder / "file").touch()
    assert [is_own_socket(folder / name) for name in ("own", "link", "file", "none")] == [True, False, False, False]
    for mode, trusted in ((0o777, False), (0o1777, True), (0o755, True)):
        folder.chmod(mode)
        assert is_own_socket(folder / "own") == trusted
    if os.geteuid() == 0:
        os.chown(folder / "own", 1, 1)
        assert not is_own_socket(folder / "own")
