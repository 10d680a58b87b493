"""The bodies of requests and answers by topic: each field with its type and bounds.

Peers are checked here, before any handler reads a field. Topics of algorithms and deliveries are not listed; their
handlers check themselves.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec

from geomx_cli.core.typed import to_type
from geomx_cli.ps.net.wire import EVERY, MAX_REPORTED, BadMessage

__all__ = [
    "MAX_AWAITED", "MAX_COMPARED", "MAX_DECLARED", "MAX_PATIENCE", "MAX_SETTINGS", "MAX_TEXT", "Body", "checked_answer",
    "checked_request",
]  # fmt: skip

MAX_PATIENCE = 1e9
"""Seconds."""

Body = dict[str, Any]

MAX_TEXT = 4096
"""Characters of a message or hint in a report of a failure, to which its readers may add some."""
MAX_DECLARED = 256
"""Tensors in one declaration."""

MAX_AWAITED = 1024
"""Processes of a host that have not joined, in one request."""

MAX_TUNED = 65_536
"""Tensors with hyper-parameters of their own."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
_Name = Annotated[str, msgspec.Meta(max_length=1024)]
_Text = Annotated[str, msgspec.Meta(max_length=2 * MAX_TEXT)]
_Rate = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Number = bool | int | float
_Setting = Annotated[str, msgspec.Meta(max_length=64)]
MAX_COMPARED = 2048
"""Tensors in a worker's row of a comparison."""
MAX_SETTINGS = 256
"""Hyper-parameters in it."""


class _Nothing(TypedDict):
    pass


class _Join(TypedDict):
    role: Literal["server", "worker"]
    process: _Name
    party: _Name
    host: _Name
    servers: _Count
    workers: _Count
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


class _Awaited(TypedDict):
    """See Scheduler. processes: more of those of the host that have not joined yet; none: the connection ends."""

    host: _Name
    processes: Annotated[list[_Name], msgspec.Meta(max_length=MAX_AWAITED)]


class _Cluster(TypedDict):
    rank_scope: NotRequired[_Name]


class _Layout(TypedDict):
    workers: list[_Count]
    central: _Count
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

    placements: list[tuple[_Count, list[tuple[_Count, _Count, _Rank, _Rank]]]]


class _Optimizer(TypedDict):
    """hold: hold all rounds. Otherwise name, params and the others: see ControlClient.set_optimizer. The optimizer and
    the schedule check their numbers themselves, by name.
    """

    by: _Name
    hold: NotRequired[bool]
    name: NotRequired[_Name]
    params: NotRequired[dict[_Name, Any]]
    kind: NotRequired[_Name]
    schedule: NotRequired[tuple[_Name, dict[_Name, Any]] | None]
    multipliers: NotRequired[Annotated[list[tuple[_Count, dict[_Name, Any]]], msgspec.Meta(max_length=MAX_TUNED)]]
    serial: NotRequired[_Count]
    by_round: NotRequired[Annotated[list[tuple[_Count, _Count]], msgspec.Meta(max_length=MAX_TUNED)]]


class _Held(TypedDict):
    closed: NotRequired[list[tuple[_Count, _Count]]]


class _Barrier(TypedDict):
    scope: Literal["party", "all"]


class _Patience(TypedDict):
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_PATIENCE)]


class _Store(TypedDict):
    """See KeyValues."""

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

    kind: sketches of a "model", with the hyper-parameters (`settings`) that may explain differences; "settings" that
    all workers have to have alike; or "alone": the worker takes steps and exchanges nothing.
    of: how many workers send one.
    layout: a checksum of the tensors' names, which are sent with the first row.
    marks: a byte for each tensor. sketch: float32 numbers for each.
    """

    by: _Name
    scope: Annotated[str, msgspec.Meta(max_length=64)]
    step: _Count
    of: _Rank
    layout: _Count
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
    at: _Count


class _StateWrite(_StateRead):
    piece: bytes


class _StateBegin(_State):
    optimizer: _Name
    whole: _Name
    digest: _Name
    size: _Count


class _StateOpened(TypedDict):
    size: _Count
    optimizer: _Name
    params: dict[_Name, _Number]
    loaded: _Name


class _StatePiece(TypedDict):
    piece: bytes


class _StateBegun(TypedDict):
    go: Literal["on", "wait", "known"]


class _Loss(TypedDict):
    loss: float


class _DatagramsOpen(TypedDict):
    salt: bytes


class _DatagramsOpened(_DatagramsOpen):
    session: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    port: Annotated[int, msgspec.Meta(ge=1, lt=65_536)]


class _Datagrams(TypedDict):
    """sent: key, slice and round of contributions whose blocks have all been sent, in datagrams below these `counters`
    of each channel. received: bytes so far, `at` seconds of the receiver's clock, and the longest datagram.
    """

    sent: NotRequired[Annotated[list[tuple[_Count, _Count, _Count]], msgspec.Meta(max_length=MAX_REPORTED)]]
    counters: NotRequired[Annotated[list[_Count], msgspec.Meta(max_length=64)]]
    received: NotRequired[_Count]
    at: NotRequired[float]
    longest: NotRequired[_Count]


class _Split(TypedDict):
    request: _Count


class _Overlay(TypedDict):
    """received: bytes so far; rate: bytes per second towards the receiver; servers: to and from each server
    above. expect:
    key and slice of contributions that the receiver is to relay; skip: key, slice and round of those that do not come
    there; refused: requests that the sender does not serve.
    """

    received: NotRequired[_Count]
    rate: NotRequired[_Rate]
    servers: NotRequired[Annotated[list[tuple[_Rate, _Rate]], msgspec.Meta(max_length=4096)]]
    left: NotRequired[bool]
    expect: NotRequired[list[tuple[_Count, _Count]]]
    skip: NotRequired[list[tuple[_Count, _Count, _Count]]]
    refused: NotRequired[list[_Count]]


_REQUESTS: Mapping[str, type] = {
    "join": _Join, "awaited": _Awaited, "absent": _Fail, "pending": _Pending, "fail": _Fail, "bye": _Nothing,
    "gone": _Nothing, "leave": _Nothing, "stuck": _Nothing, "stragglers": _Nothing, "cluster": _Cluster,
    "declare": _Declare, "optimizer": _Optimizer,
    "barrier": _Barrier, "patience": _Patience, "mode": _Mode, "compression": _Compression, "compare": _Compare,
    "state_open": _State, "state_read": _StateRead,
    "state_close": _State, "state_begin": _StateBegin, "state_write": _StateWrite, "loss": _Loss,
    "datagrams_open": _DatagramsOpen, "datagrams": _Datagrams, "split": _Split, "overlay": _Overlay, "store": _Store,
}  # fmt: skip
_ANSWERS: Mapping[str, type] = {
    **dict.fromkeys(_REQUESTS, _Nothing), "join": _Joined, "stragglers": _Stragglers, "cluster": _Layout,
    "declare": _Placements, "optimizer": _Held, "state_open": _StateOpened, "state_read": _StatePiece,
    "state_begin": _StateBegun, "datagrams_open": _DatagramsOpened, "store": _Stored,
}  # fmt: skip


def checked_request(topic: str, body: Body) -> Body:
    """The declared fields of a request. Raises BadMessage, which names the field that is missing or wrong."""
    return _checked(_REQUESTS, topic, body)


def checked_answer(topic: str, body: Body) -> Body:
    """The declared fields of an answer. Raises BadMessage as for a request."""
    return _checked(_ANSWERS, topic, body)


def _checked(kinds: Mapping[str, type], topic: str, body: Body) -> Body:
    if topic not in kinds:
        return body
    try:
        found: Body = to_type(body, kinds[topic], types=(bytes,))  # else text may be bytes in base64
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadMessage(str(error)) from None
    return found
