"""When an ESync worker queries the state server, and when it waits for the answer."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from geomx_cli.runtime.algorithms._esync_client import EsyncClient

pytestmark = pytest.mark.timeout(10)


class FakeClient:
    """Rank 0 of two workers. `asked`: the queries; `answers`: those to the next queries, None for no answer yet."""

    global_rank, num_all_workers = 0, 2

    def __init__(self, *, min_local_steps: int, query: str = "overlapped") -> None:
        self.asked: list[tuple[dict[str, Any], Future[dict[str, Any]]]] = []
        self.answers: list[dict[str, Any] | None] = []
        self.control = SimpleNamespace(ask=self.ask)
        texts = {"esync_scope": "global", "esync_query": query}
        self.settings = SimpleNamespace(text=texts.__getitem__, number={"min_local_steps": min_local_steps}.__getitem__)

    def ask(self, topic: str, body: dict[str, Any]) -> "Future[dict[str, Any]]":
        assert topic == "esync"
        self.asked.append((body, Future()))
        found = {} if body["do"] != "query" else self.answers.pop(0)
        if found is not None:
            self.asked[-1][1].set_result(found)
        return self.asked[-1][1]

    @property
    def steps(self) -> list[int]:
        """The steps in the queries."""
        return [body["k"] for body, _ in self.asked if body["do"] == "query"]


def answer(*, ready: bool, slowest: bool, epsilon: float = 0.5) -> dict[str, Any]:
    return {"ready": ready, "slowest": slowest, "epsilon": epsilon}


@pytest.mark.parametrize("query", ["overlapped", "blocking"])
def test_no_answer_is_waited_for_before_the_least_number_of_steps(query: str) -> None:
    client = FakeClient(min_local_steps=4, query=query)
    client.answers = [None, answer(ready=True, slowest=True, epsilon=0.25)]
    esync = EsyncClient(client)  # type: ignore[arg-type]
    esync.begin()
    assert [esync.step() for _ in range(3)] == [False] * 3
    assert client.steps == [1], "one question at a time, and it has no answer yet"
    client.asked[0][1].set_result(answer(ready=False, slowest=True))
    assert esync.step(), "the fourth step's answer is the first that counts"
    assert client.steps == [1, 4]
    assert esync.epsilon == 0.25


def test_who_is_not_the_slowest_goes_on_while_it_asks() -> None:
    client = FakeClient(min_local_steps=2)
    client.answers = [answer(ready=False, slowest=False), None, answer(ready=True, slowest=False)]
    esync = EsyncClient(client)  # type: ignore[arg-type]
    esync.begin()
    assert [esync.step() for _ in range(4)] == [False] * 4
    assert client.steps == [1, 2], "the second has no answer for two steps, and is not waited for"
    client.asked[1][1].set_result(answer(ready=False, slowest=False))
    assert esync.step()
    assert client.steps == [1, 2, 5]


def test_a_question_that_could_not_end_the_round_is_asked_anew_at_the_step_that_can() -> None:
    client = FakeClient(min_local_steps=2, query="blocking")
    client.answers = [None, answer(ready=True, slowest=False), None, answer(ready=True, slowest=False)]
    esync = EsyncClient(client)  # type: ignore[arg-type]
    esync.begin()
    assert not esync.step()
    client.asked[0][1].set_result(answer(ready=False, slowest=False))
    assert esync.step()
    esync.begin()
    assert not esync.step()
    late = client.asked[-1][1]
    late.set_result(answer(ready=False, slowest=False))
    assert esync.step()
    assert client.steps == [1, 2, 1, 2]


def test_an_answer_about_a_round_that_others_have_ended_does_not_end_the_next_one() -> None:
    """The state server does not know that this worker is ready: who waits for something else would not join."""
    client = FakeClient(min_local_steps=1)
    client.answers = [answer(ready=False, slowest=False), None, answer(ready=False, slowest=False)]
    esync = EsyncClient(client)  # type: ignore[arg-type]
    esync.begin()
    assert [esync.step() for _ in range(2)] == [False] * 2
    client.asked[-1][1].set_result(answer(ready=True, slowest=False))
    esync.begin()
    assert not esync.step()
    assert client.steps == [1, 2, 1]
