"""The variables of a person's environment that begin with GEOMX_: those that mean nothing here are likely mistyped."""

import difflib
from collections.abc import Iterator, Mapping

from geomx_cli.plugins import table

__all__ = ["OWN", "strangers"]

OWN = frozenset(
    f"GEOMX_{name}"
    for name in (
        "ADVERTISE", "BIND", "DEVICE", "GLOBAL_RANK", "GLOBAL_SCHEDULER", "HOST", "HOSTS", "INSECURE", "JOB",
        "JOB_DIR", "KEY_FILE", "PARTY", "PARTY_INDEX", "PROCESS", "RANK", "SCHEDULER", "SCRIPT_PROCESS", "WAN_SHARE",
    )
)  # fmt: skip
"""Those that are read beside the options' own."""


def strangers(environment: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each variable GEOMX_... that nothing reads."""
    known = OWN | {option.env for option in table()}
    for name in sorted(environment):
        if name.startswith("GEOMX_") and name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            yield f"{name} means nothing to geomx" + (f"; did you mean {close[0]}?" if close else "")
