"""The status line of a long wait."""

import threading
from typing import Any

from geomx_cli.jobs.view import waiting


def test_a_long_wait_is_reported_with_what_it_waits_for(monkeypatch: Any) -> None:
    monkeypatch.setattr(waiting, "_SLOW", 0)
    shown, seen = [], threading.Event()

    def show(line: str) -> None:
        shown.append(line)
        seen.set()

    with waiting.ticking("first", show, 0.01) as set_text:
        assert seen.wait(240) and shown[0].startswith("first (")
        set_text("second")
        seen.clear()
        while not shown[-1].startswith("second"):
            assert seen.wait(240)
            seen.clear()
    assert all(thread.name != "waiting" for thread in threading.enumerate())
