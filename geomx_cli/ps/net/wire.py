"""The wire format: one header and at most one payload.

The header is a msgpack array whose fields are all bounded. A field out of bounds raises BadMessage before it is used.
Nothing on the wire is ever unpickled. payload.py handles payload contents. Processes without arrays (schedulers) never
import it.
"""

import math
import sys
import zlib
from enum import IntEnum
from typing import Annotated, Any

import msgspec

from geomx_cli.contract.codecs import MAX_CODEC

__all__ = [
    "DTYPE_NAMES",
    "EVERY",
    "FLOAT_NAMES",
    "ITEM_SIZES",
    "MAX_ELEMENTS",
    "MAX_HELLO",
    "MAX_HYPER",
    "MAX_INCARNATION",
    "MAX_MESSAGE",
    "VERSION",
    "BadMessage",
    "DamagedPayload",
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
    "number_base",
    "largest_message",
]

VERSION = 13
MAX_ELEMENTS = 8_388_608
ROW_NUMBER_SIZE = 4
MAX_MESSAGE = MAX_ELEMENTS * (8 + ROW_NUMBER_SIZE) + 65_536
MAX_CONTROL = 16 * 2**20
MAX_HELLO = 4096
MAX_HYPER = 16
"""Limit on the hyper-parameters in one message."""
FLOAT_NAMES = ("float32", "float64", "float16")
DTYPE_NAMES = (*FLOAT_NAMES, "uint8")
"""uint8: bytes, which are never encoded. In a round they come from one member, or are 0 in all members but one."""
ITEM_SIZES = {"float32": 4, "float64": 8, "float16": 2, "uint8": 1}

EVERY = -1
"""The `shard` of a key to which all workers contribute."""
MAX_WEIGHT, MAX_WORKER_WEIGHT = 2.0**600, 2.0**512
"""Limits on the weight of a contribution, and of a contribution to a local server. So a party's sum stays below the
first limit, and the sum of all parties is finite. Elections (runtime/training/stop_vote.py) have weights of up to
2^480.
"""
MAX_INCARNATION = 1000
MAX_REPORTED = 4096
"""Limit on the contributions in one report on datagrams."""


class BadMessage(Exception):
    """A message that is malformed, oversized or not for this process. It is counted and dropped, and never ends a
    process.
    """


class DamagedPayload(BadMessage):
    """A payload whose size differs from its header, so that a retransmission may be intact."""


class Kind(IntEnum):
    """The kind of a message. A PUSH sets an initial value. An EXCHANGE is a contribution that expects the round's
    RESULT. A PART is a part of a contribution, which a delivery assembles.
    """

    PUSH = 0
    PULL = 1
    EXCHANGE = 2
    RESULT = 3
    CONTROL = 4
    PART = 5


class Form(IntEnum):
    """How to read the payload: all elements, rows of a matrix, all elements encoded by a codec, or the encoded changes
    since the previous round's result.
    """

    FULL = 0
    ROWS = 1
    ENCODED = 2
    CHANGE = 3


class Reply(IntEnum):
    """The part of the round's result that the sender of an EXCHANGE needs: all elements; or only the changed rows (all
    if all have changed); or only the notice that the round has ended.
    """

    FULL = 0
    CHANGED = 1
    NONE = 2


class Place(IntEnum):
    """Where the payload is."""

    NONE = 0
    FRAME = 1
    SHARED_MEMORY = 2


_U8 = Annotated[int, msgspec.Meta(ge=0, le=255)]
_U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_ELEMENTS)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
_Shard = Annotated[int, msgspec.Meta(ge=EVERY, le=32_767)]
_Name = Annotated[str, msgspec.Meta(max_length=128)]
_Codec = Annotated[str, msgspec.Meta(max_length=MAX_CODEC)]
_Ranks = Annotated[tuple[_Rank, ...], msgspec.Meta(max_length=4096)]
_Hyper = Annotated[dict[Annotated[str, msgspec.Meta(max_length=32)], float], msgspec.Meta(max_length=MAX_HYPER)]


class Header(msgspec.Struct, array_like=True, kw_only=True, gc=False):
    """The header of every message.

    version: version of this format.
    job: `job_number` of the job's name. Messages of another job are refused.
    kind: see Kind.
    request: the request's number, repeated in the answer. See `number_base`.
    topic: of a CONTROL.
    key, slice: the tensor, and the slice in it.
    root: rank of the root that owns the slice.
    offset, length: of the slice in the tensor, in elements.
    size: elements of the whole tensor.
    dtype: index in DTYPE_NAMES.
    shard: the rank, in its party, of the only worker of each party that contributes to the key. EVERY: all contribute.
    server: for a worker's EXCHANGE: the rank of the server that it is for, whichever process delivers it.
    row: elements in a row of the slice; 1 for dense slices.
    rows: number of rows in the payload (`form` ROWS). The payload has their elements, then their uint32 numbers in the
        slice, strictly increasing. A PULL has only the numbers.
    round: round of this key, from 1; for a PULL, the last round that the sender has begun.
    acked: for a request: its sender has the answers to all its requests up to this one. For a "welcome": the
        incarnation of its sender.
    contributors: ranks merged into the payload, ascending.
    weight: the sum of their weights. A member that abstains sends 0 and no payload. An EXCHANGE with a weight and no
        payload asks whether the contribution was received.
    wide: whether the payload of an fp16 slice is fp32.
    codec: the codec of a payload of `form` ENCODED or CHANGE. In an EXCHANGE also the accepted encoding of its result.
    follows: for an EXCHANGE: whether its sender has, or will have, the previous round's result.
    reply: for an EXCHANGE, see Reply. A RESULT with fewer than all elements has the `form` ROWS.
    is_sum: for a RESULT: whether it is the sum of its round alone, not a value that rounds update.
    asynchronous: for a RESULT: whether parties complete rounds separately. Then the global servers may have a newer
        value.
    value: version of a result.
    missed_to: for a RESULT without a value: its round was over without this member, as are the rounds up to this one.
    form, place: of the payload.
    priority: messages with a higher priority go first.
    credit: bytes of window returned to the receiver of this message since the link exists.
    arrived: bytes of tensors that have arrived from the receiver; 0 within a party.
    hyper: hyper-parameters of the optimizer that apply from this round on.
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
    size: _Count = 0
    is_sum: bool = False
    shard: _Shard = EVERY
    arrived: _Count = 0
    missed_to: _Count = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)
_body_decoder = msgspec.msgpack.Decoder(dict[str, Any])


def encode_header(header: Header) -> bytes:
    """The header as msgpack, about 70 bytes."""
    return _encoder.encode(header)


def decode_header(data: memoryview | bytes, job: int) -> Header:
    """Decode and check a header. Raises BadMessage."""
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
    most = MAX_WEIGHT if header.kind in (Kind.EXCHANGE, Kind.PART) else sys.float_info.max
    if not 0 <= header.weight <= most:
        raise BadMessage(f"weight {header.weight:g}, of at most {most:g}")
    if not all(map(math.isfinite, header.hyper.values())):
        raise BadMessage(f"hyper-parameters that are not finite: {header.hyper}")
    return header


_KINDS = {Form.ENCODED: (Kind.EXCHANGE, Kind.RESULT), Form.CHANGE: (Kind.RESULT,)}
"""The kinds of messages of these forms. Messages of other forms may be of any kind."""
_NO_ROWS = (Kind.PUSH, Kind.CONTROL, Kind.PART)


def _check_rows(header: Header) -> None:
    if header.row < 1 or header.length % header.row or header.rows * header.row > header.length:
        raise BadMessage(f"{header.rows} rows of {header.row} in a slice of {header.length} elements")
    of_rows = header.form == Form.ROWS
    if (header.rows and not of_rows) or (of_rows and header.kind in _NO_ROWS):
        raise BadMessage(f"{header.rows} rows in a {header.kind.name} of form {header.form.name}")
    if header.kind not in _KINDS.get(header.form, (header.kind,)):
        raise BadMessage(f"a {header.kind.name} of form {header.form.name}")


def encode_body(body: dict[str, Any]) -> bytes:
    """The body of a CONTROL message."""
    return _encoder.encode(body)


def largest_message(slice_bytes: int) -> int:
    """Upper bound in bytes for one message part, in a job whose slices have at most `slice_bytes` in float32."""
    return max(MAX_CONTROL, slice_bytes // 4 * (8 + ROW_NUMBER_SIZE)) + 65_536


def decode_body(data: memoryview | bytes, limit: int = MAX_CONTROL) -> dict[str, Any]:
    """Decode the body of a CONTROL message, of at most `limit` bytes. Raises BadMessage."""
    if len(data) > limit:
        raise BadMessage(f"a control message of {len(data)} bytes")
    if len(data) == 0:
        return {}
    try:
        return _body_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"malformed body: {error}") from None


def number_base(incarnation: int) -> int:
    """The number before the first number of a process in this life. No two lives have a number in common."""
    return incarnation << 36


def job_number(job: str) -> int:
    """The job's name as the number carried in its messages."""
    return zlib.crc32(job.encode())
