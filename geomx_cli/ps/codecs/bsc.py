"""bsc:RATIO[,VALUES]: GeoMX's bidirectional sparsification, the largest elements with momentum correction.

A party keeps u = 0.9 u + g and v = v + u of its sums g; the ceil(RATIO n) elements of v of the largest magnitude
travel, as with topk, and where they do u becomes 0 (momentum factor masking; Lin et al., arXiv:1712.01887). What
VALUES loses of them stays in v. Downwards the largest changes of the global value travel, and the others with a later
round.
"""

from geomx_cli.ps.codecs.topk import TopK

__all__ = ["codec"]

name = "bsc"


def codec(argument: str) -> "Bsc":
    """RATIO[,VALUES]; a plus may stand in place of the comma."""
    return Bsc(argument, "bsc")


class Bsc(TopK):
    """The payload is that of topk."""

    momentum = 0.9
