"""When a worker of ESync asks the state server, and when it waits for the answer."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from geomx_cli.runtime.algorithms._esync_pacer import Pacer


class FakeClient:
    """Rank 0 of two workers; keeps what is asked, and answers only where the test does."""

    global_rank, num_all_workers = 0, 2

    def __init__(self, *, min_local_steps: int, query: str = "overlapped") -> None:
        self.asked: list[tuple[dict[str, Any], Future[dict[str, Any]]]] = []
        texts = {"esync_scope": "global", "esync_query": query}
        self.settings = SimpleNamespace(text=texts.__getitem__, number={"min_local_steps": min_local_steps}.__getitem__)

    def ask(self, topic: str, body: dict[str, Any]) -> "Future[dict[str, Any]]":
        assert topic == "esync"
        self.asked.append((body, Future()))
        return self.asked[-1][1]


@pytest.mark.parametrize("query", ["overlapped", "blocking"])
@pytest.mark.timeout(10)
def test_no_answer_is_waited_for_before_the_least_number_of_steps(query: str) -> None:
    client = FakeClient(min_local_steps=4, query=query)
    pacer = Pacer(client)  # type: ignore[arg-type]
    pacer.begin()
    assert [pacer.step() for _ in range(2)] == [False, False]
    assert [body["k"] for body, _ in client.asked] == [1], "one question at a time, and it has no answer yet"
    client.asked[0][1].set_result({"ready": False, "slowest": True, "epsilon": 0.5})
    assert not pacer.step()
    assert [body["k"] for body, _ in client.asked] == [1, 3]
    client.asked[1][1].set_result({"ready": False, "slowest": True, "epsilon": 0.5})
    ask = client.ask

    def answered(topic: str, body: dict[str, Any]) -> "Future[dict[str, Any]]":
        found = ask(topic, body)
        found.set_result({"ready": True, "slowest": True, "epsilon": 0.25})
        return found

    client.ask = answered  # type: ignore[method-assign]
    assert pacer.step(), "the fourth step's answer is the first that counts"
    assert client.asked[-1][0]["k"] == 4
    assert pacer.epsilon == 0.25
