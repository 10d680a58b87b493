"""Specs of codecs, as in `--compress SPEC`: NAME or NAME:ARGUMENT, and what planning a job has to know of a codec.

Codecs compute in numpy, so a spec loads numpy; a job without one does not.
"""

from typing import Protocol

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings

__all__ = ["MAX_CODEC", "CodecTraits", "bears_momentum", "complete_lan_spec", "complete_spec", "has_momentum", "parse"]

MAX_CODEC = 64
"""Characters of a codec's name with its argument."""


class CodecTraits(Protocol):
    """What a codec says of itself; see `Codec` in ps/aggregation/codec.py."""

    momentum: float
    bears_momentum: bool
    for_local_optimizers: bool
    union: bool

    def completed(self, spec: str, smallest: int) -> str:
        """The spec with the bound on the size of tensors, if this codec needs one and the spec has none."""


def parse(spec: str) -> CodecTraits | None:
    """Make the codec for `--compress SPEC`; None for "" and "none".

    Raises InvalidSettings for an unknown codec or a bad argument.
    """
    if spec in ("", "none"):
        return None
    name, _, argument = spec.partition(":")
    if len(spec) > MAX_CODEC:
        raise InvalidSettings(f"a codec of {len(spec)} characters", "write NAME or NAME:ARGUMENT")
    known = max((each for each in plugins.codecs() if name.startswith(each)), key=len, default="")
    if known and (rest := spec[len(known) :]).startswith((",", "+", "=", " ", *"0123456789")):
        hint = f"write {known}:{rest.lstrip(',+= ')}"
        raise InvalidSettings(f"{spec}: no colon before the argument of {known}", hint)
    plugin = plugins.find("codec", name)
    try:
        made: CodecTraits = plugin.codec(argument)  # type: ignore[attr-defined]
    except InvalidSettings:
        raise
    except Exception as error:  # of an installed codec
        hint = "see what this codec takes as ARGUMENT"
        raise InvalidSettings(f"the codec {name} does not take {argument!r}: {error!r}", hint) from error
    return made


def complete_spec(spec: str, smallest: int) -> str:
    """The spec as messages name it, with the bound of --compress-min if its codec needs that: so both ends know it.

    Raises InvalidSettings as `parse` does.
    """
    codec = parse(spec)
    if codec is not None:
        spec = codec.completed(spec, smallest)
        parse(spec)
    return spec


def complete_lan_spec(spec: str, smallest: int) -> str:
    """Like `complete_spec`, for --compress-lan. Raises InvalidSettings also for a codec whose results are what was
    contributed to the round, which a local server does not know of other parties.
    """
    if (codec := parse(spec)) is not None and codec.union:
        what = f"{spec}: a local server does not know which elements other parties contributed"
        raise InvalidSettings(what, "leave out pull=union in --compress-lan")
    return complete_spec(spec, smallest)


def has_momentum(spec: str) -> bool:
    """Whether the codec corrects momentum."""
    codec = parse(spec)
    return codec is not None and codec.momentum != 0


def bears_momentum(spec: str) -> bool:
    """Whether the optimizer may have momentum where gradients are so encoded: not if the codec has it already, as each
    gradient would count for 100.
    """
    codec = parse(spec)
    return codec is None or (codec.bears_momentum and not codec.momentum)
