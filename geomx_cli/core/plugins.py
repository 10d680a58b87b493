"""Plug-ins: synchronisation algorithms, codecs, deliveries and allocators, discovered by scanning their packages and
the entry points of installed distributions.

An algorithm, delivery or allocator is a module with `name`, `options` and `refuses`. It may have the factories `worker`
and `server`, one for each side in which it takes part. They import expensive modules lazily, so that a scan is cheap.
A codec is a module with `name` and the factory `codec`. A new plug-in is one new file.

Modules whose name starts with "_" are skipped. External distributions register modules in the entry point groups
geomx.algorithms, geomx.codecs, geomx.deliveries and geomx.allocators.
"""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, cast

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.option import KINDS, nearest
from geomx_cli.core.options import OPTIONS, Option, Value

__all__ = [
    "Algorithm", "Kind", "Plugin", "Side", "Spec", "affects", "algorithms", "allocators", "codecs", "deliveries",
    "factory", "find", "merge", "mode", "modes", "scan", "table", "users",
]  # fmt: skip

Kind = Literal["algorithm", "allocator", "codec", "delivery"]
Side = Literal["worker", "server"]

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
    """A job as seen by a plug-in: every option's value, and the script with its arguments (() for none)."""

    @property
    def options(self) -> Mapping[str, Value]: ...

    @property
    def script(self) -> tuple[str, ...]: ...


class Plugin(Protocol):
    """Interface of every plug-in module."""

    __name__: str

    @property
    def name(self) -> str:
        """Its name for users, e.g. in `--algo fsa`."""

    @property
    def options(self) -> tuple[Option, ...]:
        """Its own options, added to the table of options."""

    def refuses(self, spec: Spec) -> str | None:
        """Return why the job cannot use this plug-in, as a sentence without a full stop, or None."""


@dataclass(frozen=True)
class Algorithm:
    """The attributes of an algorithm's module; it may leave out those that have a default.

    title, look: for reports. A look is a colour (e.g. "#E69F00"), a matplotlib marker and a hatch.
    variants: modes that reports distinguish, with titles and looks.
    variant: chooses one of `variants` by a job's options; "" for none.
    forced_options: cluster options that the algorithm overrides.
    shared_options: options of other algorithms that it uses.
    needs_local_server: whether every worker needs a local server, even in the central party.
    ranks_by_party: whether its scripts count ranks within a party.
    standalone: whether it is a baseline with a single worker.
    exchanges: whether its workers contribute a gradient in each step, or weights after their own steps.
    asynchronous: whether its parties train independently, by an optimizer on the roots.
    asynchronous_on_request: whether a script may ask the roots for asynchronous training.
    own_pace: whether each worker takes as many steps in a round as it has time for.
    outer_step: whether an optimizer applies the mean of the differences.
    shards: whether the workers of a party may divide the model.
    skips: whether workers of the bundled job can skip rounds (WorkerAlgorithm.skip).
    depart: tells servers that a worker takes no more steps. It gets the client of a worker that has died, which acts in
        that worker's name.
    """

    name: str
    options: tuple[Option, ...]
    title: str = ""
    look: Look | None = None
    variants: Mapping[str, tuple[str, Look]] = field(default_factory=dict)
    variant: Callable[[Mapping[str, Value]], str] = lambda options: ""
    forced_options: Mapping[str, Value] = field(default_factory=dict)
    shared_options: tuple[str, ...] = ()
    needs_local_server: bool = False
    ranks_by_party: bool = False
    standalone: bool = False
    exchanges: Literal["gradients", "weights"] = "weights"
    asynchronous: bool = False
    asynchronous_on_request: bool = False
    own_pace: bool = False
    outer_step: bool = False
    shards: bool = False
    skips: bool = False
    depart: Callable[[Any], None] = lambda client: None

    @property
    def sums_gradients(self) -> bool:
        """Whether one optimizer takes each step with the gradients of all workers."""
        return self.exchanges == "gradients" and not self.asynchronous


def scan(package: str, parts: tuple[str, ...] = _PARTS) -> dict[str, Plugin]:
    """Return the plug-ins of `package` by name, sorted; each must have the attributes `parts`.

    Raises TypeError for bugs in a plug-in: a module that lacks an attribute, a duplicate name, or an option that is no
    Option.
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
    if "options" in parts:
        _check_options(module.__name__, plugin.options)
    if plugin.name in found:
        raise TypeError(f"{module.__name__}: there is a plug-in named {plugin.name!r} already")
    found[plugin.name] = plugin


def _check_options(module: str, options: object) -> None:
    """Raise TypeError, which names module and option, unless these are Options with a default of their kind."""
    if not isinstance(options, tuple):
        raise TypeError(f"{module}: its options are {options!r}, not a tuple of Option")
    for option in options:
        if not isinstance(option, Option):
            problem = f"options contain {option!r}, which is no Option"
        elif not all(isinstance(text, str) for text in (option.name, option.env, option.help)):
            problem = f"option {option.name!r} needs text as name, env and help"
        elif option.kind not in KINDS:
            problem = f"option {option.name!r} is of kind {option.kind!r}, not {', '.join(KINDS)}"
        elif type(option.default) not in KINDS[option.kind].types:
            problem = f"option {option.name!r} of kind {option.kind} has the default {option.default!r}"
        else:
            continue
        raise TypeError(f"{module}: its {problem}")


@cache
def _all(kind: Kind) -> Mapping[str, Plugin]:
    """Return the built-in plug-ins followed by the installed ones. Raises InvalidSettings if an installed one cannot
    be loaded.
    """
    parts = _CODEC_PARTS if kind == "codec" else _PARTS
    found = scan(_PACKAGES[kind], parts)
    for entry in _installed(kind):
        try:
            _add(entry.load(), found, parts)
        except Exception as error:
            whose = f" of {entry.dist.name}" if entry.dist is not None else ""
            hint = "correct it, or uninstall what it came with"
            raise InvalidSettings(f"the {kind} {entry.value}{whose} cannot be loaded: {error!r}", hint) from error
    return found


def _installed(kind: Kind) -> Iterable[Any]:
    """Return the entry points of installed plug-ins of a kind."""
    if not any(_may_register(Path(place)) for place in sys.path):
        return ()  # importing importlib.metadata would take a fifth of a scheduler's start
    from importlib import metadata

    return metadata.entry_points(group=_GROUPS[kind])


@cache
def _may_register(place: Path) -> bool:
    """Whether a distribution in this folder registers plug-ins of any kind. For an archive, True."""
    if place.is_file():
        return True
    for path in (path for suffix in ("dist", "egg") for path in place.glob(f"*.{suffix}-info/entry_points.txt")):
        try:
            if b"[geomx." in path.read_bytes():
                return True
        except OSError:
            pass  # it is being uninstalled, or this user may not read it
    return False


def algorithms() -> Mapping[str, Algorithm]:
    """Return the synchronisation algorithms by name."""
    names = [item.name for item in fields(Algorithm)]
    return {
        name: Algorithm(**{key: getattr(module, key) for key in names if hasattr(module, key)})
        for name, module in _all("algorithm").items()
    }


def allocators() -> Mapping[str, Plugin]:
    """Return by name the allocators, which provide machines to jobs; see hosts/allocation.py."""
    return _all("allocator")


def codecs() -> Mapping[str, Plugin]:
    """Return the codecs by name. They import numpy, so they are scanned only for jobs that request one."""
    return _all("codec")


def deliveries() -> Mapping[str, Plugin]:
    """Return the deliveries by name."""
    return _all("delivery")


def find(kind: Kind, name: str) -> Plugin:
    """Return the plug-in called `name`. Raises InvalidSettings, which lists the known names."""
    known = _all(kind)
    if name not in known:
        raise InvalidSettings(f"there is no {kind} {name!r}", nearest(name, known))
    return known[name]


def factory(plugin: Plugin, side: Side) -> Callable[..., Any] | None:
    """Return the plug-in's factory for a side, or None if it takes no part in this side."""
    return getattr(plugin, side, None)


def modes() -> Mapping[str, tuple[str, Look | None]]:
    """Return title and look of each mode distinguished in reports, sorted by name: algorithms and their variants."""
    found: dict[str, tuple[str, Look | None]] = {}
    for name, algorithm in algorithms().items():
        found |= algorithm.variants
        found[name] = algorithm.title or name, algorithm.look
    return dict(sorted(found.items()))


def mode(options: Mapping[str, Value]) -> str:
    """Return the mode of a job with these options: its algorithm, or a variant of its algorithm."""
    name = str(options["algo"])
    known = algorithms().get(name)
    return (known.variant(options) if known else "") or name


def users(option: str) -> list[str]:
    """Return the algorithms that use an algorithm's option: the option's owner, and the algorithms that list the option
    in `shared_options`. Empty for other options.
    """
    return [
        name
        for name, algorithm in algorithms().items()
        if option in algorithm.shared_options or any(option == own.name for own in algorithm.options)
    ]


def affects(option: str, algorithm: str) -> bool:
    """Whether an option may have an effect with this algorithm: it belongs to no algorithm, or this algorithm uses it.
    """
    having = users(option)
    return not having or algorithm in having


def merge(base: Iterable[Option], plugins: Iterable[Plugin]) -> tuple[Option, ...]:
    """Return `base` and the options of `plugins`. Raises InvalidSettings, which names both plug-ins, if two options
    share a name, flag or variable.
    """
    merged = [("geomx", option) for option in base]
    merged += [
        (f"the plug-in {plugin.name} ({plugin.__name__})", option) for plugin in plugins for option in plugin.options
    ]
    taken: dict[str, str] = {}
    for owner, option in merged:
        own = f"option {option.name!r} of {owner}"
        for key in (option.flag, f"--no-{option.flag.removeprefix('--')}", option.env):
            if key in taken:
                hint = "rename one of them, or uninstall the plug-in"
                raise InvalidSettings(f"{taken[key]} and {own} both claim {key}", hint)
            taken[key] = own
    return tuple(option for _, option in merged)


@cache
def table() -> tuple[Option, ...]:
    """Return the complete table of options, with the plug-in names as choices."""
    by_option = frozenset(name for name, module in deliveries().items() if hasattr(module, "chosen_by"))
    own: dict[str, dict[str, Any]] = {
        "algo": {"choices": tuple(algorithms())}, "delivery": {"choices": tuple(deliveries()), "written": by_option},
    }  # fmt: skip
    base = (replace(option, **own.get(option.name, {})) for option in OPTIONS)
    kinds = (_all("algorithm"), allocators(), deliveries())
    return merge(base, [plugin for found in kinds for plugin in found.values()])
