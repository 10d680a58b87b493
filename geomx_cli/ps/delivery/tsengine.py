"""TSEngine: contributions are sent through the process that brings them to the servers above soonest.

Zhou et al., IEEE TNSM 18(4), 2021. Between parties ("inter"), the local server of a party behind a slow link sends its
sum to another party's local server. That server adds the sum to its own, sends one contribution to the global server,
and passes the result back. Inside a party ("intra"), workers relay for each other in the same way to their local
server. See docs/explanation/delivery.md.
"""

from typing import TYPE_CHECKING

from geomx_cli.core.options import Option

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from geomx_cli.core.options import Value
    from geomx_cli.core.plugins import Spec
    from geomx_cli.ps.delivery._tsengine_delivery import TsEngine

name = "tsengine"
chosen_by = "tsengine"
sends_by = ("dgt",)
needs_peers = False
options = (
    Option(
        "tsengine", "text", "", "GEOMX_TSENGINE",
        "Let processes behind a slow path send through another process, the relay. The relay adds their contributions"
        " to its own, and passes the result back. inter: local servers of different parties relay for each other."
        " intra: workers of a party relay for each other. both: inter and intra.", "transport",
        choices=("", "inter", "intra", "both"), word="none",
    ),
    Option(
        "ts_greed", "float", 0.9, "MAX_GREED_RATE_TS",
        "Highest probability with which a process takes the fastest known path, while other paths have no recent"
        " measurement (tsengine).",
        "transport", minimum=0, maximum=1,
    ),
)  # fmt: skip


def refuses(spec: "Spec") -> str | None:
    """Needs two levels."""
    where = spec.options["tsengine"]
    if not where:
        return "write --tsengine inter, intra or both, which says where"
    if spec.options["topology"] == "flat":
        return "a flat cluster has no local servers"
    if where == "inter" and spec.options["parties"] == 1 and not spec.options["central_workers"]:
        return "there is one party only, and no other that could relay for it"
    if where != "inter" and spec.options["reduce"] == "torch":
        return "with --reduce torch the workers of a party do not send to their local server; write inter"
    return None


def peers(workers: int, options: "Mapping[str, Value]") -> "Collection[tuple[int, int]]":
    """With "intra", each worker dials the workers of lower ranks."""
    return _all_pairs(workers) if options["tsengine"] in ("intra", "both") else ()


def party_peers(parties: int, options: "Mapping[str, Value]") -> "Collection[tuple[int, int]]":
    """With "inter", each local server dials the local servers of the parties before its own."""
    return _all_pairs(parties) if options["tsengine"] in ("inter", "both") else ()


def _all_pairs(count: int) -> "Collection[tuple[int, int]]":
    return [(dialler, listener) for dialler in range(count) for listener in range(dialler)]


def worker() -> "TsEngine":
    """The delivery of a worker."""
    # Imported late: every command scans the deliveries.
    from geomx_cli.ps.delivery._tsengine_delivery import TsEngine

    return TsEngine("intra")


def server() -> "TsEngine":
    """The delivery of a server."""
    from geomx_cli.ps.delivery._tsengine_delivery import TsEngine

    return TsEngine("inter")
