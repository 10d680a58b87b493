"""The state files of a server: what they say when there is no room, or when they are of another version."""

import errno
from pathlib import Path

import msgspec
import numpy as np
import pytest
from bench import Bench
from tree import Tree

from geomx_cli.core.conventions import STATE_ENDED
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.cluster.members import Member, Members
from geomx_cli.ps.server_state import ServerState
from geomx_cli.ps.state_file import Journal, StateFile
from geomx_cli.runtime.algorithms.fsa import FsaServer


def slice_with_a_round() -> Tree:
    tree = Tree([1], lambda _, __: FsaServer())
    tree.init(np.zeros(8, np.float32))
    tree.push((0, 0), 1, np.ones(8, np.float32))
    return tree


@pytest.mark.parametrize("fails", ["slices", "members", "commands"])
def test_a_full_disk_ends_recovery_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    warnings: list[str] = []
    state = ServerState(tmp_path, warnings.append)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((Journal, "append") if fails == "commands" else (StateFile, "commit")), full)
    entry = slice_with_a_round().roots[0].rounds.table.entries[0, 0]
    for _ in range(2):
        if fails == "slices":
            state.commit(entry, asynchronous=False, optimizers=0)
        elif fails == "members":
            state.save_members(Members())  # type: ignore[arg-type]
        else:
            state.log("leave", {}, Member("w"))
    assert len(warnings) == 1 and "No space left" in warnings[0] and "--restarts 0" in warnings[0]
    assert [path.name for path in tmp_path.iterdir()] == [STATE_ENDED]
    state.close()


def test_without_a_folder_nothing_is_saved(tmp_path: Path) -> None:
    state = ServerState(None, lambda _: None)
    state.log("leave", {}, Member("w"))
    state.commit(slice_with_a_round().roots[0].rounds.table.entries[0, 0], asynchronous=False, optimizers=0)
    assert not state.restore(Members(), Bench().rounds, lambda *_: None)  # type: ignore[arg-type]
    state.close()


def test_state_that_cannot_be_read_is_refused_with_its_folder(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "slices")
    file.commit("0/0", {"key": "what is this"}, {})
    file.close()
    state = ServerState(tmp_path, lambda _: None)
    with pytest.raises(InvalidSettings, match=str(tmp_path)) as caught:
        state.restore(Members(), Bench().rounds, lambda *_: None)  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, msgspec.MsgspecError)
    state.close()
