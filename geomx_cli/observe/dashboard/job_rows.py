"""The rows of the page's tables and map: single processes, or sums by party if processes are many."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from geomx_cli.core import plugins
from geomx_cli.core.errors import GeomxError
from geomx_cli.core.option import KINDS
from geomx_cli.core.options import text_of, with_usual_rate
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.jobs.view.reducer import ProcessState

__all__ = ["MOST_ROWS", "by_party", "job_facts", "labels", "row", "totals"]

# Names that distinguish compared jobs: their algorithm, and the options in which they differ, except options without
# effect on the algorithm.

_IGNORED = ("algo", "data_dir")
_LONGEST = 80


def labels(jobs: Mapping[str, KnownJob]) -> dict[str, str]:
    """Return the names by id, as in "hfa, seed 2, no compress". Jobs that differ in nothing have the same name. Raises
    the errors of KnownJob.plan.
    """
    known = {name: _settings(job) for name, job in jobs.items()}
    names = [name for name in dict.fromkeys(key for one in known.values() for key in one) if name not in _IGNORED]
    differing = [name for name in names if len({one[name] for one in known.values() if name in one}) > 1]
    return {job: _label(one, differing) for job, one in known.items()}


def _settings(job: KnownJob) -> dict[str, str]:
    spec = job.plan.spec
    algorithm = str(spec.options.get("algo", ""))
    completed = spec.options if spec.script else with_usual_rate(spec.options)
    options = {name: text_of(value) for name, value in completed.items() if plugins.affects(name, algorithm)}
    return {**options, "script": " ".join(spec.script)}


def _label(options: Mapping[str, str], names: list[str]) -> str:
    values = {name.replace("_", "-"): options[name] for name in names if name in options}
    parts = [f"{name} {value}" if value else f"no {name}" for name, value in values.items()]
    text = ", ".join([options.get("algo", ""), *parts])
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


# The parts of a job that do not change while the page shows it: its options, hosts, and number of processes.

MOST_NAMES = 2000


def job_facts(job: KnownJob) -> dict[str, Any]:
    """Return an object for JSON: a line about the emulated network ("" for none); the options with text values, changed
    ones first; the hosts; the names of the first 2000 processes.
    """
    plan = job.plan
    try:
        known = {option.name: option for option in plugins.table()}
    except GeomxError:  # a plug-in of this machine is bad; the job has its own
        known = {}
    options = []
    for name, value in plan.spec.options.items():
        option = known.get(name)
        text = str(value) if option is None else KINDS[option.kind].format(value)
        options.append({"name": name, "value": text, "default": option is not None and value == option.default})
    return {
        "job": job.id,
        "what": job.what,
        "network": plan.network,
        "script": bool(plan.spec.script),
        "options": sorted(options, key=lambda one: one["default"]),
        "hosts": list(plan.hosts)[:MOST_NAMES],
        "processes": [process.name for process in plan.processes[:MOST_NAMES]],
    }


MOST_ROWS = 100
MOST_PARTIES = 100
OVER = ("finished", "failed", "stopped", "ended", "lost")
"""States of processes that no longer train, or of which nothing is known any more."""
FIELDS = ("round", "step", "samples_per_s", "loss", "accuracy", "waiting", "progress", "left_s")


def row(known: ProcessState, state: str) -> dict[str, Any]:
    """Return a process's known figures. Unknown figures are omitted; so is its rate if there is no news of it. None
    stands for NaN or infinity.
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
    """Return one object for each of the first 100 parties, and one for all others. Each has the number of processes of
    each role in each state, their hosts, and sums or means of its training workers' figures.
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
    """Return the sum of the current rates. A worker that no longer trains has none."""
    return sum(one.current_rate for one in training if states[one.process.name] not in OVER)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None
