"""Which disk is named as full."""

import threading
from pathlib import Path
from typing import Any

import pytest

from geomx_cli.agent import diagnosis as module
from geomx_cli.agent.diagnosis import full_disk

NO_ROOM = "OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("said", "full", "point"),
    [
        (f"{NO_ROOM}: '/proc/none/such'", {"/proc", "/"}, "/proc"),
        (f"{NO_ROOM}: '/proc/x'", set(), "/proc"),
        (NO_ROOM, {"/proc"}, "/proc"),
        (NO_ROOM, set(), ""),
        ("ValueError: '/proc/x' is wrong", {"/proc"}, ""),
        ("ValueError: '/proc/x' is wrong", {"/"}, "/"),
    ],
)
def test_the_disk_is_that_of_the_path_in_the_error_or_a_full_one(
    said: str, full: set[str], point: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "_is_full", lambda path: str(path) in full)
    found = full_disk(said, Path("/"), (Path("/proc"),))
    assert found.partition(" ")[0] == point


def test_a_path_whose_server_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(module, "_LIMIT", 0.01)
    monkeypatch.setattr(module, "_is_full", lambda _: answers.wait(240))
    assert full_disk(f"{NO_ROOM}: '/proc/x'", Path("/"), ()) == ""
    answers.set()
