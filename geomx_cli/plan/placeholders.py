"""Placeholders in a script's arguments that are filled in per worker: `--shard {rank}`. Pure functions."""

import re
from collections.abc import Iterable, Mapping

from geomx_cli.inventory import RankScope
from geomx_cli.plan.topology import TopologyNode

__all__ = ["PLACEHOLDERS", "fill", "values_for"]

PLACEHOLDERS = ("rank", "num_workers", "global_rank", "num_all_workers", "party", "local_rank")
"""Names allowed in braces; each but local_rank, which is the variable LOCAL_RANK, is also an attribute of the store."""
_PATTERN = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")


def values_for(
    node: TopologyNode, workers: int, all_workers: int, rank_scope: RankScope, local_rank: str
) -> dict[str, str]:
    """Return the placeholders' values for one worker; `workers`: those of its plane or process group."""
    global_rank = -1 if node.global_rank is None else node.global_rank
    ranks_are_global = rank_scope == "global"
    values = {
        "rank": global_rank if ranks_are_global else node.rank,
        "num_workers": all_workers if ranks_are_global else workers,
        "global_rank": global_rank,
        "num_all_workers": all_workers,
        "party": node.party,
        "local_rank": local_rank,
    }
    return {name: str(value) for name, value in values.items()}


def fill(words: Iterable[str], values: Mapping[str, str]) -> list[str]:
    """Substitute the placeholders in `words`; other braces are left unchanged."""
    return [_PATTERN.sub(lambda found: values[found[1]], word) for word in words]
