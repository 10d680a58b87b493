"""Links whose peer is killed and started again: what was asked for is asked again, and all that is counted begins anew.

The ends are nodes with loops of their own. A kill closes an end's sockets at once.
"""

import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster import free_ports, until
from proxy import Proxy

from geomx_cli.contract.config import NodeSettings
from geomx_cli.core.errors import GeomxError
from geomx_cli.core.options import defaults
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.net import accepted_links
from geomx_cli.ps.net.lanes import LANES, Lane
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.transport import LEFT_OVER
from geomx_cli.ps.net.wire import Header, Kind, number_base

WINDOW, SLICE, COUNT = 1 << 18, 1 << 16, 30
"""COUNT slices are several windows."""
BELOW, ABOVE = "A/worker:0", "A/server:0"


class End:
    """One life of a process. It answers requests and contributions, unless it holds them.

    links, renewed: as its node reports them. done, asked: the topics and rounds that it has handled.
    warned: its warnings.
    """

    def __init__(self, name: str, incarnation: int = 0, *, wan: bool = False, holds: bool = False) -> None:
        self.links, self.renewed = list[Link](), list[Link]()
        self.done, self.asked, self.warned = list[str](), list[int](), list[str]()
        self.held: list[Request] = []
        self.holds = holds
        options = {**defaults(), "window": WINDOW, "heartbeat": 0.1, "wan": "100mbit,20ms" if wan else ""}
        party = "B" if wan and name == ABOVE else "A"
        settings = NodeSettings(process=name, party=party, incarnation=incarnation, options=options)
        events: Any = SimpleNamespace(
            is_kept=False, write=lambda event: self.warned.append(getattr(event, "message", ""))
        )
        self.upstream = UpstreamClient(incarnation)
        self.node = Node(
            settings, events, on_tensor=self._on_tensor, on_request=self._on_request, on_link=self.links.append,
            on_renewed=self.renewed.append, on_reconnect=self.upstream.repeat,
            on_asked=lambda link, header: self.upstream.again(link, header.request),
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.failure: BaseException | None = None
        self.dead = False

    def _run(self) -> None:
        try:
            self.node.loop.run()
        except BaseException as error:
            self.failure = error
            raise

    def listen(self, endpoint: str) -> str:
        found = self.node.transport.listen((endpoint,))[0]
        self._thread.start()
        return found

    def dial(self, endpoint: str, plane: str = "local") -> Link:
        far = self.node.settings.party == "A" and bool(self.node.transport.wan)
        link = self.node.transport.dial(endpoint, ABOVE, wide_area=far, plane=plane, rank=0)
        self._thread.start()
        return link

    def kill(self) -> None:
        if not self.dead:
            self.dead = True
            self.node.loop.submit(self.node.loop.stop)
            self._thread.join()
            assert self.failure is None
            self.node.transport._sockets.close(0)

    def ask(self, link: Link, topic: str) -> list[str]:
        """Make a request; the answers come over time."""
        answers = list[str]()

        def answered(body: dict[str, Any]) -> None:
            answers.append(f"{body['topic']} by {body['by']}")

        def failed(error: GeomxError) -> None:
            answers.append(str(error))

        self.node.loop.submit(lambda: self.node.rpc.ask(link, topic, {}, answered, failed))
        return answers

    def contribute(self, link: Link, first: int, count: int = COUNT) -> list[int]:
        """Contribute to rounds; those whose results arrive over time."""
        results = list[int]()

        def send() -> None:
            for number in range(first, first + count):
                header = Header(kind=Kind.EXCHANGE, key=1, round=number, length=SLICE // 4, size=SLICE // 4, weight=1.0)
                payload = memoryview(bytes([number % 256]) * SLICE)
                self.upstream.send(link, header, payload, lambda found, _: results.append(found.round))

        self.node.loop.submit(send)
        return results

    def _on_request(self, request: Request) -> None:
        self.done.append(request.topic)
        if self.holds:
            self.held.append(request)
        else:
            self._answer(request)

    def _answer(self, request: Request) -> None:
        request.answer({"topic": request.topic, "by": self.node.settings.incarnation})

    def answer_held(self) -> None:
        self.node.loop.submit(lambda: [self._answer(request) for request in self.held])

    def _on_tensor(self, link: Link, header: Header, payload: memoryview | None) -> None:
        if header.kind == Kind.RESULT:
            self.upstream.on_result(link, header, payload)
            return
        if payload is None:
            link.ask_again(header.request)
            return
        self.asked.append(header.round)
        assert payload[0] == payload[-1] == header.round % 256
        link.consumed(len(payload))
        if not self.holds:
            about = {name: getattr(header, name) for name in ("request", "key", "round", "length", "size")}
            link.send(Header(kind=Kind.RESULT, **about), memoryview(bytes(payload)))


@pytest.fixture
def start() -> Iterator[Callable[..., End]]:
    """Starts ends, which are killed at last."""
    ends = list[End]()

    def begin(name: str, incarnation: int = 0, **how: bool) -> End:
        ends.append(End(name, incarnation, **how))
        return ends[-1]

    yield begin
    for end in ends:
        end.kill()


@pytest.fixture(params=["tcp", "ipc", "wan"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def endpoint(kind: str) -> Iterator[str]:
    path = Path(f"/tmp/gx-{uuid.uuid4().hex[:12]}")
    yield f"ipc://{path}" if kind == "ipc" else f"tcp://127.0.0.1:{free_ports(1)[0]}"
    path.unlink(missing_ok=True)


def assert_shared(kind: str, *links: Link) -> None:
    """Payloads are lent over a unix socket, and everything that was lent has come back."""
    for link in links:
        assert (link._memory is not None) == (kind == "ipc")
        if link._memory is not None:
            assert link._memory._lends and link._memory._theirs is not None
            until(lambda memory=link._memory: not memory._mine.used)


def test_a_dialling_process_that_is_started_again_keeps_its_link(
    start: Callable[..., End], kind: str, endpoint: str
) -> None:
    above, below = start(ABOVE, wan=kind == "wan", holds=True), start(BELOW, wan=kind == "wan", holds=True)
    above.listen(endpoint)
    link = below.dial(endpoint)
    below.contribute(link, 1)
    below.ask(link, "of the first life")
    until(lambda: above.asked and above.held, 20)
    answers = above.ask(above.links[0], "of one that lives")
    until(lambda: below.held)
    below.kill()
    above.holds = False
    again = start(BELOW, 1, wan=kind == "wan")
    link = again.dial(endpoint)
    results, asked = again.contribute(link, 101), again.ask(link, "of the second life")
    until(lambda: len(results) == COUNT and asked and answers, 30, lambda: f"{results} {asked} {answers}")
    above.answer_held()
    assert sorted(results) == list(range(101, 101 + COUNT)) and asked == ["of the second life by 0"]
    assert answers == ["of one that lives by 1"], "it was asked again, and answered once"
    assert {number for number in above.asked if number > COUNT} == set(results)
    assert above.renewed == above.links and len(above.links) == 1
    assert above.links[0].incarnation == above.links[0].hello["incarnation"] == 1
    assert above.ask(above.links[0], "last") is not None
    until(lambda: "last" in again.done)
    assert again.done == ["of one that lives", "last"] and again.upstream.waiting == 0
    assert not any("was cut" in warning for warning in above.warned)  # its agent tells of the restart
    assert not any("is back" in message for message in above.warned + again.warned)
    assert_shared(kind, link, above.links[0])


def test_a_listening_process_that_is_started_again_keeps_its_link(
    start: Callable[..., End], kind: str, endpoint: str
) -> None:
    """Whoever has dialled it asks again for all that it has not got."""
    above, below = start(ABOVE, wan=kind == "wan"), start(BELOW, wan=kind == "wan")
    above.listen(endpoint)
    link = below.dial(endpoint)
    first = below.contribute(link, 1)
    until(lambda: len(first) == COUNT)
    above.holds = True
    results, answers = below.contribute(link, 101), below.ask(link, "of one that lives")
    until(lambda: len(above.asked) > COUNT and above.held)
    consumed = link.returned
    above.kill()
    again = start(ABOVE, 1, wan=kind == "wan")
    again.listen(endpoint)
    until(lambda: len(results) == COUNT and answers, 30, lambda: f"{len(results)} {answers}")
    assert sorted(results) == sorted(set(again.asked)) == list(range(101, 101 + COUNT))
    assert answers == ["of one that lives by 1"] and again.done == ["of one that lives"]
    assert below.renewed == [link] and not any("was cut" in warning for warning in below.warned)
    assert not any("is back" in message for message in below.warned)
    assert consumed > 0 and link.returned <= COUNT * SLICE
    more = below.contribute(link, 201)
    until(lambda: len(more) == COUNT)
    assert_shared(kind, link, again.links[0])


def test_both_ends_may_be_started_again_at_once(start: Callable[..., End], kind: str, endpoint: str) -> None:
    above, below = start(ABOVE, wan=kind == "wan", holds=True), start(BELOW, wan=kind == "wan")
    above.listen(endpoint)
    below.contribute(below.dial(endpoint), 1)
    until(lambda: above.asked)
    below.kill()
    above.kill()
    again, then = start(BELOW, 1, wan=kind == "wan"), start(ABOVE, 1, wan=kind == "wan")
    link = again.dial(endpoint)
    results = again.contribute(link, 101)
    then.listen(endpoint)
    until(lambda: len(results) == COUNT)
    assert not again.renewed and not then.renewed, "neither knows the other's earlier life"
    again.kill()
    third = start(BELOW, 2, wan=kind == "wan")
    link = third.dial(endpoint)
    results = third.contribute(link, 201)
    until(lambda: len(results) == COUNT)
    assert then.renewed == then.links and then.links[0].incarnation == 2
    assert_shared(kind, link, then.links[0])


def test_a_process_may_be_killed_again_and_again(start: Callable[..., End]) -> None:
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    above, below = start(ABOVE), start(BELOW)
    above.listen(endpoint)
    link = below.dial(endpoint)
    results = below.contribute(link, 1, 200)
    for incarnation in range(1, 5):
        until(lambda above=above: len(set(above.asked)) >= 5)
        above.kill()
        above = start(ABOVE, incarnation)
        above.listen(endpoint)
    until(lambda: len(results) == 200)
    assert sorted(results) == list(range(1, 201)) and below.renewed == [link] * 4


def test_what_the_dead_process_has_sent_is_dropped(start: Callable[..., End]) -> None:
    """It may be read after what the next one says. Here the dead one lives on."""
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    above, old, new, late = start(ABOVE), start(BELOW), start(BELOW, 3), start(BELOW, 2)
    above.listen(endpoint)
    first = old.dial(endpoint)
    until(lambda: first.lanes.all_up)
    second = new.dial(endpoint)
    until(lambda: second.lanes.all_up)
    old.contribute(first, 1)
    old.ask(first, "from the dead")
    asked = new.ask(second, "from the living")
    until(lambda: asked and above.node.transport.counters[LEFT_OVER] > 2)
    third = late.dial(endpoint)
    late.ask(third, "from one in between")
    refused = f"a hello of {BELOW} in incarnation 2, which has ended"
    until(lambda: any(refused in message for message in above.warned))
    assert above.done == ["from the living"] and above.asked == [] and len(above.links) == 1
    assert not third.lanes.all_up


@pytest.mark.parametrize("lane", LANES)
def test_what_the_dead_listener_has_sent_is_dropped(start: Callable[..., End], lane: Lane) -> None:
    """The connection of one lane leads to it, when the other one's leads to the next life already."""
    front, *ports = free_ports(3)
    proxy = Proxy({front: ports[0]})
    old, new, below = start(ABOVE), start(ABOVE, 1), start(BELOW)
    old.listen(f"tcp://127.0.0.1:{ports[0]}")
    new.listen(f"tcp://127.0.0.1:{ports[1]}")
    link = below.dial(f"tcp://127.0.0.1:{front}")
    results = below.contribute(link, 1)
    # The last credit goes over the lane that is cut; without it the dead listener could send nothing.
    until(lambda: len(results) == COUNT and old.links[0].returned == COUNT * SLICE)
    proxy._listeners = dict.fromkeys(proxy._listeners, ports[1])
    below.node.loop.submit(link.lanes.connections[lane].shut_down)
    until(lambda: below.renewed)
    assert link.lanes.stale == {*LANES} - {lane} and not link.lanes.all_up
    above = old.links[0]
    old.node.loop.submit(lambda: above.control("word"))
    old.node.loop.submit(lambda: above.send(Header(kind=Kind.RESULT, length=1, size=1), memoryview(bytes(4))))
    until(lambda: below.node.transport.counters[LEFT_OVER])
    assert link.returned == 0
    proxy.cut()
    more = below.contribute(link, 101)
    until(lambda: len(more) == COUNT)
    assert set(new.asked) == set(more) and not link.lanes.stale and len(below.renewed) == 1


def test_a_process_that_was_started_twice_gets_a_link_of_its_own(start: Callable[..., End]) -> None:
    """In each incarnation; and nothing is renewed for it."""
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    above = start(ABOVE)
    above.listen(endpoint)
    for incarnation in (0, 1):
        for _ in range(2):
            end = start(BELOW, incarnation)
            answers = end.ask(end.dial(endpoint), "who")
            until(lambda answers=answers: answers)
    assert [link.hello["incarnation"] for link in above.links] == [1, 0, 1]
    assert above.renewed == [above.links[0]]


def test_links_of_one_process_are_bounded_over_all_its_lives(
    start: Callable[..., End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that makes more leaves others theirs; and what ended long ago is forgotten."""
    monkeypatch.setattr(accepted_links, "MAX_OF_ONE", 2)
    monkeypatch.setattr(accepted_links, "MAX_ENDED", 3)
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    above = start(ABOVE)
    above.listen(endpoint)
    for incarnation in range(3):
        for dials in range(2):
            before = above.node.transport.counters["malformed"]
            end = start(BELOW, incarnation)
            answers = end.ask(end.dial(endpoint), "who")
            refused = incarnation and dials
            until(lambda answers=answers, before=before: answers or above.node.transport.counters["malformed"] > before)
            assert not (refused and answers)
    other = start("A/worker:1")
    answers = other.ask(other.dial(endpoint), "who")
    until(lambda: answers)
    assert [link.name for link in above.links] == [BELOW, BELOW, "A/worker:1"]
    assert len(above.node.transport._accepted.ended) == 3


@pytest.mark.parametrize("incarnation", [-1, 1001, 2**60, True, 1.0, "1", None])
def test_an_incarnation_out_of_bounds_is_refused(start: Callable[..., End], incarnation: Any) -> None:
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    above, below = start(ABOVE), start(BELOW)
    above.listen(endpoint)
    below.node.transport.who["incarnation"] = incarnation
    below.dial(endpoint)
    until(lambda: above.node.transport.counters["malformed"] >= 2)
    assert above.links == []
    with pytest.raises(GeomxError, match="GEOMX_INCARNATION=1001"):
        End(BELOW, 1001)


def test_numbers_of_lives_never_meet() -> None:
    assert number_base(0) == 0 and number_base(1) == 2**36
    assert number_base(1001) <= 2**53
