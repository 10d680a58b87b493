"""bsc:RATIO[,VALUES][,pull=topk|union][,warmup=N][,min=N]: GeoMX's bidirectional sparsification: the largest elements,
with momentum correction.

For its sums g a party keeps u = 0.9 u + g and v = v + u. The ceil(RATIO n) elements of v of largest magnitude are sent,
as with topk. There u is set to 0 (momentum factor masking; Lin et al., arXiv:1712.01887). The part of them that VALUES
loses stays in v. Results and parameters are as with topk. Tensors of fewer than `min` elements are sent without
momentum.
"""

from geomx_cli.ps.codecs.topk import TopK

__all__ = ["Bsc", "codec"]

name = "bsc"


def codec(argument: str) -> "Bsc":
    """See topk.codec."""
    return Bsc(argument, "bsc")


class Bsc(TopK):
    """The payload has the format of topk."""

    momentum = 0.9
    for_local_optimizers = False
