"""Differential gradient transmission (DGT): local servers send the blocks of a sum that contribute most first.

Wang et al., FGCS 121 (2021). `--dgt 2` changes only the order: nothing is lost, and sums have the same bits as with
direct delivery. `--dgt 1` sends the other blocks as datagrams; late blocks join the next round of their slice. `--dgt
3` is like 2, with 4 bits an element for the other blocks. Initial values, results, rows and encoded contributions are
delivered directly. So of tensors with a sparse codec, only the small ones are divided. See
docs/explanation/delivery.md.
"""

from typing import TYPE_CHECKING

from geomx_cli.core.options import Option

if TYPE_CHECKING:
    from collections.abc import Mapping

    from geomx_cli.core.options import Value
    from geomx_cli.core.plugins import Spec
    from geomx_cli.ps.delivery._dgt_delivery import DgtServer, DgtWorker

name = "dgt"
chosen_by = "dgt"
modules = ("cryptography",)
only_with = {"dgt_channels": 1, "dgt_wait": 1, "dgt_loss": 1}
options = (
    Option(
        "dgt", "int", 0, "ENABLE_DGT",
        "Differential gradient transmission: local servers first send the most important blocks of a gradient. 2:"
        " the other blocks follow, and nothing is lost. 1: the other blocks are datagrams (UDP), which may be late or"
        " lost. 3: the other blocks follow, with 4 bits an element.", "transport", minimum=0, maximum=3, word="off",
    ),
    Option(
        "dgt_k", "float", 0.5, "DMLC_K", "Fraction of the blocks that go first (dgt).", "transport",
        minimum=0, maximum=1,
    ),
    Option(
        "dgt_adaptive", "bool", False, "ADAPTIVE_K_FLAG",
        "Reduce --dgt-k as training converges, in proportion to the training loss that workers report (dgt).",
        "transport",
    ),
    Option(
        "dgt_k_min", "float", 0.2, "DMLC_K_MIN", "Smallest value to which --dgt-adaptive reduces --dgt-k (dgt).",
        "transport", minimum=0, maximum=1,
    ),
    Option(
        "dgt_block", "size", 4096, "DGT_BLOCK_SIZE", "Bytes of a block, a multiple of 64 (dgt).", "transport",
        minimum=256, maximum=2**20,
    ),
    Option(
        "dgt_channels", "int", 3, "DMLC_UDP_CHANNEL_NUM",
        "Channels for datagrams. Less important blocks use channels with a lower DSCP (dgt 1).", "transport",
        minimum=1, maximum=7,
    ),
    Option(
        "dgt_wait", "duration", 1.0, "GEOMX_DGT_WAIT",
        "Longest wait for the datagrams of a contribution, after its first blocks have arrived (dgt 1).", "transport",
        minimum=0, maximum=3600,
    ),
    Option(
        "dgt_loss", "float", 0.0, "GEOMX_DGT_LOSS",
        "Emulate a path that loses packets: the fraction of the datagrams that geomx drops (dgt 1).", "transport",
        minimum=0, maximum=1,
    ),
    Option(
        "dgt_alpha", "float", 0.3, "DGT_CONTRIBUTION_ALPHA",
        "The importance of a block is a moving average of its mean magnitude. --dgt-alpha is the weight of earlier"
        " rounds in this average (dgt).", "transport", minimum=0, below=1,
    ),
)  # fmt: skip


def sends_datagrams(options: "Mapping[str, Value]") -> bool:
    """Whether local servers send datagrams to global servers."""
    return options["dgt"] == 1


def _encodes_everything(options: "Mapping[str, Value]") -> bool:
    """Whether the codec encodes every tensor, even the smallest."""
    from geomx_cli.contract.codecs import complete_spec
    from geomx_cli.ps.aggregation.codec import codec_at, parse_codec

    codec = parse_codec(complete_spec(str(options["compress"]), int(options["compress_min"])))
    return codec_at(codec, 1, 1) is not None


def refuses(spec: "Spec") -> str | None:
    """Needs local servers, and tensors whose sums are sent as plain elements."""
    if not spec.options["dgt"]:
        return "write --dgt 1, 2 or 3, which says what becomes of blocks that contribute less"
    if spec.options["topology"] == "flat":
        return "a flat cluster has no local servers, whose sums would be sent in blocks"
    if _encodes_everything(spec.options):
        return f"--compress {spec.options['compress']} encodes all tensors, and what is encoded has no blocks"
    if int(spec.options["dgt_block"]) % 64:
        return "--dgt-block must be a multiple of 64 bytes"
    return None


def worker() -> "DgtWorker":
    """The delivery of a worker."""
    # Imported late: every command scans the deliveries.
    from geomx_cli.ps.delivery._dgt_delivery import DgtWorker

    return DgtWorker()


def server() -> "DgtServer":
    """The delivery of a server."""
    from geomx_cli.ps.delivery._dgt_delivery import DgtServer

    return DgtServer()
