"""Commands on this machine."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from geomx_cli.hosts import local
from geomx_cli.hosts.local import LocalConnector


@pytest.mark.processes
def test_what_is_opened_while_the_connector_is_closed_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that reconnects in another thread may be between its check and its command."""
    host, made = LocalConnector(), list[Any]()
    begin = host._changing

    class Late:
        """Closes the connector when the new command has been started, before it is kept."""

        entered = 0

        def __enter__(self) -> None:
            self.entered += 1
            if self.entered == 2:
                monkeypatch.setattr(host, "_changing", begin)
                closing = threading.Thread(target=host.close)
                closing.start()
                closing.join(20)
            begin.acquire()

        def __exit__(self, *_: object) -> None:
            begin.release()

    monkeypatch.setattr(host, "_changing", Late())
    monkeypatch.setattr("geomx_cli.hosts.local._LocalChannel", _noted(made))
    with pytest.raises(OSError, match="was closed meanwhile"):
        host.open(["cat"])
    (channel,) = made
    assert channel._process.returncode is not None and channel._stdin.closed and channel._stdout.closed
    with pytest.raises(OSError, match="was closed meanwhile"):
        host.open(["cat"])


def _noted(made: list[Any]) -> type:
    class Noted(local._LocalChannel):
        """Keeps itself in `made`."""

        def __init__(self, argv: Sequence[str]) -> None:
            super().__init__(argv)
            made.append(self)

    return Noted
