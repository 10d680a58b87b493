"""Requests between processes: what is kept of answers."""

from typing import Any
from unittest.mock import Mock

import pytest

from geomx_cli.ps.cluster import rpc as module
from geomx_cli.ps.cluster.rpc import Rpc
from geomx_cli.ps.net.wire import BadMessage


def test_answers_that_a_peer_does_not_acknowledge_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 10_000)
    link: Any = Mock()
    rpc = Rpc(Mock(), 1.0)

    def ask(number: int, acked: int) -> None:
        request = rpc.receive(link, number, acked, "topic of an algorithm", {})
        assert request is not None
        request.answer({"text": "x" * 3000})

    for number in range(1, 5):
        ask(number, 0)
    with pytest.raises(BadMessage, match="does not acknowledge 12"):
        rpc.receive(link, 5, 0, "topic of an algorithm", {})
    for number in range(5, 50):
        ask(number, number - 1)
