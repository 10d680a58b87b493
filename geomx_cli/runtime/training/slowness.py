"""Workers that are slowed down on purpose, to see how an algorithm copes with unequal machines."""

import time

from geomx_cli.errors import InvalidSettings

__all__ = ["factor_of", "slow_down"]


def factor_of(text: str, process: str, party: str, is_last: bool) -> float:
    """By what the steps of a worker take longer: the value of the option `factor`, as in "A/worker:1=8,B=2" or "8".

    `process` is its name in the plan. Raises InvalidSettings for what makes no sense.
    """
    found = 1.0
    for part in filter(None, text.split(",")):
        who, _, number = part.rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = 0.0
        if not 1 <= factor <= 10_000:
            raise InvalidSettings(f"--factor {text}: {number!r} is no factor", "write one from 1, as in A/worker:1=8")
        if who.strip() in (process, party) or (not who and is_last):
            found *= factor
    return found


def slow_down(factor: float, seconds: float) -> None:
    """Sleep so long that a step of `seconds` takes `factor` times that."""
    if factor > 1:
        time.sleep((factor - 1) * seconds)
