"""Warns of a script whose optimizer has momentum that its codec does not bear, or has itself."""

import sys
from typing import TYPE_CHECKING

from geomx_cli.core import plugins
from geomx_cli.core.events import WarningRaised
from geomx_cli.core.options import codec_name
from geomx_cli.ps.aggregation.codec import parse_codec

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["MomentumCheck"]


class MomentumCheck:
    """One worker's codec and optimizer, in the order in which its script sets them. For the training thread.

    Writes one warning to stderr and the event log, in one process of the job: in the master if the servers run the
    optimizer, else in global rank 0.
    """

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._specs = {name: client.settings.text(name) for name in ("compress", "compress_lan")}
        self._momentum = 0.0
        about = plugins.algorithms()[client.settings.text("algo")]
        self._warned = about.exchanges != "gradients"  # to which a codec's momentum belongs

    def use_codec(self, spec: str) -> None:
        """The script has chosen this codec for what parties exchange."""
        self._specs["compress"] = spec
        self._check()

    def use_optimizer(self, momentum: float, *, on_servers: bool) -> None:
        """The script has an optimizer with this momentum, 0 for none."""
        reports = self._client.is_master if on_servers else self._client.global_rank == 0
        self._momentum = momentum if reports else 0.0
        self._check()

    def _check(self) -> None:
        if self._warned or not 0 < self._momentum < 1:
            return
        for spec in self._specs.values():
            codec, name = parse_codec(spec), codec_name(spec)
            if codec is not None and codec.momentum:
                times = 1 / (1 - codec.momentum) / (1 - self._momentum)
                self._warn(
                    f"{name} has momentum correction, which takes the place of the optimizer's"
                    f" momentum: with momentum {self._momentum:g} in the optimizer too, each gradient counts for"
                    f" {times:.4g}; set momentum to 0, or use topk"
                )
            elif codec is not None and not codec.bears_momentum:
                self._warn(
                    f"with {name} training diverges if the optimizer has momentum, here {self._momentum:g}: set it to"
                    " 0, or use another codec"
                )

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            self._client.events.write(WarningRaised(message=message, affects_result=True))
            print(f"warning: {message}", file=sys.stderr, flush=True)
