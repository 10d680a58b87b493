"""Encoding of exchanges with the global servers, and the per-slice state that each end keeps for it."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.net.payload import DTYPES, Array, Content, cast, content, form_of, sum_payload
from geomx_cli.ps.net.rows import Rows
from geomx_cli.ps.net.wire import MAX_CODEC, BadMessage, Form, Header

__all__ = ["Codec", "Compression", "Encoded", "parse_codec", "received"]

Where = tuple[int, int]
"""Key and index of a slice."""
Encoded = tuple[memoryview, Form]
"""A payload, and whether it is the elements (ENCODED) or their changes (CHANGE)."""
_FP32 = np.dtype(np.float32)
LARGEST = 2.0**120
"""Codecs with a residual or changes encode only elements below this: the sum of 64 such elements is below 2^126, so it
is finite in float32, and so is whatever decoding makes of their rounded values.
"""


class Codec(Protocol):
    """Encodes the elements of a slice in fewer bytes. Stateless; used in the thread of one loop only.

    decay: factor for the residual (the part of a contribution lost in encoding) that is added to the next contribution;
    0 keeps no residual. momentum: coefficient of momentum correction with factor masking, see codecs/bsc.py; 0 for
    none. results: whether results of rounds are sent as encoded values, as encoded changes of the values, or exact.
    A codec may also have prepare(): called in each process that encodes, before the first round.
    """

    decay: float
    momentum: float
    results: Literal["values", "changes", "exact"]

    def encode(self, array: Array) -> memoryview:
        """Encode a 1-D array of float32 or float64, which is not modified, to a memoryview of bytes. If `decay` is not
        0, the magnitude of each element is below LARGEST.
        """

    def decode(self, payload: memoryview, length: int) -> Array:
        """Decode to a new 1-D array of `length` float32 elements. Raises BadMessage for a payload that `encode` cannot
        produce.
        """


@lru_cache(64)
def parse_codec(spec: str) -> Codec | None:
    """The codec for `--compress SPEC`, NAME or NAME:ARGUMENT; None for "" and "none".

    Raises InvalidSettings for an unknown codec or a bad argument.
    """
    if spec in ("", "none"):
        return None
    name, _, argument = spec.partition(":")
    if len(spec) > MAX_CODEC:
        raise InvalidSettings(f"a codec of {len(spec)} characters", "write NAME or NAME:ARGUMENT")
    plugin = plugins.find("codec", name)
    try:
        made: Codec = plugin.codec(argument)  # type: ignore[attr-defined]
    except InvalidSettings:
        raise
    except Exception as error:  # of an installed codec
        hint = "see what this codec takes as ARGUMENT"
        raise InvalidSettings(f"the codec {name} does not take {argument!r}: {error!r}", hint) from error
    return made


def received(header: Header, payload: memoryview | None) -> Content:
    """Decode the content of a payload; for `form` CHANGE that is the change. Raises BadMessage."""
    if header.form not in (Form.ENCODED, Form.CHANGE):
        return content(header, payload)
    try:
        codec = parse_codec(header.codec)
    except InvalidSettings as error:
        raise BadMessage(error.message) from None
    if codec is None or payload is None:
        raise BadMessage("an encoded payload without a codec" if payload else "no payload where an encoded one belongs")
    try:
        array = codec.decode(payload, header.length)
    except BadMessage:
        raise
    except Exception as error:  # of an installed codec: a bad payload must not end this process
        raise BadMessage(f"a payload that {header.codec} cannot decode: {error!r}") from error
    if array.shape != (header.length,):
        raise BadMessage(f"{array.shape} elements from {header.codec} where {header.length} belong")
    return array.astype(_exact(header.dtype), copy=False)


class Compression:
    """One process's end of encoded exchanges: a global server's, a local server's, or in a flat cluster a worker's.

    A contribution is encoded once; a retransmission sends the same bytes. A global server encodes a round's result once
    for all receivers. Workers beside it, which receive plain elements, get the decoded ones, so all workers have the
    same weights. The server's own value stays exact, so errors do not accumulate. Initial values and rows are not
    encoded.

    A change is relative to the last result that all receivers have (the *reference*, kept at both ends), so what the
    codec loses in one change is part of the next. Sums have no reference: their loss is kept as a residual and added to
    the next sum. Arrays whose elements are not finite or LARGEST and more are sent unencoded.

    bytes: the total encoded so far, (before, after) encoding.
    """

    def __init__(self, spec: str = "") -> None:
        self._codec: Codec | None = None
        self.spec = ""
        self.bytes = (0, 0)
        self._kept: dict[Where, dict[str, Array]] = {}
        self.set(spec)

    def set(self, spec: str) -> None:
        """Use this codec from now on. Raises InvalidSettings if another one is in use."""
        codec = parse_codec(spec)
        if self.spec and (not codec or spec != self.spec):
            what = f"gradient compression {spec or 'none'} where {self.spec} is in use"
            raise InvalidSettings(what, "let all workers, and --compress, ask for the same")
        self._codec, self.spec = codec, spec if codec else ""
        if prepare := getattr(codec, "prepare", None):
            prepare()

    @property
    def changes(self) -> bool:
        """Whether results are sent as changes of previous ones, and so must be applied in order."""
        return self._codec is not None and self._codec.results == "changes"

    # Contributions, sending end.

    def sum(self, where: Where, found: Content, dtype: int) -> tuple[memoryview, dict[str, Any]]:
        """The payload of a party's sum and the header fields that describe it."""
        if not isinstance(found, Rows) and (encoded := self.contribution(where, found, dtype)):
            return encoded, {"form": Form.ENCODED}
        payload, wide = sum_payload(found, dtype)
        return payload, {"wide": wide, **form_of(found)}

    def contribution(self, where: Where, array: Array, dtype: int) -> memoryview | None:
        """The encoded payload; None if the array is sent unencoded."""
        codec = self._codec
        if codec is None:
            return None
        given = array.astype(_exact(dtype), copy=False)
        if not codec.decay:
            return self._encode(codec, given, dtype)
        if not _can_encode(given):
            return None
        # Error feedback: whatever the codec drops is kept in `residual` and sent with later contributions.
        kept = self._kept.setdefault(where, {})
        residual = kept.setdefault("residual", np.zeros_like(given))
        if codec.momentum:
            momentum = kept.setdefault("momentum", np.zeros_like(given))
            momentum *= given.dtype.type(codec.momentum)
            momentum += given
            given = momentum
        if codec.decay != 1:
            residual *= given.dtype.type(codec.decay)
        residual += given
        if not _can_encode(residual):  # training diverges: send this array exact, and start again without a residual
            del kept["residual"]
            kept.pop("momentum", None)
            return None
        payload = self._encode(codec, residual, dtype)
        sent = codec.decode(payload, len(array))
        residual -= sent
        if codec.momentum:
            momentum[sent != 0] = 0
        return payload

    # Results, at a global server.

    def starts_from(self, where: Where, member: int, value: Array, dtype: int) -> None:
        """Set the reference of a cohort's first round: every participant may have this value."""
        if self.changes:
            self._kept.setdefault(where, {}).setdefault(f"reference/{member}", value.astype(_exact(dtype), copy=False))

    def result(
        self, where: Where, member: int, array: Array, dtype: int, *, is_sum: bool
    ) -> tuple[Array, Encoded | None]:
        """The result of a cohort's round as every receiver sees it, in the slice's dtype, and its encoding if there is
        one.
        """
        codec = self._codec
        if codec is None or codec.results == "exact":
            return array, None
        if codec.results == "values":
            return self.newest(array, dtype)
        exact = array.astype(_exact(dtype), copy=False)
        kept, name = self._kept.setdefault(where, {}), f"reference/{member}"
        if is_sum:
            if not _can_encode(exact):
                return array, None
            residual = kept.setdefault("residual", np.zeros_like(exact))
            residual += exact
            if not _can_encode(residual):
                del kept["residual"]
                return array, None
            payload = self._encode(codec, residual, dtype)
            sent = codec.decode(payload, len(array))
            residual -= sent
            return cast(sent, dtype), (payload, Form.ENCODED)
        reference = kept.get(name)
        with np.errstate(invalid="ignore", over="ignore"):
            change = None if reference is None else exact - reference
        if reference is None or change is None or not _can_encode(change):
            kept[name] = exact
            return array, None
        payload = self._encode(codec, change, dtype)
        # The server decodes its own encoding and keeps that as the reference, exactly as the receivers do.
        new = cast(reference + codec.decode(payload, len(array)), dtype)
        kept[name] = new.astype(_exact(dtype), copy=False)
        return new, (payload, Form.CHANGE)

    def forget(self, where: Where, member: int) -> None:
        """Drop a cohort's reference after a round that changed only rows, since not every member has the value. The
        next result is sent exact.
        """
        self._kept.get(where, {}).pop(f"reference/{member}", None)

    def newest(self, array: Array, dtype: int) -> tuple[Array, Encoded | None]:
        """Encode a value pulled between rounds. The puller's reference is unknown, so only codecs of values encode it.
        """
        codec = self._codec
        if codec is None or codec.results != "values":
            return array, None
        payload = self._encode(codec, array.astype(_exact(dtype), copy=False), dtype)
        return cast(codec.decode(payload, len(array)), dtype), (payload, Form.ENCODED)

    # Results, receiving end.

    def has_reference(self, where: Where) -> bool:
        """Whether the previous result, the reference of the next change, is present."""
        return "reference" in self._kept.get(where, {})

    def take(self, where: Where, found: Content, dtype: int, form: Form) -> Content:
        """Apply a received result or initial value and return the new value. Must be called in the order of rounds."""
        kept = self._kept.setdefault(where, {})
        if isinstance(found, Rows):
            # Others may have received all elements of this round, and the next change is to those.
            kept.pop("reference", None)
        if not self.changes or isinstance(found, Rows):
            return found
        new = cast(kept["reference"] + found if form == Form.CHANGE else found, dtype)
        kept["reference"] = new.astype(_exact(dtype), copy=False)
        return new

    # State.

    def export_state(self) -> dict[str, Array]:
        """Copies of all residuals and references, by "codec/KEY/SLICE/NAME"."""
        kept = self._kept.items()
        return {f"codec/{key}/{index}/{name}": item.copy() for (key, index), own in kept for name, item in own.items()}

    def import_state(self, state: Mapping[str, Array]) -> None:
        """Restore what `export_state` of another process returned."""
        for name, array in state.items():
            kind, _, rest = name.partition("/")
            if kind == "codec":
                key, index, what = rest.split("/", 2)
                self._kept.setdefault((int(key), int(index)), {})[what] = array.copy()

    def _encode(self, codec: Codec, array: Array, dtype: int) -> memoryview:
        payload = codec.encode(array)
        given, encoded = self.bytes
        self.bytes = (given + len(array) * DTYPES[dtype].itemsize, encoded + len(payload))
        return payload


def _can_encode(array: Array) -> bool:
    """Whether all elements are below LARGEST in magnitude, and none is NaN."""
    return not len(array) or bool(array.min() > -LARGEST and array.max() < LARGEST)


def _exact(dtype: int) -> "np.dtype[Any]":
    """The dtype in which sums and changes of such slices are computed."""
    return np.promote_types(DTYPES[dtype], _FP32)
