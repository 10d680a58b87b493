"""A server's two ends of encoded exchanges: with servers and with workers."""

from collections.abc import Sequence
from typing import Literal

from geomx_cli.ps.aggregation.codec import complete_lan_spec, complete_spec, has_momentum
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.cluster.config import NodeSettings

__all__ = ["ServerCompression"]


class ServerCompression:
    """wan: between local and global servers (`--compress`); in a flat cluster with the workers. lan: with workers
    (`--compress-lan`). below: those with this server's members, see ResultSender.

    gradients: see Compression. Momentum is corrected once, where gradients are encoded first.
    """

    def __init__(self, settings: NodeSettings, *, is_root: bool, gradients: bool) -> None:
        smallest = int(settings.number("compress_min"))
        lan = complete_lan_spec(settings.text("compress_lan"), smallest)
        wan = complete_spec(settings.text("compress"), smallest)
        self.wan = Compression(wan, gradients=gradients and not has_momentum(lan))
        self.lan = Compression(lan)
        self.below: Sequence[Compression] = (self.lan,)
        if is_root:
            self.below = (self.wan, self.lan) if settings.central_workers else (self.wan,)

    @property
    def bytes(self) -> dict[Literal["lan", "wan"], tuple[int, int]]:
        """See Compression, by plane."""
        return {"wan": self.wan.bytes, "lan": self.lan.bytes}
