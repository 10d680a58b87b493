"""Which workers of a script have contributed to no round of the job, or to none between parties."""

from collections.abc import Iterable

from geomx_cli.core.units import some_of
from geomx_cli.jobs.view.reducer import ProcessState

__all__ = ["result_warnings"]

_MOST = 3
_KEYLESS = (
    "no worker gave its parameters to geomx, as Trainer(..., kvstore=kv) does in MXNet and geomx.wrap in PyTorch"
)


def result_warnings(rows: Iterable[ProcessState]) -> list[str]:
    """Return why a job may not have trained one model on all its data, by its processes' ends and own warnings."""
    known = list(rows)
    return list(dict.fromkeys(filter(None, (_no_contribution(known), *(row.result_warning for row in known)))))


def _no_contribution(rows: Iterable[ProcessState]) -> str:
    """Return the warning of training workers whose script has ended without a contribution, or with contributions to
    rounds of their party only; "" for none.

    A script that only reads is no case: none of its workers contributes, and none reports training. A worker that
    pulls repeatedly beside others that train may evaluate.
    """
    training = [row for row in rows if row.trains]
    ends = {row.process.name: row.finished.contribution for row in training if row.finished is not None}
    apart = [name for name, end in ends.items() if end == "party"]
    if apart and len(apart) == len(training):
        return "nothing was exchanged between parties: the scripts ended before that (in hfa: after K1 x K2 steps)"
    if ends and len(ends) == len(training) and all(end == "keyless" for end in ends.values()):
        return f"no gradients were exchanged: {_KEYLESS}"
    others = any(end in ("rounds", "party") for end in ends.values())
    idle = [name for name, end in ends.items() if end == "alone" or (others and end in ("none", "keyless"))]
    if not idle:
        return f"{some_of(apart, _MOST)} exchanged with their own party only" if apart else ""
    if len(ends) == len(training) and all(end in ("alone", "keyless", "none") for end in ends.values()):
        return "no gradients were exchanged: each worker trained alone"
    return f"{some_of(idle, _MOST)} contributed to no round"
