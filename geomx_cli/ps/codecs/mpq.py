"""mpq:RATIO[,VALUES][,pull=topk|union][,warmup=N][,min=N]: GeoMX's mixed-precision quantization: bsc for large tensors,
fp16 for tensors of fewer than `min` elements.
"""

from geomx_cli.ps.codecs.bsc import Bsc
from geomx_cli.ps.codecs.fp16 import Fp16

__all__ = ["codec"]

name = "mpq"


def codec(argument: str) -> "Mpq":
    """See topk.codec."""
    return Mpq(argument, "mpq")


class Mpq(Bsc):
    """The payload has the format of bsc or of fp16."""

    def __init__(self, argument: str, what: str) -> None:
        super().__init__(argument, what)
        self.small = Fp16()
