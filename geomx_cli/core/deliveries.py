"""The deliveries of a job, and what their modules define: own options, links between peers."""

from collections.abc import Callable, Iterable, Mapping

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Value

__all__ = ["chain", "chosen", "needs_peers", "own_options", "party_peers", "peers"]


def chosen(options: Mapping[str, Value]) -> str:
    """Return a job's delivery; see chain."""
    return chain(options)[0]


def chain(options: Mapping[str, Value]) -> tuple[str, ...]:
    """Return a job's delivery: --delivery, or a delivery that its own option chooses (`chosen_by`). If it does not
    relay everything and can use another chosen delivery for the rest (`sends_by`), both are returned. Raises
    InvalidSettings.
    """
    named = str(options["delivery"])
    by_option = {name: str(getattr(module, "chosen_by", "")) for name, module in plugins.deliveries().items()}
    wanted = {name: f"--{option} {options[option]}" for name, option in by_option.items() if options.get(option)}
    names = [*wanted, *({named} - wanted.keys() - {"direct"})]
    if len(names) < 2:
        return (*names, "direct")[:1]
    for first in names:
        rest = tuple(name for name in names if name != first)
        if len(rest) == 1 and rest[0] in wanted and rest[0] in getattr(plugins.find("delivery", first), "sends_by", ()):
            return first, *rest
    if named in wanted or named == "direct":
        texts = " and ".join(wanted.values())
        raise InvalidSettings(f"{texts} each choose a delivery", "leave one of them out: a job has one")
    name, text = next(iter(wanted.items()))
    what = f"{text} chooses the delivery {name}, and --delivery {named} another"
    raise InvalidSettings(what, "leave one of them out")


def own_options(delivery: str, options: Mapping[str, Value]) -> dict[str, Value]:
    """Return a delivery's own options among a job's options."""
    own = plugins.find("delivery", delivery).options
    return {option.name: options.get(option.name, option.default) for option in own}


def peers(delivery: str, workers: int, options: Mapping[str, Value]) -> frozenset[tuple[int, int]]:
    """Return the links between `workers` workers of a plane as (dialler, listener) ranks (`peers` of the delivery's
    module). options: at least the delivery's own.
    """
    return _pairs(delivery, "peers", workers, options)


def party_peers(delivery: str, parties: int, options: Mapping[str, Value]) -> frozenset[tuple[int, int]]:
    """Return the links between the local servers of `parties` parties as (dialler, listener) indices of parties
    (`party_peers` of the delivery's module). options: at least the delivery's own.
    """
    return _pairs(delivery, "party_peers", parties, options)


def needs_peers(delivery: str) -> bool:
    """Whether a job with this delivery cannot do without any of these links (`needs_peers` of its module)."""
    return bool(getattr(plugins.find("delivery", delivery), "needs_peers", True))


def _pairs(delivery: str, of: str, count: int, options: Mapping[str, Value]) -> frozenset[tuple[int, int]]:
    found: Callable[[int, Mapping[str, Value]], Iterable[tuple[int, int]]] | None
    found = getattr(plugins.find("delivery", delivery), of, None)
    return frozenset(() if found is None else found(count, options))
