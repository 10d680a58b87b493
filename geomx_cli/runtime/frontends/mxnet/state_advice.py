"""The lines that an MXNet script without saved training has to add."""

import sys
from typing import Any

from geomx_cli.runtime.script.state_advice import StateAdvice

__all__ = ["state_advice"]

_FIT = "to go on after such a death, a script needs `geomx_cli.mxnet.fit(module, ...)` in place of `module.fit(...)`"


def state_advice(mx: Any) -> str:
    """Return the hint, with the names of the script's own variables if they are global."""
    globals_ = list(vars(sys.modules["__main__"]).values())  # another thread may add some
    objects = list({id(each): each for each in globals_}.values())
    if any(isinstance(each, mx.mod.BaseModule) for each in objects):
        return f"{_FIT}; or see --on-worker-loss"
    blocks = [each for each in objects if isinstance(each, mx.gluon.Block) and each.collect_params()]
    trainers = [each for each in objects if isinstance(each, mx.gluon.Trainer)]
    advice = StateAdvice("geomx_cli.mxnet")
    for usual, found in (("net", blocks), ("trainer", trainers)):
        for each in found or [object()]:
            advice.add(usual, each)
    return advice.text()
