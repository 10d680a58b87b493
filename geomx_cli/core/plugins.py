"""Plug-ins: synchronisation algorithms, codecs, ways of delivery and allocators, found by scanning their packages, and
among the entry points of whatever is installed beside geomx.

An algorithm, delivery or allocator is a module with a `name`, its `options` and `refuses`. It may have the factories
`worker`, `server` and `scheduler`, one for each side that it has a part in; what is heavy to import is imported inside
them, so that a scan is cheap. A codec is a module with a `name` and the factory `codec`. A new plug-in is one new file.
A module whose name starts with "_" is none. A distribution of one's own offers its modules in the groups
geomx.algorithms, geomx.codecs, geomx.deliveries and geomx.allocators.
"""

import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any, Literal, Protocol, cast

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import OPTIONS, Option, Value

__all__ = [
    "Kind",
    "Plugin",
    "Side",
    "Spec",
    "algorithms",
    "allocators",
    "codecs",
    "deliveries",
    "factory",
    "find",
    "forced_options",
    "in_two_tiers",
    "is_standalone",
    "merge",
    "mode",
    "modes",
    "peers",
    "ranks_by_party",
    "scan",
    "table",
    "users",
]

Kind = Literal["algorithm", "allocator", "codec", "delivery"]
Side = Literal["worker", "server", "scheduler"]

_PACKAGES: Mapping[Kind, str] = {
    "algorithm": "geomx_cli.runtime.algorithms",
    "allocator": "geomx_cli.hosts.allocators",
    "codec": "geomx_cli.ps.codecs",
    "delivery": "geomx_cli.ps.delivery",
}
_GROUPS: Mapping[Kind, str] = {
    "algorithm": "geomx.algorithms", "allocator": "geomx.allocators", "codec": "geomx.codecs",
    "delivery": "geomx.deliveries",
}  # fmt: skip
_PARTS = ("name", "options", "refuses")
_CODEC_PARTS = ("name", "codec")
Look = tuple[str, str, str]


class Spec(Protocol):
    """What a plug-in sees of a job: every option's value, and the script with its arguments (() for none)."""

    @property
    def options(self) -> Mapping[str, Value]: ...

    @property
    def script(self) -> tuple[str, ...]: ...


class Plugin(Protocol):
    """What every plug-in's module has."""

    @property
    def name(self) -> str:
        """What a user calls it, as in `--algo fsa`."""

    @property
    def options(self) -> tuple[Option, ...]:
        """Its own options, which join the table of options."""

    def refuses(self, spec: Spec) -> str | None:
        """Why the job cannot work with this plug-in, as one sentence without a full stop; None if it can."""


def scan(package: str, parts: tuple[str, ...] = _PARTS) -> dict[str, Plugin]:
    """The plug-ins of `package` by name, sorted; each has these `parts`.

    Raises TypeError for a module that is none and for a name taken twice: these are mistakes in a plug-in.
    """
    found: dict[str, Plugin] = {}
    for item in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
        if item.name.rpartition(".")[2].startswith("_"):
            continue
        _add(importlib.import_module(item.name), found, parts)
    return dict(sorted(found.items()))


def _add(module: ModuleType, found: dict[str, Plugin], parts: tuple[str, ...]) -> None:
    missing = [part for part in parts if not hasattr(module, part)]
    if missing:
        raise TypeError(f"{module.__name__} is no plug-in: it has no {', '.join(missing)}")
    plugin = cast(Plugin, module)
    if plugin.name in found:
        raise TypeError(f"{module.__name__}: there is a plug-in named {plugin.name!r} already")
    found[plugin.name] = plugin


@cache
def _all(kind: Kind) -> Mapping[str, Plugin]:
    """Those of geomx, and behind them those that are installed. Raises InvalidSettings for one of the latter that
    cannot be loaded.
    """
    parts = _CODEC_PARTS if kind == "codec" else _PARTS
    found = scan(_PACKAGES[kind], parts)
    for entry in importlib.metadata.entry_points(group=_GROUPS[kind]):
        try:
            _add(entry.load(), found, parts)
        except Exception as error:
            whose = f" of {entry.dist.name}" if entry.dist is not None else ""
            hint = "correct it, or uninstall what it came with"
            raise InvalidSettings(f"the {kind} {entry.value}{whose} cannot be loaded: {error!r}", hint) from error
    return found


def algorithms() -> Mapping[str, Plugin]:
    """The synchronisation algorithms by name."""
    return _all("algorithm")


def allocators() -> Mapping[str, Plugin]:
    """What gives machines to jobs, by name; see hosts/allocation.py."""
    return _all("allocator")


def codecs() -> Mapping[str, Plugin]:
    """The codecs by name. They import numpy, so they are only scanned for a job that asks for one."""
    return _all("codec")


def deliveries() -> Mapping[str, Plugin]:
    """The ways of delivery by name."""
    return _all("delivery")


def find(kind: Kind, name: str) -> Plugin:
    """The plug-in called `name`. Raises InvalidSettings, which names those there are."""
    known = _all(kind)
    if name not in known:
        raise InvalidSettings(f"there is no {kind} {name!r}", f"choose one of {', '.join(known)}")
    return known[name]


def factory(plugin: Plugin, side: Side) -> Callable[..., Any] | None:
    """What makes the plug-in's part in a worker, server or scheduler; None if it has no part there."""
    return getattr(plugin, side, None)


def modes() -> Mapping[str, tuple[str, Look | None]]:
    """What reports tell apart: the algorithms, and the `variants` that modules of theirs have. By name, sorted: title
    (its module's `title`, or its name), and colour (as in "#E69F00"), marker and hatch (matplotlib's) in figures.
    """
    found: dict[str, tuple[str, Look | None]] = {}
    for name, plugin in algorithms().items():
        found |= getattr(plugin, "variants", {})
        found[name] = str(getattr(plugin, "title", name)), getattr(plugin, "look", None)
    return dict(sorted(found.items()))


def mode(options: Mapping[str, Value]) -> str:
    """What a job with these options is in reports: its algorithm, or a variant of that, which its module's `variant`
    names.
    """
    name = str(options["algo"])
    variant: Callable[[Mapping[str, Value]], str] = getattr(algorithms().get(name), "variant", lambda _: "")
    return variant(options) or name


def is_standalone(algorithm: str) -> bool:
    """Whether it is one worker by itself, which others are compared with: its module's `standalone`."""
    return bool(getattr(algorithms().get(algorithm), "standalone", False))


def forced_options(algorithm: str) -> Mapping[str, Value]:
    """Options of the cluster that hold with this algorithm, whatever else is said: its module's `forced_options`."""
    return dict(getattr(find("algorithm", algorithm), "forced_options", {}))


def in_two_tiers(algorithm: str) -> bool:
    """Whether every worker needs a local server above it, the central party's too (`needs_local_server`)."""
    return bool(getattr(find("algorithm", algorithm), "needs_local_server", False))


def ranks_by_party(algorithm: str) -> bool:
    """Whether scripts that are written for it count ranks within their party: its module's `ranks_by_party`."""
    return bool(getattr(find("algorithm", algorithm), "ranks_by_party", False))


def peers(delivery: str, workers: int) -> frozenset[tuple[int, int]]:
    """Which workers of a plane of so many dial which, by rank, as (dialler, listener): its module's `peers`."""
    found: Callable[[int], Iterable[tuple[int, int]]] = getattr(find("delivery", delivery), "peers", lambda _: ())
    return frozenset(found(workers))


def users(option: str) -> list[str]:
    """The algorithms that have a use for an option of one of them: it is theirs, or among the `shared_options` of
    their module. Empty for an option that is no algorithm's.
    """
    return [
        name
        for name, plugin in algorithms().items()
        if option in getattr(plugin, "shared_options", ()) or any(option == own.name for own in plugin.options)
    ]


def merge(base: Iterable[Option], plugins: Iterable[Plugin]) -> tuple[Option, ...]:
    """`base` and the options of `plugins`. Raises TypeError where two have one name, flag or variable."""
    merged = [*base, *(option for plugin in plugins for option in plugin.options)]
    taken: dict[str, str] = {}
    for option in merged:
        for key in (option.flag, f"--no-{option.flag.removeprefix('--')}", option.env):
            if key in taken:
                raise TypeError(f"the options {taken[key]!r} and {option.name!r} both claim {key}")
            taken[key] = option.name
    return tuple(merged)


@cache
def table() -> tuple[Option, ...]:
    """The table of options of the whole program, with the choices of those that name a plug-in."""
    choices = {"algo": tuple(algorithms()), "delivery": tuple(deliveries())}
    base = (replace(option, choices=choices.get(option.name, option.choices)) for option in OPTIONS)
    kinds = (algorithms(), allocators(), deliveries())
    return merge(base, [plugin for found in kinds for plugin in found.values()])
