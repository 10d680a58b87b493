"""What a bundled job that has ended leaves to one with other numbers of parties, workers or servers: its model, the
state of its optimizers, and which batches its workers have drawn.

The new job's workers read the files from one folder (runtime/bundled/earlier_job.py).
"""

import hashlib
import json
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.core.units import counted, some_of
from geomx_cli.jobs.actions.attach import rank_zero
from geomx_cli.jobs.actions.fetch import Fetched, fetch
from geomx_cli.jobs.actions.streams import Listed
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.jobs.view.follow import View
from geomx_cli.plan import Plan, Process
from geomx_cli.plan.job_spec import START

__all__ = ["collect", "inherited"]

_ABOUT, _MODEL, _OPTIMIZER = "job.json", "model.safetensors", "optimizer.safetensors"


def inherited(job: KnownJob) -> dict[str, bytes]:
    """Return the files that this job itself began from, for a job that goes on from its checkpoint; {} if there were
    none. Raises CheckFailed if they cannot be read.
    """
    folder = job.directory / START
    try:
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.is_dir() else {}
    except OSError as error:
        raise CheckFailed(f"{folder} cannot be read: {error.strerror}", "restore it, or start anew") from None


def collect(job: KnownJob, epochs: int, view: View) -> dict[str, bytes]:
    """Return the files for a new job of so many epochs, from all hosts. Raises InvalidSettings if the job has not saved
    them, or has trained as many epochs, and CheckFailed if they cannot be had.
    """
    _check_epochs(job, epochs)
    first, drawn, samples = rank_zero(job.plan), _drawn(job), _samples(job)
    roots = [process for process in job.plan.processes if _is_root(process, job.plan)]
    with tempfile.TemporaryDirectory(prefix="geomx-") as base, view.waiting(f"fetching the model of job {job.id}"):
        progress = _Quiet()
        found = fetch(job, Path(base), progress)
        for warning in progress.warnings:
            view.warn(warning)
        if found["problems"]:
            told = [f"{one['host']}: {one['problem']}" for one in found["problems"]]
            what = f"what job {job.id} has saved cannot be fetched: {some_of(told, 2)}"
            raise CheckFailed(what, f"geomx fetch {job.id} says more")
        paths = {(one["process"], one["name"]): Path(one["path"]) for one in found["files"]}
        known = [name for name in (_MODEL, _OPTIMIZER) if (first.name, name) in paths]
        files = {name: paths[first.name, name].read_bytes() for name in known}
        if (first.name, "manifest.json") not in paths:
            raise _not_saved(job)
        manifest = json.loads(paths[first.name, "manifest.json"].read_bytes())
        for number, root in enumerate(roots):
            if (root.name, _OPTIMIZER) in paths:
                files[f"root-{number}.safetensors"] = paths[root.name, _OPTIMIZER].read_bytes()
    _check(job, manifest, files)
    view.note(f"going on from the model that job {job.id} has saved, after {counted(samples, 'sample')}")
    codecs = [str(job.plan.spec.options[name]) for name in ("compress", "compress_lan")]
    if any(codecs):
        view.note(f"what {' and '.join(filter(None, codecs))} had not sent yet is dropped")
    return {_ABOUT: json.dumps({"manifest": manifest, "drawn": drawn, "samples": samples}).encode(), **files}


def _check_epochs(job: KnownJob, epochs: int) -> None:
    if min(one["epoch"] for one in _ends(job)) >= epochs:
        what = f"job {job.id} has trained all its {counted(epochs, 'epoch')}"
        raise InvalidSettings(what, f"give more, for example --epochs {epochs + 1}")


def _check(job: KnownJob, manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    for name, about in manifest["files"].items():
        if hashlib.sha256(files.get(name, b"")).hexdigest() != about["sha256"]:
            what = f"{name} of job {job.id} is not the file that it has saved"
            raise CheckFailed(what, "restore it from a copy, or go on with the job's numbers from its checkpoint")


def _workers(job: KnownJob) -> list[Process]:
    """Return the job's training workers, by global rank."""
    trains = [process for process in job.plan.processes if process.global_rank is not None]
    return sorted(trains, key=lambda process: process.global_rank or 0)


def _ends(job: KnownJob) -> list[dict[str, int]]:
    """Return where each worker stood in its data at the end, by global rank. Raises InvalidSettings if it is unknown.
    """
    result = (job.state.result if job.state is not None else None) or {}
    data = result.get("data") or {}
    workers = [process.name for process in _workers(job)]
    if not result.get("model") or not set(workers) <= set(data):
        raise _not_saved(job)
    return [dict(data[name]) for name in workers]


def _samples(job: KnownJob) -> int:
    return sum(one["samples"] for one in _ends(job))


def _drawn(job: KnownJob) -> list[dict[str, Any]]:
    """Return what the workers of this job, and of those before it, have drawn of the data, the earliest first."""
    ends, options, workers = _ends(job), job.plan.spec.options, _workers(job)
    ranks = [process.global_rank or 0 for process in workers]
    mates = [[rank for rank, other in zip(ranks, workers, strict=True) if other.party == one.party] for one in workers]
    parties = [] if job.plan.topology == "flat" else [[min(of_party), max(of_party) + 1] for of_party in mates]
    own = {
        "places": [[one["epoch"], one["batches"]] for one in ends],
        "parties": parties,
        "split": options["split"],
        "seed": options["seed"],
        "batch_size": options["batch_size"],
    }
    begun = inherited(job).get(_ABOUT)
    return [*(json.loads(begun)["drawn"] if begun is not None else []), own]


def _not_saved(job: KnownJob) -> InvalidSettings:
    what = f"job {job.id} has not saved its model and the place of each worker in the data"
    hint = (
        "other numbers need a job that has ended by itself or was stopped: resume it as it was (--resume without"
        " numbers), stop it with geomx stop, and resume that job with other numbers"
    )
    return InvalidSettings(what, hint)


def _is_root(process: Process, plan: Plan) -> bool:
    return process.role == "global_server" or (plan.topology == "flat" and process.role == "server")


class _Quiet:
    """Keeps only warnings of a fetch, as a view is not for several threads."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def on_list(self, files: Collection[Listed]) -> None:
        """See FetchProgress."""

    def on_bytes(self, file: Listed, done: int) -> None:
        """See FetchProgress."""

    def on_file(self, file: Fetched) -> None:
        """See FetchProgress."""

    def warn(self, text: str) -> None:
        """See FetchProgress."""
        self.warnings.append(text)
