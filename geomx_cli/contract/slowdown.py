"""The option `slowdown`, which makes workers slower than their machines."""

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.units import plain_number

__all__ = ["factor_of", "factors"]


def factors(text: str) -> list[tuple[str, float]]:
    """Parse the option `slowdown`, as in "A/worker:1=8,B=2" or "8", to (name, factor) pairs.

    A name is a process of the plan or a party, "" the last worker. Raises InvalidSettings for invalid values.
    """
    found = []
    for part in filter(None, text.split(",")):
        who, named, number = part.rpartition("=")
        if named and not who.strip():
            hint = "write a worker or party, or the number alone"
            raise InvalidSettings(f"--slowdown {text}: there is nobody before the =", hint)
        try:
            factor = float(plain_number(number.strip()))
        except ValueError:
            factor = 0.0
        if not 1 <= factor <= 10_000:
            raise InvalidSettings(f"--slowdown {text}: {number!r} is no factor", "write one from 1, as in A/worker:1=8")
        found.append((who.strip(), factor))
    return found


def factor_of(text: str, process: str, party: str, is_last: bool) -> float:
    """Return the slowdown factor of this worker; `process` is its name in the plan."""
    found = 1.0
    for who, factor in factors(text):
        if who in (process, party) or (not who and is_last):
            found *= factor
    return found
