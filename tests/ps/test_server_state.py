"""The state files of a server: what they say when there is no room, or when they are of another version."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from bench import Bench, KeptLink
from cluster import free_ports
from tree import Tree

from geomx_cli.contract.config import NodeSettings, PlaneSettings
from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.event_log import EventLog
from geomx_cli.core.options import defaults
from geomx_cli.core.state_notes import StateNotes
from geomx_cli.ps.cluster.members import Member, Members
from geomx_cli.ps.delivery.direct import Direct
from geomx_cli.ps.server import Server
from geomx_cli.ps.server_state import ServerState
from geomx_cli.ps.state_file import Journal, StateFile
from geomx_cli.runtime.algorithms.fsa import FsaServer

NO_COMMANDS: Any = None


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
    assert [path.name for path in tmp_path.iterdir()] == ["ended"]
    state.close()


def test_a_server_that_is_killed_while_recovery_ends_has_no_next_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At no moment it has neither its state nor the note."""
    seen: list[bool] = []
    unlink = Path.unlink
    monkeypatch.setattr(
        Path, "unlink", lambda path, **given: (seen.append(StateNotes(tmp_path).has_ended), unlink(path, **given))
    )
    notes = StateNotes(tmp_path)
    notes.prepare()
    state = ServerState(tmp_path, lambda _: None)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(StateFile, "commit", full)
    monkeypatch.setattr(Path, "touch", full)  # no room for the note either
    state.save_members(Members())  # type: ignore[arg-type]
    assert seen == [True] * 3 and [path.name for path in tmp_path.iterdir()] == ["ended"]


def test_without_a_folder_nothing_is_saved(tmp_path: Path) -> None:
    state = ServerState(None, lambda _: None)
    state.log("leave", {}, Member("w"))
    state.commit(slice_with_a_round().roots[0].rounds.table.entries[0, 0], asynchronous=False, optimizers=0)
    assert not state.restore(Members(), Bench().rounds, NO_COMMANDS)  # type: ignore[arg-type]
    state.close()


def test_state_that_cannot_be_read_is_refused_with_its_folder(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "slices")
    file.commit("0/0", {"key": "what is this"}, {})
    file.close()
    state = ServerState(tmp_path, lambda _: None)
    with pytest.raises(InvalidSettings, match=str(tmp_path)) as caught:
        state.restore(Members(), Bench().rounds, NO_COMMANDS)  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, msgspec.MsgspecError)
    state.close()


def test_a_server_killed_when_all_had_said_goodbye_ends_though_its_scheduler_has(tmp_path: Path) -> None:
    """In its next life, and without a failure: so it may save what it had not saved yet."""
    members = Members()
    members.add(Member("w", "", "", "worker", 0, state="gone", link=KeptLink()))  # type: ignore[arg-type]
    state = ServerState(tmp_path, lambda _: None)
    state.save_members(members)  # type: ignore[arg-type]
    state.close()
    (port,) = free_ports(1)
    settings = NodeSettings(
        "server", process="s", incarnation=1, state_dir=str(tmp_path), supervised=True, rank=0,
        local=PlaneSettings("127.0.0.1", port, servers=1, workers=1),
        options={**defaults(plugins.table()), "timeout": 1.0},
    )  # fmt: skip
    assert Server(settings, EventLog(None), FsaServer(), Direct()).run() is None


def test_members_are_as_they_were_saved_and_not_as_the_saved_commands_leave_them(tmp_path: Path) -> None:
    """A refused command is not saved, and yet its sender may have set up by it."""
    members, state = Members(), ServerState(tmp_path, lambda _: None)
    members.add(Member("w", is_set_up=True, link=KeptLink()))  # type: ignore[arg-type]
    state.save_members(members)  # type: ignore[arg-type]
    state.log("optimizer", {"hold": True}, Member("w"))
    state.close()
    found, state = Members(), ServerState(tmp_path, lambda _: None)
    commands: Any = SimpleNamespace(apply_again=lambda _, __, sender: setattr(sender, "is_set_up", False))
    state.restore(found, Bench().rounds, commands)  # type: ignore[arg-type]
    assert [member.is_set_up for member in found] == [True]
    state.close()
