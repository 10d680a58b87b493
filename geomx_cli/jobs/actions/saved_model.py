"""Collects what a bundled job that has ended leaves to one with other numbers: see contract/earlier_job.py."""

import hashlib
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from geomx_cli.contract.earlier_job import (
    ABOUT,
    MODEL,
    MOST_EPOCHS,
    OPTIMIZER,
    Drawn,
    Left,
    Manifest,
    decode,
    root_file,
)
from geomx_cli.core.conventions import START_FOLDER
from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.core.events import Count
from geomx_cli.core.options import Value
from geomx_cli.core.units import counted, format_duration, some_of
from geomx_cli.jobs.actions.attach import rank_zero
from geomx_cli.jobs.actions.fetch import Fetched, fetch
from geomx_cli.jobs.actions.streams import Listed
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.jobs.view.follow import View
from geomx_cli.plan import Plan, Process

__all__ = ["collect", "inherited"]

_MANIFEST = "manifest.json"
_NAMES = (_MANIFEST, MODEL, OPTIMIZER)


class _End(msgspec.Struct):
    """Where a worker stood in its data when it ended, as the job's result says."""

    epoch: Count
    batches: Count
    samples: Count


def inherited(job: KnownJob) -> dict[str, bytes]:
    """Return the files that this job itself began from, for a job that goes on from its checkpoint; {} if there were
    none. Raises CheckFailed if they cannot be read.
    """
    folder = job.directory / START_FOLDER
    try:
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.is_dir() else {}
    except OSError as error:
        raise CheckFailed(f"{folder} cannot be read: {error.strerror}", "restore it, or start anew") from None


def collect(job: KnownJob, options: Mapping[str, Value], view: View) -> dict[str, bytes]:
    """Return the files for a new job with these options, from all hosts. Raises InvalidSettings if the job has not
    saved them, or has nothing left to do, and CheckFailed if they are damaged or cannot be had.
    """
    ends = _ends(job)
    drawn = _drawn(job, ends)
    if drawn[-1].first >= (epochs := int(options["epochs"])):
        what = f"job {job.id} has trained all its {counted(epochs, 'epoch')}"
        raise InvalidSettings(what, f"give more, for example --epochs {epochs + 1}")
    if max(one.last for one in drawn) - drawn[-1].first > MOST_EPOCHS:
        what = f"workers of job {job.id} are more than {MOST_EPOCHS} epochs apart"
        raise InvalidSettings(what, "go on with its numbers of parties and workers")
    files = _saved(job, view)
    manifest = _manifest(job, files.pop(_MANIFEST))
    _check(job, manifest, files)
    limit = float(options["time_limit"])
    if limit and manifest.seconds >= limit:
        what = f"job {job.id} has trained for {format_duration(manifest.seconds)}, which is its --time-limit"
        raise InvalidSettings(what, f"give a longer one, above {format_duration(limit)}")
    samples = sum(end.samples for end in ends)
    view.note(f"going on from the model that job {job.id} has saved, after {counted(samples, 'sample')}")
    codecs = [str(job.plan.spec.options[name]) for name in ("compress", "compress_lan")]
    if any(codecs):
        view.note(f"what {' and '.join(filter(None, codecs))} had not sent yet is dropped")
    return {ABOUT: msgspec.json.encode(Left(manifest, drawn, samples)), **files}


def _saved(job: KnownJob, view: View) -> dict[str, bytes]:
    """Return the manifest and the files for the new job's folder."""
    places = {(rank_zero(job.plan).name, name): name for name in _NAMES}
    places |= {(root.name, OPTIMIZER): root_file(rank) for rank, root in enumerate(_roots(job.plan))}
    progress = _Quiet()
    with tempfile.TemporaryDirectory(prefix="geomx-") as base, view.waiting(f"fetching the model of job {job.id}"):
        found = fetch(job, Path(base), progress, lambda listed: (listed.process, listed.name) in places)
        files = {places[one["process"], one["name"]]: Path(one["path"]).read_bytes() for one in found["files"]}
    for warning in progress.warnings:
        view.warn(warning)
    if found["problems"]:
        told = [f"{one['host']}: {one['problem']}" for one in found["problems"]]
        what = f"what job {job.id} has saved cannot be fetched: {some_of(told, 2)}"
        raise CheckFailed(what, f"geomx fetch {job.id} says more")
    if _MANIFEST not in files:
        raise _not_saved(job)
    return files


def _manifest(job: KnownJob, content: bytes) -> Manifest:
    try:
        return decode(content, Manifest)
    except ValueError as error:
        raise _damaged(job, f"{_MANIFEST}: {error}") from None


def _check(job: KnownJob, manifest: Manifest, files: Mapping[str, bytes]) -> None:
    """Raise CheckFailed if a file is not as it was saved, or one of a root is missing."""
    for name, about in manifest.files.items():
        if hashlib.sha256(files.get(name, b"")).hexdigest() != about.sha256:
            raise _damaged(job, name)
    roots = {piece.root for placement in manifest.slices.values() for piece in placement.slices}
    if manifest.optimizers.server is not None and manifest.rounds:
        for rank in sorted(roots):
            if root_file(rank) not in files:
                raise _damaged(job, f"{OPTIMIZER} of global server {rank} is missing")
    if not set(manifest.slices) <= set(manifest.tensors):
        raise _damaged(job, f"{_MANIFEST}: slices of other tensors")


def _ends(job: KnownJob) -> list[_End]:
    """Return where each worker stood in its data at the end, by global rank. Raises InvalidSettings if it is unknown.
    """
    result = (job.state.result if job.state is not None else None) or {}
    data = result.get("data") or {}
    try:
        ends = [msgspec.convert(data[process.name], _End) for process in _workers(job.plan)]
    except (KeyError, TypeError, msgspec.ValidationError):
        raise _not_saved(job) from None
    if not result.get("model"):
        raise _not_saved(job)
    return ends


def _drawn(job: KnownJob, ends: list[_End]) -> list[Drawn]:
    """Return what the workers of this job, and of those before it, have drawn of the data, the earliest first."""
    options, workers = job.plan.spec.options, _workers(job.plan)
    ranks: dict[str, list[int]] = {}
    for process in workers:
        ranks.setdefault(process.party, []).append(process.global_rank or 0)
    parties = [(min(ranks[one.party]), max(ranks[one.party]) + 1) for one in workers]
    begun = inherited(job).get(ABOUT)
    try:
        before = decode(begun, Left).drawn if begun is not None else []
    except ValueError as error:
        raise CheckFailed(f"{job.directory / START_FOLDER / ABOUT} is damaged: {error}", "restore it") from None
    own = Drawn(
        places=[(one.epoch, one.batches) for one in ends],
        parties=[] if job.plan.topology == "flat" else parties,
        split=str(options["split"]),
        seed=int(options["seed"]),
        batch_size=int(options["batch_size"]),
    )
    return [*before, own]


def _workers(plan: Plan) -> list[Process]:
    """Return the training workers, by global rank."""
    trains = [process for process in plan.processes if process.global_rank is not None]
    return sorted(trains, key=lambda process: process.global_rank or 0)


def _roots(plan: Plan) -> list[Process]:
    role = "server" if plan.topology == "flat" else "global_server"
    return sorted((process for process in plan.processes if process.role == role), key=lambda process: process.rank)


def _not_saved(job: KnownJob) -> InvalidSettings:
    what = f"job {job.id} has not saved its model and the place of each worker in the data"
    hint = (
        "other numbers need a job that has ended by itself or was stopped: resume it as it was (--resume without"
        " numbers), stop it with geomx stop, and resume that job with other numbers"
    )
    return InvalidSettings(what, hint)


def _damaged(job: KnownJob, what: str) -> CheckFailed:
    hint = "restore it from a copy, or go on with the job's numbers from its checkpoint"
    return CheckFailed(f"what job {job.id} has saved is damaged: {what}", hint)


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
