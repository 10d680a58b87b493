"""Which codec the exchanges with the global servers use, and what is encoded and decoded with it."""

from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.net.payload import DTYPES, Array, Content, content, form_of, sum_payload
from geomx_cli.ps.net.rows import Rows
from geomx_cli.ps.net.wire import MAX_CODEC, BadMessage, Form, Header

__all__ = ["Codec", "Compression", "parse_codec", "received"]


class Codec(Protocol):
    """How the elements of a slice become fewer bytes. Used by the thread of one loop only."""

    def encode(self, array: Array) -> memoryview:
        """The payload for a 1-D array of float32 or float64, which does not change."""

    def decode(self, payload: memoryview, length: int) -> Array:
        """`length` elements, a new 1-D array of float32. Raises BadMessage for a payload that `encode` cannot make."""


@lru_cache(64)
def parse_codec(spec: str) -> Codec | None:
    """The codec that `--compress SPEC` means, NAME or NAME:ARGUMENT; None for "" and "none".

    Raises InvalidSettings for one that does not exist, and for a wrong argument.
    """
    if spec in ("", "none"):
        return None
    name, _, argument = spec.partition(":")
    if len(spec) > MAX_CODEC:
        raise InvalidSettings(f"a codec of {len(spec)} characters", "write NAME or NAME:ARGUMENT")
    made: Codec = plugins.find("codec", name).codec(argument)  # type: ignore[attr-defined]
    return made


def received(header: Header, payload: memoryview | None) -> Content:
    """What a payload holds, decoded: see payload.content. Raises BadMessage."""
    if header.form != Form.ENCODED:
        return content(header, payload)
    try:
        codec = parse_codec(header.codec)
    except InvalidSettings as error:
        raise BadMessage(error.message) from None
    if codec is None or payload is None:
        raise BadMessage("an encoded payload without a codec" if payload else "no payload where an encoded one belongs")
    decoded = codec.decode(payload, header.length)
    return decoded.astype(np.float64) if DTYPES[header.dtype] == np.float64 else decoded


class Compression:
    """The codec of one process's exchanges with the global servers: a local server's, in a flat cluster a worker's.

    Contributions are encoded once, and what is sent again are the same bytes. A global server encodes the result of a
    round once, for all; those that it sends the elements themselves (workers beside it) get them as the others decode
    them, so that all have the same. Its own value stays exact. Initial values and rows are not encoded.
    """

    def __init__(self, spec: str = "") -> None:
        self._codec = parse_codec(spec)
        self.spec = spec if self._codec else ""
        self.given_bytes = 0
        self.encoded_bytes = 0

    def set(self, spec: str) -> None:
        """Use this codec from now on. Raises InvalidSettings where another one is in use."""
        codec = parse_codec(spec)
        if self.spec and (not codec or spec != self.spec):
            what = f"gradient compression {spec or 'none'} where {self.spec} is in use"
            raise InvalidSettings(what, "let all workers, and --compress, ask for the same")
        self._codec, self.spec = codec, spec if codec else ""

    def sum(self, found: Content, dtype: int) -> tuple[memoryview, dict[str, Any]]:
        """The payload of a party's sum, and the fields of its header about it."""
        if not isinstance(found, Rows) and (encoded := self.contribution(found, dtype)):
            return encoded, {"codec": self.spec, "form": Form.ENCODED}
        payload, wide = sum_payload(found, dtype)
        return payload, {"wide": wide, **form_of(found)}

    def contribution(self, array: Array, dtype: int) -> memoryview | None:
        """The encoded payload; None where there is no codec."""
        return None if self._codec is None else self._encode(self._codec, array, dtype)

    def result(self, array: Array, dtype: int) -> tuple[Array, memoryview | None]:
        """A round's result as all get it, in the slice's dtype, and encoded if there is a codec."""
        if self._codec is None:
            return array, None
        payload = self._encode(self._codec, array, dtype)
        with np.errstate(over="ignore"):
            return self._codec.decode(payload, len(array)).astype(DTYPES[dtype], copy=False), payload

    def _encode(self, codec: Codec, array: Array, dtype: int) -> memoryview:
        payload = codec.encode(array.astype(np.float32) if array.dtype == np.float16 else array)
        self.given_bytes += len(array) * DTYPES[dtype].itemsize
        self.encoded_bytes += len(payload)
        return payload
