"""mpq:RATIO[,VALUES][,pull=topk|union][,warmup=N][,min=N]: GeoMX's mixed-precision quantization: bsc for large tensors,
fp16 for those of fewer than `min` elements, by default --compress-min.
"""

from typing import TYPE_CHECKING, cast

from geomx_cli.ps.codecs.bsc import Bsc
from geomx_cli.ps.codecs.fp16 import Fp16

if TYPE_CHECKING:
    from geomx_cli.ps.aggregation.codec import Codec

__all__ = ["codec"]

name = "mpq"


def codec(argument: str) -> "Mpq":
    """RATIO, VALUES and parameters of bsc; a plus may replace a comma."""
    return Mpq(argument, "mpq")


class Mpq(Bsc):
    """The payload is that of bsc or of fp16."""

    small = cast("Codec", Fp16())
