"""Requests between processes: what is kept of answers."""

from typing import Any
from unittest.mock import Mock

import pytest

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.cluster import rpc as module
from geomx_cli.ps.cluster.bodies import Topic
from geomx_cli.ps.cluster.rpc import Rpc
from geomx_cli.ps.net.wire import BadMessage, number_base


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


@pytest.mark.parametrize("topic", ["bye", "stuck", "want", "answer"])
def test_a_delivery_takes_no_topic_of_geomx(topic: str) -> None:
    rpc = Rpc(Mock(), 1.0)
    rpc.add_topics({"own": Topic(notifies=True)})
    for taken in (topic, "own"):
        with pytest.raises(InvalidSettings, match=f"the topic '{taken}' is taken"):
            rpc.add_topics({taken: Topic()})
    assert rpc.receive(Mock(), 0, 0, "own", {}) is not None


def test_a_topic_that_does_not_notify_needs_a_number() -> None:
    rpc = Rpc(Mock(), 1.0)
    rpc.add_topics({"own": Topic()})
    with pytest.raises(BadMessage, match="a request 'own' without a number"):
        rpc.receive(Mock(), 0, 0, "own", {})


def test_a_peer_that_was_restarted_is_answered_nothing_that_it_asked_for_before() -> None:
    link: Any = Mock()
    rpc = Rpc(Mock(), 1.0)
    first = rpc.receive(link, 7, 0, "topic of an algorithm", {})
    assert first is not None
    rpc.renew(link)
    first.answer({"late": True})
    link.control.assert_not_called()
    second = rpc.receive(link, number_base(1) + 1, number_base(1), "topic of an algorithm", {})
    assert second is not None
    second.answer({"late": False})
    link.control.assert_called_once()


def test_numbers_begin_with_the_incarnation() -> None:
    link: Any = Mock()
    rpc = Rpc(Mock(), 1.0, 3)
    rpc.ask(link, "topic", {}, Mock(), Mock())
    assert link.control.call_args.args == ("topic", {}, number_base(3) + 1, number_base(3))
    rpc.answered(link, 5, {})  # to a request of an earlier life
    with pytest.raises(BadMessage, match="unsolicited"):
        rpc.answered(link, number_base(3) + 2, {})
