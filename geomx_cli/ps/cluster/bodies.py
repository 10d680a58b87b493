"""The bodies of requests and answers by topic: each field with its type and bounds.

Peers are checked here, before any handler reads a field. Deliveries add their own topics. The topics of algorithms are
not listed: their handlers check the fields themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec

from geomx_cli.core.errors import Blame, Missed
from geomx_cli.core.typed import to_type
from geomx_cli.ps.net.wire import EVERY, BadMessage

__all__ = [
    "MAX_AWAITED", "MAX_COMPARED", "MAX_DECLARED", "MAX_PATIENCE", "MAX_SETTINGS", "MAX_TEXT", "TOPICS", "Body",
    "Count", "Rate", "Topic", "blame_in", "checked_answer", "checked_request",
]  # fmt: skip

MAX_PATIENCE = 1e9
"""Seconds."""

Body = dict[str, Any]

MAX_TEXT = 4096
"""Limit on the characters of a message or hint in a report of a failure. Readers of the report may add some."""
MAX_DECLARED = 256
"""Limit on the tensors in one declaration."""

MAX_AWAITED = 1024
"""Limit on the processes of a host that have not joined, in one request."""

MAX_TUNED = 65_536
"""Limit on the tensors with hyper-parameters of their own."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
_Name = Annotated[str, msgspec.Meta(max_length=1024)]
_Text = Annotated[str, msgspec.Meta(max_length=2 * MAX_TEXT)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Number = bool | int | float
_Setting = Annotated[str, msgspec.Meta(max_length=64)]
MAX_COMPARED = 2048
"""Limit on the tensors in a worker's row of a comparison."""
MAX_SETTINGS = 256
"""Limit on the hyper-parameters in a worker's row."""


class _Nothing(TypedDict):
    pass


class _Join(TypedDict):
    role: Literal["server", "worker"]
    process: _Name
    party: _Name
    host: _Name
    servers: Count
    workers: Count
    rank: NotRequired[int | None]
    endpoints: NotRequired[list[_Name]]
    group: NotRequired[_Name]


class _Member(TypedDict):
    process: _Name
    party: _Name
    host: _Name
    role: Literal["server", "worker"]
    rank: _Rank
    endpoints: list[_Name]


class _Joined(TypedDict):
    rank: _Rank
    scheduler: _Name
    members: list[_Member]


class _Pending(TypedDict):
    missing: _Text


class _Fail(TypedDict):
    process: _Name
    message: _Text
    hint: NotRequired[_Text]
    observer: NotRequired[_Name]
    missed: NotRequired[Missed]
    seconds: NotRequired[Rate]


class _Awaited(TypedDict):
    """See Scheduler.

    processes: further processes of the host that have not joined yet; empty if the connection ends.
    """

    host: _Name
    processes: Annotated[list[_Name], msgspec.Meta(max_length=MAX_AWAITED)]


class _Cluster(TypedDict):
    rank_scope: NotRequired[_Name]


class _Layout(TypedDict):
    workers: list[Count]
    central: Count
    root: bool
    flat: bool
    trains: bool
    gradients: bool
    party_index: Annotated[int, msgspec.Meta(ge=-1, le=65_535)]


class _Declare(TypedDict):
    """tensors: name, elements, dtype, elements in a row, shard (see Tensor)."""

    tensors: Annotated[
        list[tuple[_Name, int, _Name, int, Annotated[int, msgspec.Meta(ge=EVERY, le=65_535)]]],
        msgspec.Meta(max_length=MAX_DECLARED),
    ]
    by: _Name


class _Placements(TypedDict):
    """For each tensor its key, and offset, length, root and server of each slice."""

    placements: list[tuple[Count, list[tuple[Count, Count, _Rank, _Rank]]]]


class _Optimizer(TypedDict):
    """hold: hold all rounds. Otherwise the request has name, params and the other fields, see
    ControlClient.set_optimizer.

    The optimizer and the schedule check their numbers themselves, by name.
    """

    by: _Name
    hold: NotRequired[bool]
    name: NotRequired[_Name]
    params: NotRequired[dict[_Name, Any]]
    kind: NotRequired[_Name]
    schedule: NotRequired[tuple[_Name, dict[_Name, Any]] | None]
    multipliers: NotRequired[Annotated[list[tuple[Count, dict[_Name, Any]]], msgspec.Meta(max_length=MAX_TUNED)]]
    serial: NotRequired[Count]
    by_round: NotRequired[Annotated[list[tuple[Count, Count]], msgspec.Meta(max_length=MAX_TUNED)]]


class _Held(TypedDict):
    closed: NotRequired[list[tuple[Count, Count]]]


class _Barrier(TypedDict):
    """number: of this barrier within the scope, from 1, as the sender counts."""

    scope: Literal["party", "all"]
    number: Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class _Patience(TypedDict):
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_PATIENCE)]


class _Store(TypedDict):
    """See KeyValues. by, call: the process that makes the request, and the number of its call."""

    by: NotRequired[_Name]
    call: NotRequired[Annotated[int, msgspec.Meta(ge=0, le=2**62)]]
    op: Literal["set", "get", "wait", "add", "append", "compare", "check", "delete", "count"]
    keys: Annotated[list[_Name], msgspec.Meta(min_length=1, max_length=256)]
    values: NotRequired[Annotated[list[Annotated[bytes, msgspec.Meta(max_length=2**22)]], msgspec.Meta(max_length=256)]]
    number: NotRequired[Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]]
    seconds: NotRequired[Annotated[float, msgspec.Meta(ge=0, le=1e8)]]


class _Stored(TypedDict):
    found: NotRequired[bool]
    values: NotRequired[list[bytes]]
    number: NotRequired[int]


class _Mode(TypedDict):
    asynchronous: bool


class _Compression(TypedDict):
    spec: _Name


class _Compare(TypedDict):
    """A worker's row of ModelComparison.

    kind: "model": sketches of a model, with the hyper-parameters (`settings`) that may explain differences. "settings":
        settings that all workers have to have alike. "alone": the worker takes steps and exchanges nothing.
    of: how many workers send a row.
    layout: a checksum of the tensors' names. The first row also has the names.
    marks: a byte for each tensor.
    sketch: float32 numbers for each tensor.
    """

    by: _Name
    scope: Annotated[str, msgspec.Meta(max_length=64)]
    step: Count
    of: _Rank
    layout: Count
    names: Annotated[list[Annotated[str, msgspec.Meta(max_length=100)]], msgspec.Meta(max_length=MAX_COMPARED)]
    marks: Annotated[bytes, msgspec.Meta(max_length=MAX_COMPARED)]
    sketch: Annotated[bytes, msgspec.Meta(max_length=MAX_COMPARED * 20)]
    settings: Annotated[dict[_Setting, float], msgspec.Meta(max_length=MAX_SETTINGS)]
    kind: Literal["model", "settings", "alone"]
    platform: Annotated[str, msgspec.Meta(max_length=200)]


class _Stragglers(TypedDict):
    processes: list[_Name]


class _State(TypedDict):
    by: _Name
    root: NotRequired[_Rank]


class _StateRead(_State):
    at: Count


class _StateWrite(_StateRead):
    piece: bytes


class _StateBegin(_State):
    optimizer: _Name
    whole: _Name
    digest: _Name
    size: Count


class _StateOpened(TypedDict):
    size: Count
    optimizer: _Name
    params: dict[_Name, _Number]
    loaded: _Name


class _StatePiece(TypedDict):
    piece: bytes


class _StateBegun(TypedDict):
    go: Literal["on", "wait", "known"]


class _Split(TypedDict):
    request: Count


@dataclass(frozen=True, slots=True)
class Topic:
    """The fields of a topic's bodies, each with its type and bounds, as in a TypedDict. Further fields are dropped.

    request: the fields of a request.
    answer: the fields of its answer.
    notifies: whether the request may have no number. It is then a notification, which is lost with its connection and
        gets no answer.
    """

    request: type = _Nothing
    answer: type = _Nothing
    notifies: bool = False


TOPICS: Mapping[str, Topic] = {
    "join": Topic(_Join, _Joined), "awaited": Topic(_Awaited), "absent": Topic(_Fail),
    "pending": Topic(_Pending, notifies=True), "fail": Topic(_Fail), "bye": Topic(), "gone": Topic(), "leave": Topic(),
    "stuck": Topic(notifies=True), "split": Topic(_Split, notifies=True), "stragglers": Topic(answer=_Stragglers),
    "cluster": Topic(_Cluster, _Layout), "declare": Topic(_Declare, _Placements),
    "optimizer": Topic(_Optimizer, _Held), "barrier": Topic(_Barrier), "patience": Topic(_Patience),
    "mode": Topic(_Mode), "compression": Topic(_Compression), "compare": Topic(_Compare),
    "state_open": Topic(_State, _StateOpened), "state_read": Topic(_StateRead, _StatePiece),
    "state_close": Topic(_State), "state_begin": Topic(_StateBegin, _StateBegun), "state_write": Topic(_StateWrite),
    "store": Topic(_Store, _Stored),
}  # fmt: skip
"""The topics that every process may know. A delivery adds its own (Rpc.add_topics)."""


def blame_in(failure: Body) -> Blame:
    """The fields of PeerLost in the body of a "fail" request."""
    observer, missed, seconds = failure.get("observer", ""), failure.get("missed", ""), failure.get("seconds", 0.0)
    return {"peer": failure["process"], "observer": observer, "missed": missed, "seconds": seconds}


def checked_request(topic: str, body: Body, topics: Mapping[str, Topic] = TOPICS) -> Body:
    """The declared fields of a request. Raises BadMessage, which names the field that is missing or wrong."""
    return body if topic not in topics else _checked(topics[topic].request, body)


def checked_answer(topic: str, body: Body, topics: Mapping[str, Topic] = TOPICS) -> Body:
    """The declared fields of an answer. Raises BadMessage as for a request."""
    return body if topic not in topics else _checked(topics[topic].answer, body)


def _checked(kind: type, body: Body) -> Body:
    try:
        found: Body = to_type(body, kind, types=(bytes,))  # otherwise text may be bytes in base64
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadMessage(str(error)) from None
    return found
