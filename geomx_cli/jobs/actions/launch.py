"""Start a job and follow it to its end, or detach. Planning is pure (plan/); this module executes the plan."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from geomx_cli import hosts, preflight
from geomx_cli.agent.host_spec import HostSpec, Task
from geomx_cli.agent.stored import DESCRIPTION
from geomx_cli.contract import security
from geomx_cli.core import env_names
from geomx_cli.core.conventions import START_FOLDER
from geomx_cli.core.errors import Interrupted, UsageError
from geomx_cli.core.stores import Store, normal_place
from geomx_cli.core.units import counted, format_bytes, format_duration
from geomx_cli.hosts import Connector, File
from geomx_cli.hosts.allocation import allocated
from geomx_cli.hosts.local import python_path
from geomx_cli.hosts.ssh.options import SshOptions
from geomx_cli.inventory import Inventory
from geomx_cli.jobs.actions.agent_connection import interrupts_raised, interrupts_to, suspends_to
from geomx_cli.jobs.actions.agent_pool import AgentPool
from geomx_cli.jobs.actions.attach import Tee, rank_zero
from geomx_cli.jobs.actions.checkpoint_source import fetch_checkpoint, newest_checkpoint
from geomx_cli.jobs.actions.data import provide
from geomx_cli.jobs.actions.saved_model import collect, inherited
from geomx_cli.jobs.actions.watch import Watch
from geomx_cli.jobs.store import JobDirectory, job_state, user_files
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.jobs.store.stored_job import StoredJob, description
from geomx_cli.jobs.store.user_files import UserFiles
from geomx_cli.jobs.view.follow import Observer, View, view_for
from geomx_cli.jobs.view.outputs import log_paths
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.jobs.view.result import Conclusion, Outcome, detached, record_conclusion
from geomx_cli.plan import JobSpec, Plan, plan
from geomx_cli.plan.automatic_topology import topology_line
from geomx_cli.plan.job_spec import complete
from geomx_cli.plan.ports import choose

if TYPE_CHECKING:
    from geomx_cli.datasets.fetch import Progress as OnDownload

__all__ = ["LaunchOptions", "host_specs", "key_files", "launch", "prepared", "working_dirs"]

# What the agent of each host is given: its part of the plan, and the keys of its processes.


def host_specs(
    plan: Plan, inventory: Inventory, working_dirs: Mapping[str, str], leases: Mapping[str, float],
    checkpoints: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, HostSpec]:  # fmt: skip
    """Return each host's part of the plan, which was made of `inventory`. `working_dirs`: working directory of the
    processes per host; `leases`: seconds that they continue without the control machine, 0 for unlimited;
    `checkpoints`: from which they go on, by host.
    """
    clear = ("PORT", *env_names.of_options())
    return {
        host: HostSpec(
            job=plan.job,
            host=host,
            job_dir=plan.job_dirs[host],
            sockets=plan.socket_dirs[host],
            socket=f"{plan.socket_dirs[host]}/agent-{index}.sock",
            working_dir=working_dirs[host],
            lease=leases[host],
            silence=float(plan.spec.options["silence"]),
            grace=float(plan.spec.options["grace"]),
            restarts=int(plan.spec.options["restarts"]),
            resume=checkpoints.get(host, ""),
            checkpoint_to=str(plan.spec.options["checkpoint_to"]),
            timeout=float(plan.spec.options["timeout"]),
            on_worker_loss=str(plan.spec.options["on_worker_loss"]),
            clock_ahead=inventory.host(host).clock_ahead,
            clear=clear,
            tasks=tuple(Task(process.name, process.argv, process.env) for process in plan.on_host(host)),
        )
        for index, host in enumerate(plan.hosts)
    }


def _leases(plan: Plan, wanted: float | None, *, detach: bool) -> dict[str, float]:
    """Return each host's lease: the option, or how long the job waits for the host itself. A party may be left out."""
    options = plan.spec.options
    silence, absence = float(options["silence"]), float(options["absence"])
    away = max(silence, absence) if options["party_loss"] == "out" else silence
    central = {process.host for process in plan.processes if process.role.startswith("global")}
    usual = {host: silence if host in central else away for host in plan.hosts}
    return {host: 0.0 if detach else usual[host] if wanted is None else wanted for host in plan.hosts}


def key_files(plan: Plan) -> dict[str, dict[str, File]]:
    """Return host -> path -> key file for its processes. Every call generates new keys."""
    rings = security.generate(plan.job, {process.name: plan.callers.get(process.name) for process in plan.processes})
    return {
        host: {
            process.env["GEOMX_KEY_FILE"]: File(rings[process.name])
            for process in plan.on_host(host)
            if "GEOMX_KEY_FILE" in process.env
        }
        for host in plan.hosts
    }


@dataclass(frozen=True)
class LaunchOptions:
    """How a job is started, as opposed to what it runs.

    detach: the lease is unlimited, and launch returns once all processes run.
    lease: seconds that the job continues without this machine, at least 2; None: the option `silence`, as for every
        other process of the job; with `--party-loss out` the option `absence` for the hosts of parties.
    sync: paths copied to hosts behind SSH in addition to the script.
    warned: warnings already shown, which are not repeated when processes write them.
    view: in place of the table, or of lines where there is no terminal.
    tee: show the output of the worker of global rank 0.
    resume: the job from whose newest checkpoint this one goes on; a StoredJob's are fetched first.
    renumbered: whether this job has other numbers, so that it goes on from the model which the other one has saved.
    """

    detach: bool = False
    lease: float | None = None
    sync: tuple[Path, ...] = ()
    warned: tuple[str, ...] = ()
    ssh: SshOptions = field(default_factory=SshOptions)
    observer: Observer | None = None
    view: View | None = None
    tee: bool = False
    resume: KnownJob | StoredJob | None = None
    renumbered: bool = False


def launch(inventory: Inventory, spec: JobSpec, options: LaunchOptions) -> Conclusion:
    """Run the job `spec` on the machines of `inventory` until the training is done or detached. Call it from the main
    thread.

    The returned conclusion carries TrainingFailed, Interrupted (Ctrl-C, SIGTERM or SIGHUP), or DoneInPart if servers
    did not end after the training or cleanup was incomplete. Progress and messages go to stderr. In every case no
    process, key file or socket of the job is left on a reachable host, unless the job was detached; logs and event logs
    remain. A signal that comes after the job's end does not keep the end from being recorded. Raises InvalidSettings,
    CheckFailed, HostUnreachable and TimedOut before the start, and Interrupted if the job was released.
    """
    with interrupts_raised(), ExitStack() as handlers:  # before the directory is claimed: who sees that may stop it
        return _launch(inventory, spec, options, handlers)


def _launch(inventory: Inventory, spec: JobSpec, options: LaunchOptions, handlers: ExitStack) -> Conclusion:
    """As `launch`. From when agents start, signals are handled by what is put on `handlers`, to the very end."""
    began = time.monotonic()
    view = options.view or view_for()
    observer, outcome = options.observer, None
    try:
        start, checkpoints = _left_behind(options, spec, view)
        before = None if options.renumbered else options.resume  # whose checkpoint this job goes on from
        with view.waiting("reading the script and the files of --sync"):
            spec, packed = prepared(replace(spec, starts=bool(start)), options.sync)
        directory = JobDirectory(spec.job, Path(spec.job_dir))
        _check_continuation(plan(choose(inventory, None), spec), before)  # raises errors for which no host is needed
        with directory.claimed(), ExitStack() as stack:
            with view.waiting("waiting for machines" if inventory.requests else "preparing the hosts") as set_status:
                allocating = allocated(inventory, spec.job, spec, options.ssh, spec.python, view.warn, set_status)
                allocation = stack.enter_context(allocating)
            inventory = allocation.inventory
            connectors = {host.name: hosts.connector(host, spec.python, options.ssh) for host in inventory.hosts}
            reached = stack.enter_context(hosts.closing(connectors))
            until_listening = stack.enter_context(ExitStack())  # keeps the ports from others meanwhile
            inventory = _checked(reached, inventory, spec, view, until_listening)
            planned = plan(inventory, spec)
            progress = Progress.of(planned, began)
            if observer is not None:
                stack.callback(lambda: observer.close(outcome.status if outcome is not None else ""))
                with view.waiting("starting the exports"):
                    observer.open(progress, planned.spec.options)
            with view.waiting("looking for the data set") as set_status:
                provide(planned, inventory, reached, view.note, _progress(view.note, set_status))
            directory.write_plan(planned, inventory)
            directory.write_start(start)
            if isinstance(before, StoredJob):
                checkpoints = _fetched(before, planned, reached, view)
            _announce(planned, view, tee=options.tee)
            dirs = working_dirs(inventory, planned)
            leases = _leases(planned, options.lease, detach=options.detach)
            pool = AgentPool(reached, host_specs(planned, inventory, dirs, leases, checkpoints), view.warn)
            tee = _tee(view, directory, planned, stack) if options.tee else None
            watch = Watch(
                planned, pool, progress, view, observer=observer, on_listening=until_listening.close,
                on_turn=tee.print_new if tee is not None else lambda: None, warned=options.warned,
            )
            handlers.enter_context(interrupts_to(pool.inbox, pool.interrupt))
            outcome = _carry_out(watch, pool, _files(planned, inventory, packed, start), view, detach=options.detach)
            allocation.kept = outcome is None or bool(outcome.left)
    finally:
        view.close()
    if outcome is None:
        job_state.detach(directory.path)
        return Conclusion(detached(planned))
    if outcome.left:
        raise Interrupted(outcome.left, f"geomx status {spec.job} shows how it goes")
    outcome.problems += allocation.problems
    end = record_conclusion(planned, outcome, progress.totals(), time.monotonic() - began)
    return end.with_late_interrupt(pool.interrupted, spec.job)


def _left_behind(
    options: LaunchOptions, spec: JobSpec, view: View
) -> tuple[dict[str, bytes], Mapping[str, str]]:
    """Return the files that the workers begin from, and the newest checkpoint by host, as the job before has left them
    here. Other numbers need no checkpoint.
    """
    before = options.resume
    if not isinstance(before, KnownJob):
        return {}, {}
    if options.renumbered:
        return collect(before, spec.options, view), {}
    return inherited(before), _newest(before, view)


def _check_continuation(planned: Plan, before: KnownJob | StoredJob | None) -> None:
    """Raise InvalidSettings if processes do not fit the checkpoint, or this machine, if it is all, lacks a package for
    --checkpoint-to, or its checkpoints would lack what the workers begin from.
    """
    if isinstance(before, StoredJob):
        before.check(planned)
    if planned.spec.starts and planned.spec.options["checkpoint_to"]:
        what = "--checkpoint-to in a job with other numbers than the job that it goes on from"
        raise UsageError(what, "leave it out: checkpoints stay on the hosts, and geomx stop saves the model")
    if (place := str(planned.spec.options["checkpoint_to"])) and set(planned.hosts) <= set(planned.here):
        Store(place)


def _fetched(before: StoredJob, planned: Plan, reached: Mapping[str, Connector], view: View) -> dict[str, str]:
    """Return the newest checkpoint of a stored job, which all hosts have fetched, by host."""
    with view.waiting(f"fetching the newest checkpoint of job {before.id} to {counted(len(planned.hosts), 'host')}"):
        number, folders = fetch_checkpoint(before, planned, reached, view.note)
    _note_checkpoint(before, number, view)
    return folders


def _newest(before: KnownJob, view: View) -> dict[str, str]:
    """Return the newest checkpoint of the job from which this one goes on, by host."""
    with view.waiting(f"looking for the newest checkpoint of job {before.id}"):
        number, folders = newest_checkpoint(before, view.note)
    _note_checkpoint(before, number, view)
    return folders


def _note_checkpoint(before: KnownJob | StoredJob, number: int, view: View) -> None:
    taken = time.strftime("%d %b %H:%M:%S", time.localtime(number))
    view.note(f"going on from the checkpoint of {taken} of job {before.id}")


def _announce(planned: Plan, view: View, *, tee: bool) -> None:
    count = f"{counted(len(planned.processes), 'process')} on {planned.where} ({', '.join(planned.hosts)})"
    view.note(f"job {planned.job}: {count}; {log_paths(planned)}")
    if planned.topology_reason:
        view.note(topology_line(planned))
    if planned.network:
        view.note(planned.network)
    if planned.spec.script and not tee:
        view.note(f"what the script prints: geomx logs {planned.job} -f")


def _progress(note: Callable[[str], None], set_status: Callable[[str], None]) -> "OnDownload":
    """Return what shows the progress of a transfer as a status, and notes messages without a total."""

    def on_progress(what: str, done: int, total: int) -> None:
        set_status(f"{what}: {done / total:.0%}" if total else what)
        if not total:
            note(what)

    return on_progress


def _tee(view: View, directory: JobDirectory, planned: Plan, stack: ExitStack) -> Tee:
    job = KnownJob.at(directory.path)
    assert job is not None  # its plan has been written
    tee = Tee(view, job, rank_zero(planned))
    stack.callback(tee.finish)
    return tee


def prepared(spec: JobSpec, sync: Sequence[Path]) -> tuple[JobSpec, UserFiles]:
    """Return `spec` with an id, paths, the Python path of geomx on this machine, and what hosts get of the script and
    `sync`; and those files. Raises as user_files.pack, and InvalidSettings for a --checkpoint-to that cannot be.
    """
    if place := str(spec.options.get("checkpoint_to", "")):
        spec = replace(spec, options={**spec.options, "checkpoint_to": normal_place(place)})
    packed = user_files.pack(spec.script, sync)
    path = spec.env.get("PYTHONPATH") or python_path()
    env = {**spec.env, "PYTHONPATH": path} if path else spec.env
    spec = replace(spec, env=env, carried=packed.words, script_digest=packed.digest)
    return complete(spec), packed


def _checked(
    reached: Mapping[str, Connector], inventory: Inventory, spec: JobSpec, view: View, holding: ExitStack
) -> Inventory:
    """Return the resolved inventory, whose ports stay reserved until `holding` is closed. Raises HostUnreachable or
    CheckFailed if the job cannot start.
    """
    began = time.monotonic()
    with view.waiting(f"connecting to {counted(len(reached), 'host')}") as set_status:
        report = preflight.examine(reached, inventory, spec, full=False, say=set_status, holding=holding)
    for check in report.checks:
        if check.level == "warning":
            view.warn(f"warning: {check.text} ({check.fix})")
    preflight.refuse(report.checks)
    took = format_duration(time.monotonic() - began)
    view.note(f"{counted(len(report.checks), 'check')} of {counted(len(reached), 'host')} in {took}")
    return report.inventory


def _carry_out(
    watch: Watch, pool: AgentPool, files: Mapping[str, Mapping[str, File]], view: View, *, detach: bool
) -> Outcome | None:
    """Run the job and return its outcome; None if it was detached."""
    outcome: Outcome | None = None
    try:
        began = time.monotonic()
        size = format_bytes(sum(len(file.data) for each in files.values() for file in each.values()))
        with view.waiting(f"copying files ({size}) to {counted(len(files), 'host')} and starting agents"):
            pool.start(files)
        view.note(f"agents ready after {format_duration(time.monotonic() - began)}")
        with suspends_to(pool.inbox):
            outcome = watch.run_until_started() if detach else watch.run()
        if outcome is None or outcome.left:
            pool.leave()
    finally:
        problems = pool.close()
    if outcome is not None:
        outcome.problems += problems
    return outcome


def _files(
    planned: Plan, inventory: Inventory, packed: UserFiles, start: Mapping[str, bytes]
) -> dict[str, dict[str, File]]:
    """Return each host's files by path: its processes' keys and, on hosts that do not share our files, the user's; what
    the workers begin from, where it is not yet; and on the first, which makes checkpoints in a store whole, the job's
    description.
    """
    keys = key_files(planned)
    files = {
        name: keys[name] | ({} if inventory.host(name).shares_files else packed.on(planned.files_dir(name)))
        for name in planned.hosts
    }
    for name in dict.fromkeys(process.host for process in planned.processes if process.role == "worker"):
        folder = f"{planned.job_dirs[name]}/{START_FOLDER}"
        if not (inventory.host(name).shares_files and planned.job_dirs[name] == planned.spec.job_dir):
            files[name] |= {f"{folder}/{file}": File(content) for file, content in start.items()}
    if planned.spec.options["checkpoint_to"]:
        first = planned.hosts[0]
        place = f"{planned.job_dirs[first]}/hosts/{first}/{DESCRIPTION}"
        files[first] = {**files[first], place: File(description(planned, inventory))}
    return files


def working_dirs(inventory: Inventory, planned: Plan) -> dict[str, str]:
    """Return each host's working directory: the inventory's; otherwise the current directory, or, on hosts that do not
    share our files, the directory of the copied user files.
    """
    hosts = {name: inventory.host(name) for name in planned.hosts}
    return {
        name: host.workdir or (str(Path.cwd()) if host.shares_files else planned.files_dir(name))
        for name, host in hosts.items()
    }
