"""What the page's tables and map show of the processes: single rows, and sums by party where they are many."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from geomx_cli.jobs.view.reducer import ProcessState

__all__ = ["MOST_ROWS", "by_party", "row", "totals"]

MOST_ROWS = 100
MOST_PARTIES = 100
OVER = ("finished", "failed", "stopped", "ended", "lost")
"""States of processes that train no more, or of which nothing is known any more."""
FIELDS = ("round", "step", "samples_per_s", "loss", "accuracy", "waiting", "progress", "left_s")


def row(known: ProcessState, state: str) -> dict[str, Any]:
    """Return a process's known figures; unknown ones are omitted, as its rate when there is no news of it. None stands
    for NaN or infinity.
    """
    process = known.process
    fields = FIELDS if known.telemetry_time else ()
    values = {name: value for name in fields if (value := getattr(known, name)) is not None}
    if state in OVER or not known.current_rate:
        values.pop("samples_per_s", None)
    return {
        "name": process.name, "party": process.party, "role": process.role, "host": process.host,
        "trains": known.trains, "state": state, "wan": known.traffic.wan,
        **{name: value if math.isfinite(value) else None for name, value in values.items()},
    }  # fmt: skip


def by_party(rows: Iterable[ProcessState], states: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return one object for each party, for the first 100 and then one for all the others: how many processes of each
    role are in each state, their hosts, and sums or means of its training workers' figures.
    """
    parties: dict[str, list[ProcessState]] = {}
    for one in rows:
        parties.setdefault(one.process.party, []).append(one)
    names = list(parties)
    found = [{"name": name, **_party(parties[name], states)} for name in names[:MOST_PARTIES]]
    if rest := names[MOST_PARTIES:]:
        more = [one for name in rest for one in parties[name]]
        found.append({"name": f"{len(rest)} more parties", "others": True, **_party(more, states)})
    return found


def totals(rows: Sequence[ProcessState], states: Mapping[str, str]) -> dict[str, Any]:
    """Return the whole job's processes, samples per second, done fraction and remaining seconds."""
    training = [one for one in rows if one.trains]
    return {
        "processes": len(rows),
        "trained": any(one.trains_since is not None for one in training),
        "hosts": len({one.process.host for one in rows}),
        "samples_per_s": _rate(training, states),
        "progress": sum(one.progress or 0.0 for one in training) / len(training) if training else 0.0,
        "left_s": max((one.left_s or 0.0 for one in training), default=0.0),
    }


def _party(rows: Sequence[ProcessState], states: Mapping[str, str]) -> dict[str, Any]:
    counted = Counter((one.process.role, states[one.process.name]) for one in rows)
    training = [one for one in rows if one.trains]
    means = {name: _mean(getattr(one, name) for one in training) for name in ("waiting", "loss")}
    return {
        "count": len(rows),
        "hosts": len({one.process.host for one in rows}),
        "groups": [[role, state, count] for (role, state), count in sorted(counted.items())],
        "round": max((one.round for one in training), default=0),
        "samples_per_s": _rate(training, states),
        "wan": [sum(one.traffic.wan[end] for one in rows) for end in (0, 1)],
        **{name: value for name, value in means.items() if value is not None},
    }


def _rate(training: Iterable[ProcessState], states: Mapping[str, str]) -> float:
    """Return the sum of the current rates: a worker that trains no more has none."""
    return sum(one.current_rate for one in training if states[one.process.name] not in OVER)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None
