"""Chooses what a job does if it hears nothing from a party (`--party-loss`). Pure functions."""

from collections.abc import Mapping

from geomx_cli.core import plugins
from geomx_cli.core.deliveries import chain
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Value
from geomx_cli.inventory import Inventory

__all__ = ["policy"]

FEWEST = 3
"""Parties that train in a job that leaves one out by default."""


def policy(inventory: Inventory, options: Mapping[str, Value], script: tuple[str, ...]) -> str:
    """Return "out" instead of "auto" if the job can continue without a party; otherwise the option, unchanged.

    Raises InvalidSettings if the user has chosen "out" where it is impossible.
    """
    wanted, reason = str(options["party_loss"]), _reason(inventory, options, script)
    hint = "omit --party-loss: then the job waits"
    if wanted == "out" and reason:
        raise InvalidSettings(f"--party-loss out: {reason}", hint)
    if wanted == "end" and inventory.topology == "flat":
        raise InvalidSettings("--party-loss end: with --topology flat, servers know only workers", hint)
    training = [party for party in (inventory.central, *inventory.parties) if party.workers]
    return "out" if wanted == "auto" and not reason and len(training) >= FEWEST else wanted


def _reason(inventory: Inventory, options: Mapping[str, Value], script: tuple[str, ...]) -> str:
    """Why the job cannot continue without one of its parties; "" if it can."""
    if inventory.topology != "central":
        return f"with --topology {inventory.topology} the silent party may have a part of the model"
    if script:
        return "only workers of the bundled job can skip the steps that they have missed"
    algorithm = plugins.algorithms()[str(options["algo"])]
    if not algorithm.skips:
        return f"workers of --algo {algorithm.name} cannot skip rounds"
    if algorithm.exchanges == "gradients" and options["optimizer_on"] == "worker":
        return "with --optimizer-on worker no server has the weights that a party needs when it is back"
    if others := [name for name in chain(options) if name != "direct"]:
        return f"--delivery {others[0]} needs all parties"
    return ""
