"""Names of compared jobs that tell them apart: their algorithm, and the options in which they differ, but for those
that have no effect with it.
"""

from collections.abc import Mapping

from geomx_cli.core import plugins
from geomx_cli.core.options import text_of, with_usual_rate
from geomx_cli.jobs.store.registry import KnownJob

__all__ = ["labels"]

_IGNORED = ("algo", "data_dir")
_LONGEST = 80


def labels(jobs: Mapping[str, KnownJob]) -> dict[str, str]:
    """Return, by id, as in "hfa, seed 2, no compress"; jobs that differ in nothing have the same. Raises the errors of
    KnownJob.plan.
    """
    known = {name: _settings(job) for name, job in jobs.items()}
    names = [name for name in dict.fromkeys(key for one in known.values() for key in one) if name not in _IGNORED]
    differing = [name for name in names if len({one[name] for one in known.values() if name in one}) > 1]
    return {job: _label(one, differing) for job, one in known.items()}


def _settings(job: KnownJob) -> dict[str, str]:
    spec = job.plan.spec
    algorithm = str(spec.options.get("algo", ""))
    settled = spec.options if spec.script else with_usual_rate(spec.options)
    options = {name: text_of(value) for name, value in settled.items() if plugins.affects(name, algorithm)}
    return {**options, "script": " ".join(spec.script)}


def _label(options: Mapping[str, str], names: list[str]) -> str:
    values = {name.replace("_", "-"): options[name] for name in names if name in options}
    parts = [f"{name} {value}" if value else f"no {name}" for name, value in values.items()]
    text = ", ".join([options.get("algo", ""), *parts])
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
