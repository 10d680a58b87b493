"""bsc:RATIO[,VALUES]: GeoMX's bidirectional sparsification: the largest elements, with momentum correction.

For its sums g a party keeps u = 0.9 u + g and v = v + u. The ceil(RATIO n) elements of v of largest magnitude are sent,
as with topk, and u is set to 0 there (momentum factor masking; Lin et al., arXiv:1712.01887). What VALUES loses of them
stays in v. Downwards the largest changes of the global value are sent; the others follow in later rounds.
"""

from geomx_cli.ps.codecs.topk import TopK

__all__ = ["codec"]

name = "bsc"


def codec(argument: str) -> "Bsc":
    """RATIO[,VALUES]; a plus may replace the comma."""
    return Bsc(argument, "bsc")


class Bsc(TopK):
    """The payload is that of topk."""

    momentum = 0.9
