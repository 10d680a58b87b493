"""`geomx launch`: start a training job, watch it and wait for its end."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from geomx_cli.commands._command import ScriptCommand, print_json, script_argument
from geomx_cli.commands._exports import Exports, export_options
from geomx_cli.commands._inventory import inventory_options, machines, ssh_options
from geomx_cli.commands._job import Duration, job_spec, report, with_rank_scope
from geomx_cli.commands._options import add_options, doubtful, of_other_deliveries, unused, values
from geomx_cli.commands._resume import resumed
from geomx_cli.core.env_names import unknown_variables, without_effect_at_launch
from geomx_cli.core.errors import UsageError
from geomx_cli.core.plugins import table

if TYPE_CHECKING:
    from geomx_cli.inventory import Inventory
    from geomx_cli.plan import JobSpec

__all__ = ["launch"]


@add_options(table())
@click.command("launch", cls=ScriptCommand)
@inventory_options
@click.option("--dry-run", is_flag=True, help="Print what would be started, and start nothing.")
@click.option("--shell", is_flag=True, help="With --dry-run: print start scripts that a user can run by hand.")
@click.option("--json", is_flag=True, help="Print the result as one JSON object; see above.")
@click.option("--tee", is_flag=True, help="Also show the output of global rank 0, on stderr.")
@click.option("--detach", is_flag=True, help="Return when all processes run; the job continues without this command.")
@click.option(
    "--lease",
    type=Duration(2.0, 30 * 86_400.0),
    metavar="DURATION",
    help="How long the job continues without a connection to this machine, for example while it sleeps; at least 2s.  "
    "[default: --silence]",
)
@click.option(
    "--sync",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A file or folder to copy to SSH hosts along with the script; repeatable.",
)
@click.option(
    "--job-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="A new or empty directory for the job's logs and events; by default a folder in ~/.local/state/geomx/jobs.",
)
@click.option(
    "--resume",
    metavar="JOB",
    help="Start a new job, with the same script, options and machines, from the newest checkpoint of a job that has "
    "ended. JOB is its id, its directory, or the folder or URL of its --checkpoint-to. With a folder or URL, --hosts "
    "may name other machines. With other numbers (--parties, --workers, --epochs, ...), a job without a script starts "
    "from the model that JOB saved at its end, and goes on in the middle of the epoch.",
)
@export_options
@script_argument()
def launch(
    script: tuple[str, ...],
    hosts: Path | None,
    local: bool,
    accept_new_host_keys: bool,
    dry_run: bool,
    shell: bool,
    json: bool,
    tee: bool,
    detach: bool,
    lease: float | None,
    sync: tuple[Path, ...],
    job_dir: Path | None,
    resume: str | None,
    exports: Exports,
    **parameters: Any,
) -> int:
    """Start a training job, watch it and wait for its end.

    The job runs on the machines of the inventory (see geomx init). Without an inventory it runs on the nodes of the
    Slurm allocation in which it is launched. Elsewhere all parties run on this machine and exchange over loopback.
    Every worker runs the script after "--". Without a script, workers train the bundled network.

    \b
    geomx launch                                  two parties of two workers on this machine
    geomx launch -- python train.py               the same with your own script
    geomx launch --hosts sites.toml --sync data   on the machines of sites.toml
    geomx launch --detach                         start and return; later: geomx attach

    The output of scripts goes to the logs: see geomx logs -f. With --tee this command also shows the output of one
    worker. At the end it prints a summary to stdout, or with --json one object:

    \b
    schema_version, job, exit_code, directory
    status                  "done", "failed", "interrupted", "done in part"
                            or, with exit code 75, "stopped": see below
    accuracy, loss, rounds, samples_per_s, training_s, first_step_s, total_s
    bytes                   "lan" and "wan", each sent and received; "encoded" and
                            "encoded_lan", before and after encoding
    datagrams               bytes of blocks, with --dgt 1
    relayed                 bytes sent through other processes, with --tsengine
    data                    for each worker of the bundled job, once it has ended: "epoch"
                            and "batches" of its next batch, and "samples" so far
    restarts                for each process that was restarted: how often; and "all workers",
                            with --on-worker-loss restart-all
    outputs                 for each process that has saved files: "process", "host",
                            "folder", "files" (at most eight names), "count" and "bytes"
    model                   path of the model, on another machine HOST:PATH; or null
    logs                    folder of the logs; null if they are on other hosts
    problems                sentences, for example about a process that could not be ended
    failure                 "process", "host", "cause", "hint", "tail"; or null
    error                   "message" and "hint"; or null

    Ctrl-C, SIGTERM and SIGUSR1 stop the job, and a second Ctrl-C kills it. Scripts that call should_stop() save first,
    within --grace. If all workers then end with status 0, the exit code is 75, so that a batch system can start the job
    again. Otherwise it is 130.

    If the job could not be started, the object has only "schema_version" and "error", which contains "exit_code".

    With --detach the command prints how to attach to the job. With --detach --json it prints "schema_version", "job",
    "status" ("detached"), "exit_code" and "directory". With --dry-run --json it prints the whole plan.
    """
    if shell and (json or not dry_run):
        raise UsageError("--shell prints scripts in place of the text of --dry-run", "write --dry-run --shell")
    if detach and exports:
        hint = "geomx dashboard --tensorboard DIR --metrics-port NUMBER exports it afterwards"
        raise UsageError("with --detach nothing is exported: launch ends at once", hint)
    if detach and tee:
        raise UsageError("with --detach nothing can be shown: launch ends at once", "geomx logs -f shows the output")
    if tee and not script:
        _warn(["--tee shows what a script prints; the bundled job prints nothing but the progress shown here"])
    _warn(unknown_variables(os.environ))
    from geomx_cli.jobs.view.waiting import waiting

    with waiting("reading the inventory and the script"):
        before = None if resume is None else resumed(resume, script, values(table(), parameters), hosts)
        if before is None:
            inventory, options = machines(hosts, local, values(table(), parameters))
        else:
            script, inventory, options = before.script, before.inventory, before.options
    if shell and before is not None:
        raise UsageError("--shell with --resume: the scripts would begin anew", "leave one of them out")
    ignored = without_effect_at_launch(os.environ, {host.name: host.env for host in inventory.hosts})
    _warn(f"{where}{sentence}" for sentence, where in ignored.items())
    algorithm, topology = str(options["algo"]), inventory.topology
    _warn(unused(click.get_current_context(), table(), algorithm, script=bool(script), topology=topology))
    _warn(of_other_deliveries(click.get_current_context(), options))
    _warn(doubtful(options, script=bool(script)))
    if detach and options.get("checkpoint_to"):
        _warn(["with --detach checkpoints are taken only by geomx stop, and while geomx attach follows the job"])
    from geomx_cli.jobs.store import script_sources
    from geomx_cli.jobs.store.script import check_script, check_user_modules, ignored_interpreter, with_interpreter

    if not shell:  # then nothing is copied from here
        check_script(script, inventory)
    if not dry_run and not script:
        check_user_modules(options, inventory)
    if before is None:
        inventory, options = with_rank_scope(with_interpreter(script, inventory), script, options)
    script_sources.check_worker_loss(script, options, inventory)
    warning = script_sources.warning_of(script, options, inventory)
    _warn(filter(None, [ignored_interpreter(script, inventory), warning]))
    directory = str(job_dir.absolute()) if job_dir else ""
    spec = replace(job_spec(script, options, job_dir=directory), script_warning=warning)
    if dry_run:
        return _show(inventory, spec, sync, json=json, shell=shell)
    from geomx_cli.jobs.actions import launch as launching

    launch_options = launching.LaunchOptions(
        detach=detach,
        tee=tee,
        lease=lease,
        sync=sync,
        warned=tuple(ignored),
        ssh=ssh_options(accept_new_host_keys),
        observer=exports,
        resume=before.job if before is not None else None,
        renumbered=before is not None and before.renumbered,
    )
    return report(launching.launch(inventory, spec, launch_options), json=json)


def _warn(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        click.echo(f"warning: {sentence}", err=True)


def _show(inventory: "Inventory", spec: "JobSpec", sync: tuple[Path, ...], *, json: bool, shell: bool) -> int:
    from geomx_cli.commands._plan_text import for_shell, plan_shell, plan_text
    from geomx_cli.jobs.actions.launch import prepared, working_dirs
    from geomx_cli.plan import plan
    from geomx_cli.plan.ports import choose

    if shell and inventory.requests:
        raise UsageError("--shell is for hosts that name their machine", "leave it out; --dry-run shows the plan")
    inventory = choose(for_shell(inventory) if shell else inventory, None)
    spec, _ = prepared(spec, sync)
    found = plan(inventory, replace(spec, key_dir="") if shell else spec)
    if shell:
        click.echo(plan_shell(found, working_dirs(inventory, found)))
    elif json:
        print_json(found.to_json(), indent=2)
    else:
        click.echo(plan_text(found))
    return 0
