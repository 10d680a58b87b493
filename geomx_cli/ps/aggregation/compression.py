"""Encoding of exchanges in one plane, and the state that each end keeps for it in each slice."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from geomx_cli.contract.codecs import complete_lan_spec, complete_spec, has_momentum
from geomx_cli.contract.config import NodeSettings
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.aggregation.codec import (
    LARGEST,
    Codec,
    Encoded,
    SliceRound,
    codec_at,
    encoded,
    exact_dtype,
    parse_codec,
)
from geomx_cli.ps.arrays import Array, Arrays, SliceArrays
from geomx_cli.ps.kernels.vectorised import accumulate
from geomx_cli.ps.net.payload import DTYPES, Content, Rows, cast, form_of, sum_payload
from geomx_cli.ps.net.wire import Form, Header

__all__ = ["Compression", "Decoded", "Plane", "ServerCompression", "can_encode", "encode_with_residual"]

Plane = Literal["lan", "wan"]


def encode_with_residual(
    codec: Codec, array: Array, kept: Arrays, *, decay: float = 1.0, momentum: float = 0.0
) -> memoryview | None:
    """Encode the array (a party's contribution or a sum) together with `decay` times the residual.

    Returns None if the array has to be sent unencoded. Either the array cannot be encoded, and then the residual does
    not change. Or the residual has grown too large because training diverges, and then it is dropped.

    kept: has the "residual": what encoding has lost of one slice's arrays so far. With momentum correction
        (codecs/bsc.py) it has the slice's "momentum" too.
    """
    for name in ("residual", "momentum") if momentum else ("residual",):
        if name not in kept:
            kept[name] = np.zeros_like(array)
    residual, velocity = kept["residual"], kept["momentum"] if momentum else np.empty(0, array.dtype)
    add = codec.accumulate if array.dtype == np.float32 else accumulate
    with np.errstate(over="ignore", invalid="ignore"):
        fits = add(array, momentum, velocity, decay, residual, LARGEST)
    if fits:
        return codec.extract(residual, velocity if momentum else None)
    if can_encode(array):
        # The array alone would fit, so the residual has overflowed. It would spoil every later round.
        del kept["residual"]
        kept.pop("momentum", None)
    return None


def can_encode(array: Array) -> bool:
    """Whether all elements are below LARGEST in magnitude, and none is NaN."""
    return not len(array) or bool(array.min() > -LARGEST and array.max() < LARGEST)


Decoded = tuple[Array | Callable[[], Array], Encoded | None]
"""What the receivers of an encoded array decode, or a function that decodes it, and the encoding. None if the array
is sent unencoded.
"""


class Compression:
    """One process's end of the encoded exchanges in one plane. With `--compress` this plane is between local and global
    servers (in a flat cluster between workers and servers). With `--compress-lan` it is between workers and their
    servers. A local server has two ends: one for each of these planes.

    A contribution is encoded once, and a retransmission sends the same bytes. A server encodes a round's result once
    for all receivers in the plane. Receivers of plain elements get the decoded elements, so all receivers have the same
    values. The server's own value stays exact, so errors do not accumulate. Initial values and rows are not encoded.

    A change is relative to the last result that all receivers have (the *reference*, kept at both ends). So the part
    that the codec loses in one change is in the next change. Sums have no reference: the lost part is kept as a
    residual, and added to the next sum. An array is sent unencoded if some elements are not finite, or are LARGEST or
    more.

    Between rounds an end keeps its arrays with the slice, in the part "codec-wan" or "codec-lan". It keeps "residual"
    and "momentum" for the contributions that it encodes, and "reference" for the results that it receives. It keeps
    "reference/COHORT" and "contributed/COHORT" for the results that it sends.

    plane: which links the codec is for.
    gradients: whether contributions are gradients, for which the codec corrects momentum, or differences of weights.
    bytes: the total encoded so far, (before, after) encoding.
    """

    def __init__(self, spec: str = "", plane: Plane = "wan", *, gradients: bool = True) -> None:
        self.gradients = gradients
        self.plane = plane
        self._codec: Codec | None = None
        self.spec = ""
        self.bytes = (0, 0)
        self.set(spec)

    def set(self, spec: str) -> None:
        """Use this codec from now on. Raises InvalidSettings if another codec is in use."""
        codec = parse_codec(spec)
        if self.spec and (not codec or spec != self.spec):
            what = f"gradient compression {spec or 'none'} where {self.spec} is in use"
            raise InvalidSettings(what, "let all workers, and --compress, ask for the same")
        self._codec, self.spec = codec, spec if codec else ""
        if codec is not None:
            codec.prepare()

    @property
    def ratio(self) -> float:
        """See Codec."""
        return self._codec.ratio if self._codec is not None else 1.0

    @property
    def changes(self) -> bool:
        """Whether results are sent as changes of previous ones."""
        return self._sends_changes(self._codec)

    # Contributions, sending end.

    def sum(self, where: SliceRound, found: Content) -> tuple[memoryview, dict[str, Any]]:
        """The payload of a party's sum and the header fields that describe it."""
        if not isinstance(found, Rows) and (sent := self.contribution(where, found)):
            return sent
        payload, wide = sum_payload(found, where.dtype)
        return payload, {"wide": wide, **form_of(found)}

    def contribution(self, where: SliceRound, array: Array) -> Encoded | None:
        """The encoded payload; None if the array is sent unencoded."""
        codec = self._codec_at(where)
        if codec is None:
            return None
        given = array.astype(exact_dtype(where.dtype), copy=False)
        if not codec.decay:
            return encoded(self._count(codec.encode(given), array, where), Form.ENCODED)
        momentum = codec.momentum if self.gradients else 0.0
        payload = encode_with_residual(codec, given, self._kept(where.kept), decay=codec.decay, momentum=momentum)
        return None if payload is None else encoded(self._count(payload, array, where), Form.ENCODED)

    # Results, at a server.

    def starts_from(self, where: SliceRound, member: int, value: Array) -> None:
        """Set the reference of a cohort's first round: every participant may have this value. If a participant's
        `follows` shows that it lacks the value, it gets the first result exactly.
        """
        if self._sends_changes(self._codec_at(where)):
            reference = value.astype(exact_dtype(where.dtype), copy=False)
            self._kept(where.kept).setdefault(f"reference/{member}", reference)

    def contributed(self, where: SliceRound, total: Content) -> None:
        """Note the elements contributed to a round. Codecs that send the changes of values use them.
        """
        codec, kept = self._codec_at(where), self._kept(where.kept)
        if codec is not None and codec.union:
            for name in [name for name in kept if name.startswith("reference/")]:
                reference = kept[name]
                noted = kept.setdefault(f"contributed/{name.partition('/')[2]}", np.zeros(len(reference), np.float32))
                noted[_dense(total, len(reference)) != 0] = 1

    def result(self, where: SliceRound, member: int, array: Array, *, is_sum: bool) -> Decoded:
        """The result of a cohort's round as every receiver sees it, in the slice's dtype, and its encoding if it has
        one.
        """
        codec = self._codec_at(where)
        if codec is None or codec.results == "exact":
            return array, None
        if codec.results == "values":
            return self.newest(where, array)
        exact = array.astype(exact_dtype(where.dtype), copy=False)
        kept, name = self._kept(where.kept), f"reference/{member}"
        # Two ways to lose nothing in the long run. A value differs little from the last one, so the change is encoded.
        # A sum does not follow from the last sum, so the sum itself is encoded, and the lost part is added to the next
        # sum.
        if is_sum:
            kept.pop(name, None)  # the members' reference is this sum now, not the last value
            payload = encode_with_residual(_only(codec, exact), exact, kept)
            return (array, None) if payload is None else self._values(codec, payload, array, where)
        reference, noted = kept.get(name), kept.pop(f"contributed/{member}", None)
        with np.errstate(invalid="ignore", over="ignore"):
            change = None if reference is None else exact - reference
        if reference is None or change is None or not can_encode(change):
            kept[name] = exact
            return array, None
        payload = self._count(_only(codec, noted).encode(change), array, where)
        # The reference is what the receivers decode, not the exact value. So what this change loses is in the next
        # change: no residual is needed, and both ends have the same reference to the bit.
        new = cast(reference + codec.decode(payload, len(array)), where.dtype)
        kept[name] = new.astype(exact_dtype(where.dtype), copy=False)
        return new, encoded(payload, Form.CHANGE)

    def forget(self, arrays: SliceArrays, member: int) -> None:
        """Drop a cohort's reference after a round that changed only rows, because not every member has the value. The
        next result is sent exact.
        """
        self._kept(arrays).pop(f"reference/{member}", None)

    def newest(self, where: SliceRound, array: Array) -> Decoded:
        """Encode a value pulled between rounds. The puller's reference is unknown, so only codecs of values encode it.
        """
        codec = self._codec_at(where)
        if codec is None or codec.results != "values":
            return array, None
        return self._values(codec, codec.encode(array.astype(exact_dtype(where.dtype), copy=False)), array, where)

    # Results, receiving end.

    def has_reference(self, arrays: SliceArrays) -> bool:
        """Whether the previous result, the reference of the next change, is present."""
        return "reference" in self._kept(arrays)

    def forget_received(self, arrays: SliceArrays) -> None:
        """Drop the reference: other members have results that are not here. The next result arrives exact."""
        self._kept(arrays).pop("reference", None)

    def value_of(self, arrays: SliceArrays, found: Content, dtype: int, form: Form) -> Content:
        """The value that a received result yields. It becomes the reference. Rows are returned as they are."""
        kept = self._kept(arrays)
        if isinstance(found, Rows):
            # Other members may have received all elements of this round, and the next change is relative to those
            # elements.
            kept.pop("reference", None)
        if not self.changes or isinstance(found, Rows):
            return found
        new = cast(kept["reference"] + found if form == Form.CHANGE else found, dtype)
        kept["reference"] = new.astype(exact_dtype(dtype), copy=False)
        return new

    def pulled(self, arrays: SliceArrays, result: Header, found: Content) -> Content:
        """The content of a value pulled before this process's first round. An initial value becomes the reference of
        the first change. But if the first round's result has overtaken it, that result is the reference already.
        """
        if result.value or self.has_reference(arrays):
            return found
        return self.value_of(arrays, found, result.dtype, result.form)

    def _values(self, codec: Codec, payload: memoryview, array: Array, where: SliceRound) -> Decoded:
        self._count(payload, array, where)
        length, dtype = len(array), where.dtype
        return lambda: cast(codec.decode(payload, length), dtype), encoded(payload, Form.ENCODED)

    def _kept(self, arrays: SliceArrays) -> Arrays:
        return arrays.part(f"codec-{self.plane}")

    def _codec_at(self, where: SliceRound) -> Codec | None:
        is_float = DTYPES[where.dtype].kind == "f"
        return codec_at(self._codec, where.size, where.round) if is_float else None

    @staticmethod
    def _sends_changes(codec: Codec | None) -> bool:
        return codec is not None and codec.results == "changes"

    def _count(self, payload: memoryview, array: Array, where: SliceRound) -> memoryview:
        given, sent = self.bytes
        self.bytes = (given + len(array) * DTYPES[where.dtype].itemsize, sent + len(payload))
        return payload


def _only(codec: Codec, contributed: Array | None) -> Codec:
    """The codec for a result. If it sends only the elements that were contributed (not 0), the codec for these
    elements.
    """
    return codec.only(np.flatnonzero(() if contributed is None else contributed)) if codec.union else codec


def _dense(total: Content, length: int) -> Array:
    return total.dense(length) if isinstance(total, Rows) else total


class ServerCompression:
    """One end for each plane.

    wan: the codec between local and global servers (`--compress`); in a flat cluster, between workers and servers.
    lan: the codec between workers and their servers (`--compress-lan`).
    below: the ends of exchanges with this server's members, see ResultSender.
    gradients: see Compression. Momentum is corrected once, where gradients are encoded first.
    """

    def __init__(self, settings: NodeSettings, *, is_root: bool, gradients: bool) -> None:
        smallest = int(settings.number("compress_min"))
        lan = complete_lan_spec(settings.text("compress_lan"), smallest)
        wan = complete_spec(settings.text("compress"), smallest)
        self.wan = Compression(wan, gradients=gradients and not has_momentum(lan))
        self.lan = Compression(lan, "lan")
        self.below: Sequence[Compression] = (self.lan,)
        if is_root:
            self.below = (self.wan, self.lan) if settings.central_workers else (self.wan,)

    @property
    def bytes(self) -> dict[Plane, tuple[int, int]]:
        """See Compression, by plane."""
        return {"wan": self.wan.bytes, "lan": self.lan.bytes}
