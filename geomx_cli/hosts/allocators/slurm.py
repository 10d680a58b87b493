"""Slurm: a job of geomx's own for each request, by sbatch, or the one in which geomx was launched.

sbatch returns at once, so nothing waits on the login node. Its script starts the long step of agent/job_step.py on all
nodes, and ends with it. The job's name has the id of geomx's job: any process that knows that can release the nodes.
"""

import os
import re
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING

from geomx_cli.core.errors import CheckFailed, InvalidSettings, UsageError
from geomx_cli.core.option import Option
from geomx_cli.core.plugins import Spec
from geomx_cli.core.units import format_duration
from geomx_cli.hosts.interface import Connector

if TYPE_CHECKING:  # every process reads the options of all plug-ins
    from geomx_cli.hosts.allocation import Present, Waiting
    from geomx_cli.hosts.slurm import SlurmJob
    from geomx_cli.inventory import Host, Request

__all__ = ["ask", "given", "name", "options", "present", "refuses", "release", "shares_files"]

name = "slurm"
options: tuple[Option, ...] = ()
shares_files = True

_NOTICE = 30.0  # seconds from the end of --grace to the time limit
_STARTS = 60.0  # seconds
_STARTED = 120.0  # seconds for all nodes of a job, after which one is taken to be broken
_ENDS = 10.0  # seconds for Slurm to say how a job ends
_PAUSE = 0.5
_LOG = ".local/state/geomx/slurm"
_SUBMIT = '(umask 077; mkdir -p "$HOME/${0%/*}") && exec sbatch --parsable --output="$HOME/$0-%j.log" "$@"'
_TAIL = 'tail -n 3 "$HOME/$0-$1.log"'
_DETACH = """\
(umask 077; mkdir -p "$HOME/${0%/*}"); log="$HOME/$0-$1.log"; shift
setsid sh -c '"$@" >"$0" 2>&1 && rm -f "$0"' "$log" "$@" </dev/null >/dev/null 2>&1 &"""
_REMOVE = 'rm -f "$HOME/$0-$1.log"'
_ON_ALL = ["--ntasks-per-node=1", "--wait=0", "--kill-on-bad-exit=0", "--input=none"]
_SCRIPT = """\
#!/bin/sh
# The allocation ends with what geomx runs on its nodes. SIGUSR1 comes before the time limit, and goes to the agents.
log="$HOME/{log}-$SLURM_JOB_ID.log"
trap {notify} USR1
trap 'rm -f "$log"' TERM
job=$SLURM_JOB_ID nodes=$SLURM_JOB_NUM_NODES
{clean}
srun --jobid="$job" --nodes="$nodes" --ntasks="$nodes" {on_all} {step} &
step=$!
wait $step; status=$?
while kill -0 $step 2>/dev/null; do wait $step; status=$?; done
[ $status -ne 0 ] || rm -f "$log"
exit $status
"""
_SAME_PYTHON = "see that all nodes have the Python that runs geomx here, under the same path"
_ENDINGS: Mapping[str, str] = {
    "BOOT_FAIL": "has lost a node, which did not boot", "CANCELLED": "was cancelled",
    "DEADLINE": "has reached its deadline", "FAILED": "has failed", "NODE_FAIL": "has lost a node",
    "OUT_OF_MEMORY": "has run out of memory", "PREEMPTED": "was preempted", "TIMEOUT": "has reached its time limit",
}  # fmt: skip
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def refuses(spec: Spec) -> str | None:
    """See Plugin.refuses."""
    return None


def ask(request: "Request", hosts: "Sequence[Host]", job: str, spec: Spec, login: Connector) -> None:
    """See Allocator.ask."""
    from geomx_cli.hosts.slurm import IDLE, PLAIN, long_step, slurm

    if request.job:
        nodes = dict.fromkeys(host.access.address for host in hosts)
        size = [f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}"]
        gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
        if os.environ.get("SLURM_GPUS_PER_TASK") and gpus.isdecimal():  # the step has one task on each node
            size.append(f"--gpus-per-node={gpus}")
        step = long_step(login.python, request.container, _name(request, job), IDLE)
        srun = ["srun", f"--jobid={request.job}", "--overlap", f"--job-name={_name(request, job)}"]
        slurm(login, "sh", "-c", _DETACH, _LOG, f"{request.job}-{job}", *srun, *size, *_ON_ALL, *PLAIN, *step)
        return
    notice = float(spec.options["grace"]) + _NOTICE
    if 0 < request.time <= notice:
        what = f"{request.name} has a time limit of {format_duration(request.time)}, and is asked to stop before it"
        raise InvalidSettings(what, f"write a time above --grace and {_NOTICE:g} s, that is {format_duration(notice)}")
    cpus = max(len(host.devices) * host.threads for host in hosts)
    words = [f"--job-name={_name(request, job)}", f"--nodes={len(hosts)}", "--ntasks-per-node=1", "--no-requeue"]
    words += [f"--cpus-per-task={max(cpus, 1)}", f"--signal=B:USR1@{ceil(notice)}"]
    time_limit = str(ceil(request.time / 60)) if request.time else ""  # in minutes
    asked = {
        "partition": request.partition, "account": request.account, "constraint": request.constraint,
        "gres": request.gres, "time": time_limit,
    }  # fmt: skip
    words += [f"--{key}={value}" for key, value in asked.items() if value]
    slurm(login, "sh", "-c", _SUBMIT, _LOG, *words, *request.arguments, data=_script(request, job, login).encode())


def given(request: "Request", hosts: "Sequence[Host]", job: str, login: Connector) -> "Sequence[Host] | Waiting":
    """See Allocator.given. Each call lets the long steps run on, which end if nobody uses them."""
    from msgspec import structs

    from geomx_cli.core.untrusted import last_line
    from geomx_cli.hosts.allocation import Waiting
    from geomx_cli.hosts.slurm import addresses, in_step, own_errors
    from geomx_cli.inventory import Slurm

    found = _find(request, job, login)
    if found is None or not (found.waits or found.has_nodes):
        raise CheckFailed(*_ended(request, found, login))
    if found.waits:
        reason = f" ({found.reason})" if found.reason != "None" else ""
        return Waiting(f"in the queue of Slurm{reason}", _place(found, login))
    known = addresses(login, found.nodes)
    nodes = [host.access.address for host in hosts] if request.job else [*known]
    used = dict.fromkeys(nodes)
    step = _name(request, job)
    there = login.run(in_step(login.python, request.container, found.id, step, used, "true"), limit=_STARTS)
    if there.status:
        errors = own_errors(there.errors) or there.errors
        said = last_line(errors.decode(errors="replace"), f"srun ended with status {there.status}")
        if request.job:  # the others end if their nodes cannot start geomx
            said = _output(login, f"{found.id}-{job}") or said
            raise CheckFailed(f"geomx does not start on the nodes of Slurm job {found.id}: {said}", _SAME_PYTHON)
        return Waiting("for geomx to start on its nodes", said, _STARTED, _SAME_PYTHON)
    if len(nodes) != len(hosts):
        what = f"Slurm job {found.id} for {request.name} has {len(nodes)} nodes in place of {len(hosts)}"
        raise CheckFailed(what, "leave the number of nodes out of sbatch")
    access = {node: Slurm(known[node], request.login, found.id, node, request.container, step) for node in used}
    return [
        structs.replace(host, access=access[node], address="" if host.interface else known[node])
        for host, node in zip(hosts, nodes, strict=True)
    ]


def release(request: "Request", job: str, login: Connector) -> str:
    """See Allocator.release."""
    from geomx_cli.hosts.slurm import slurm

    if request.job:
        steps = slurm(login, "squeue", "--steps", "--noheader", f"--jobs={request.job}", "--format=%i|%j")
        for step, _, step_name in (line.strip().partition("|") for line in steps.splitlines()):
            if step_name == _name(request, job):
                _cancel(login, step, ["squeue", f"--steps={step}"])
        login.run(["sh", "-c", _REMOVE, _LOG, f"{request.job}-{job}"], limit=_STARTS)
        return ""
    limit = time.monotonic() + _ENDS
    while (found := _find(request, job, login)) is not None and found.state == "COMPLETING":
        if time.monotonic() > limit:
            break
        time.sleep(_PAUSE)
    if found is not None and (found.waits or found.has_nodes):
        _cancel(login, str(found.id), ["squeue", f"--jobs={found.id}", "--states=PENDING,RUNNING,SUSPENDED"])
        return ""
    return _ending(request, found)


def _cancel(login: Connector, what: str, shown: Sequence[str]) -> None:
    """Cancel a job or step, unless it ends by itself meanwhile. shown: the command that lists it if it is there."""
    from geomx_cli.hosts.slurm import slurm

    try:
        slurm(login, "scancel", what)
    except CheckFailed:
        if login.run([*shown, "--noheader"], limit=_STARTS).output.strip():
            raise


def present(environment: Mapping[str, str]) -> "Present | None":
    """See Allocator.present."""
    from geomx_cli.hosts.allocation import Present
    from geomx_cli.hosts.local import LocalConnector
    from geomx_cli.hosts.slurm import slurm

    job, listed = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_NODELIST", "")
    if not job.isdecimal() or not listed or shutil.which("srun") is None:  # as in a container without Slurm
        return None
    if environment.get("SLURM_HET_SIZE"):
        what = f"Slurm job {job} is heterogeneous, and geomx sees the nodes of its first part only"
        raise UsageError(what, "write --local, or ask for nodes of one kind")
    if environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        what = f"srun has started geomx {environment['SLURM_STEP_NUM_TASKS']} times in Slurm job {job}"
        raise UsageError(what, "start it once, by srun --nodes=1 --ntasks=1, or without srun: it starts the workers")
    nodes = slurm(LocalConnector("this machine"), "scontrol", "show", "hostnames", listed).split()
    return Present(
        name, int(job), f"Slurm job {job}", listed, _devices(nodes, environment),
        threads=int(environment.get("SLURM_CPUS_PER_TASK") or 1),
    )  # fmt: skip


def _devices(nodes: Sequence[str], environment: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the devices of each node: its GPUs, otherwise a processor for each task that the user has asked for."""
    visible = [word for word in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.isdecimal()]
    gpus = visible or [str(number) for number in range(int(environment.get("SLURM_GPUS_ON_NODE") or 0))]
    if gpus:
        return dict.fromkeys(nodes, tuple(f"gpu{number}" for number in gpus))
    if "SLURM_NTASKS" not in environment:
        return dict.fromkeys(nodes, ("cpu",))
    tasks = environment.get("SLURM_TASKS_PER_NODE", "1")
    counts = [int(each[1]) for each in _TASKS.finditer(tasks) for _ in range(int(each[2] or 1))]
    return {node: ("cpu",) * (counts[index] if index < len(counts) else 1) for index, node in enumerate(nodes)}


def _script(request: "Request", job: str, login: Connector) -> str:
    from geomx_cli.hosts.slurm import IDLE, PLAIN, WITHOUT_OUTER_JOB, long_step, notify

    step = shlex.join(long_step(login.python, request.container, _name(request, job), IDLE))
    stop = shlex.quote(shlex.join(notify(login.python, request.container, _name(request, job))))
    on_all = shlex.join([*_ON_ALL, *PLAIN])
    return _SCRIPT.format(notify=stop, clean=WITHOUT_OUTER_JOB, on_all=on_all, step=step, log=_LOG)


def _name(request: "Request", job: str) -> str:
    """Return the name of what is asked of Slurm, and of the long step: several launches may share an allocation."""
    return f"geomx-{job}-{request.name}"


def _find(request: "Request", job: str, login: Connector) -> "SlurmJob | None":
    from geomx_cli.hosts.slurm import find_job

    return find_job(login, job=request.job) if request.job else find_job(login, name=_name(request, job))


def _place(found: "SlurmJob", login: Connector) -> str:
    """Return the job's place in its queue, and its expected start."""
    from geomx_cli.hosts.slurm import slurm

    queue = ["squeue", "--noheader", "--states=PENDING", f"--partition={found.partition}", "--sort=-p", "--format=%A"]
    waiting = slurm(login, *queue).split()
    place = f"place {waiting.index(str(found.id)) + 1} of {len(waiting)}" if str(found.id) in waiting else ""
    return ", ".join(filter(None, [place, f"expected start {found.start}" * bool(found.start)]))


def _ending(request: "Request", found: "SlurmJob | None") -> str:
    """Return how a job has ended that was not released, as a sentence; "" for a usual end."""
    if found is None or found.state in ("COMPLETED", "COMPLETING"):
        return ""
    return f"Slurm job {found.id} for {request.name} {_ENDINGS.get(found.state, f'is {found.state}')}"


def _ended(request: "Request", found: "SlurmJob | None", login: Connector) -> tuple[str, str]:
    """Return what has happened to a job that has ended too early, and what its output says."""
    if found is None:
        return f"Slurm has no job for {request.name} any more", "see sacct"
    said = _output(login, str(found.id))
    what = _ending(request, found) or f"Slurm job {found.id} for {request.name} has ended too early"
    return what, f"its output: {said}" if said else f"see sacct -j {found.id}"


def _output(login: Connector, log: str) -> str:
    """Return the last lines of what a batch script or long step has printed, as one line."""
    tail = login.run(["sh", "-c", _TAIL, _LOG, log], limit=_STARTS).output.decode(errors="replace")
    return "; ".join(filter(None, map(str.strip, tail.splitlines())))
