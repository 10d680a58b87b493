"""What two processes say to each other: one header, and at most one payload.

The header is a msgpack array whose every field has bounds; whatever does not fit is refused as BadMessage before
anything is done with it. Nothing on the wire is ever unpickled. What payloads hold is in payload.py, which processes
without arrays (schedulers) never load.
"""

import math
import zlib
from enum import IntEnum
from typing import Annotated, Any

import msgspec

__all__ = [
    "DTYPE_NAMES",
    "ITEM_SIZES",
    "MAX_CODEC",
    "MAX_ELEMENTS",
    "MAX_HYPER",
    "MAX_MESSAGE",
    "VERSION",
    "BadMessage",
    "Form",
    "Header",
    "Kind",
    "Place",
    "Reply",
    "decode_body",
    "decode_header",
    "encode_body",
    "encode_header",
    "job_number",
    "largest_message",
]

VERSION = 4
MAX_ELEMENTS = 8_388_608
ROW_NUMBER_SIZE = 4
MAX_MESSAGE = MAX_ELEMENTS * (8 + ROW_NUMBER_SIZE) + 65_536
MAX_CONTROL = 16 * 2**20
MAX_CODEC = 64
"""Characters of a codec's name with its argument."""
MAX_HYPER = 16
"""Hyper-parameters in one message."""
DTYPE_NAMES = ("float32", "float64", "float16")
ITEM_SIZES = {"float32": 4, "float64": 8, "float16": 2}

MAX_ROUNDS_AHEAD = 64
"""Rounds of one key that a worker may have begun beyond the last one whose result it has."""


class BadMessage(Exception):
    """A message that is malformed, oversized or not for us. Counted and dropped; never ends a process."""


class Kind(IntEnum):
    """What a message is. An EXCHANGE is a contribution that expects the round's RESULT."""

    PUSH = 0
    PULL = 1
    EXCHANGE = 2
    RESULT = 3
    CONTROL = 4


class Form(IntEnum):
    """How the payload is to be read: all elements, rows of a matrix, all elements as a codec has encoded them, or so
    the changes since the result of the round before.
    """

    FULL = 0
    ROWS = 1
    ENCODED = 2
    CHANGE = 3


class Reply(IntEnum):
    """What the sender of an EXCHANGE wants of the round's result: all elements, those rows that it has changed if it
    has not changed all, or only to know that the round is over.
    """

    FULL = 0
    CHANGED = 1
    NONE = 2


class Place(IntEnum):
    """Where the payload lies."""

    NONE = 0
    FRAME = 1
    SHARED_MEMORY = 2


_U8 = Annotated[int, msgspec.Meta(ge=0, le=255)]
_U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_ELEMENTS)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
_Name = Annotated[str, msgspec.Meta(max_length=128)]
_Codec = Annotated[str, msgspec.Meta(max_length=MAX_CODEC)]
_Ranks = Annotated[tuple[_Rank, ...], msgspec.Meta(max_length=4096)]
_Hyper = Annotated[dict[Annotated[str, msgspec.Meta(max_length=32)], float], msgspec.Meta(max_length=MAX_HYPER)]


class Header(msgspec.Struct, array_like=True, kw_only=True, gc=False):
    """Every message begins with one.

    version: of this format. job: `job_number` of the job's name; that of another job is refused.
    kind, request (number that an answer repeats), topic (of a CONTROL).
    key, slice, root (rank of the root that owns the slice), offset and length in elements, dtype (index in
    DTYPE_NAMES).
    server: of an EXCHANGE of a worker: the rank of the server that it is for, whoever brings it there.
    row: elements in a row of the slice; 1 where its rows do not count. rows: number of rows in the payload (`form`
    ROWS): their elements, followed by their uint32 numbers in the slice, strictly increasing; a PULL has only these.
    round (of this key, from 1; of a PULL the last one that the sender has begun).
    sender (process name).
    acked: of an EXCHANGE: the sender has the results of all rounds of this slice up to this one; of a request: it has
    the answers to all its requests up to this one.
    contributors: ranks merged into the payload, ascending. weight: their sum of weights; 0, and no payload, from those
    who only take the round's result. An EXCHANGE with a weight and no payload asks whether the contribution has come.
    wide: the payload of an fp16 slice is fp32.
    codec: that of a payload of `form` ENCODED or CHANGE; of an EXCHANGE also the one in which its result may come.
    follows: of an EXCHANGE: its sender has, or will have, the result of the round before.
    reply: of an EXCHANGE, see Reply. A RESULT of fewer elements than all is of `form` ROWS.
    asynchronous: of a RESULT: parties go through rounds by themselves, so the global servers may have a newer value.
    value: version of a result. form and place of the payload. priority: higher goes first.
    credit: bytes of window that have been returned to the receiver of this message since there is this link.
    hyper: hyper-parameters of the optimizer that hold from this round on.
    """

    version: _U8 = VERSION
    job: _U32 = 0
    kind: Kind = Kind.CONTROL
    request: _Count = 0
    topic: _Name = ""
    key: _U32 = 0
    slice: _U32 = 0
    root: _Rank = 0
    offset: _Count = 0
    length: _Length = 0
    dtype: _U8 = 0
    row: _Length = 1
    rows: _Length = 0
    round: _Count = 0
    acked: _Count = 0
    sender: _Name = ""
    contributors: _Ranks = ()
    weight: float = 0.0
    wide: bool = False
    codec: _Codec = ""
    follows: bool = False
    reply: Reply = Reply.FULL
    asynchronous: bool = False
    value: _Count = 0
    form: Form = Form.FULL
    place: Place = Place.NONE
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31)] = 0
    credit: _Count = 0
    hyper: _Hyper = {}
    server: _Rank = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)
_body_decoder = msgspec.msgpack.Decoder(dict[str, Any])


def encode_header(header: Header) -> bytes:
    """The header as msgpack, about 70 bytes."""
    return _encoder.encode(header)


def decode_header(data: memoryview | bytes, job: int) -> Header:
    """Read and check a header. Raises BadMessage."""
    try:
        header = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"malformed header: {error}") from None
    if header.version != VERSION:
        raise BadMessage(f"version {header.version} of the protocol, not {VERSION}")
    if header.job != job:
        raise BadMessage("a message of another job")
    if header.dtype >= len(DTYPE_NAMES):
        raise BadMessage(f"unknown dtype {header.dtype}")
    _check_rows(header)
    if not 0 <= header.weight < math.inf:
        raise BadMessage(f"weight {header.weight}")
    if not all(map(math.isfinite, header.hyper.values())):
        raise BadMessage(f"hyper-parameters that are not finite: {header.hyper}")
    return header


def _check_rows(header: Header) -> None:
    if header.row < 1 or header.length % header.row or header.rows * header.row > header.length:
        raise BadMessage(f"{header.rows} rows of {header.row} in a slice of {header.length} elements")
    of_rows = header.form == Form.ROWS
    if (header.rows and not of_rows) or (of_rows and header.kind in (Kind.PUSH, Kind.CONTROL)):
        raise BadMessage(f"{header.rows} rows in a {header.kind.name} of form {header.form.name}")
    kinds = {Form.ENCODED: (Kind.EXCHANGE, Kind.RESULT), Form.CHANGE: (Kind.RESULT,)}
    if header.kind not in kinds.get(header.form, (header.kind,)):
        raise BadMessage(f"a {header.kind.name} of form {header.form.name}")


def encode_body(body: dict[str, Any]) -> bytes:
    """The body of a CONTROL message."""
    return _encoder.encode(body)


def largest_message(slice_bytes: int) -> int:
    """Bytes of the largest part of a message in a job whose slices have at most so many in float32."""
    return max(MAX_CONTROL, slice_bytes // 4 * (8 + ROW_NUMBER_SIZE)) + 65_536


def decode_body(data: memoryview | bytes, limit: int = MAX_CONTROL) -> dict[str, Any]:
    """Read the body of a CONTROL message, of at most `limit` bytes. Raises BadMessage."""
    if len(data) > limit:
        raise BadMessage(f"a control message of {len(data)} bytes")
    if len(data) == 0:
        return {}
    try:
        return _body_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"malformed body: {error}") from None


def job_number(job: str) -> int:
    """The job's name as the number that its messages carry."""
    return zlib.crc32(job.encode())
