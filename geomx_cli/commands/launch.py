"""`geomx launch`: start a training job, watch it and wait for its end."""

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from geomx_cli.commands._conclusion import report
from geomx_cli.commands._exports import export_options, exporting
from geomx_cli.commands._inventory import inventory_options, inventory_path, machines, ssh_options
from geomx_cli.commands._job import Duration
from geomx_cli.commands._json import print_json
from geomx_cli.commands._options import add_options, unused, values
from geomx_cli.commands._script import ScriptCommand
from geomx_cli.core.env_names import unknown_variables, without_effect
from geomx_cli.core.errors import UsageError
from geomx_cli.core.plugins import table

if TYPE_CHECKING:
    from geomx_cli.inventory import Inventory
    from geomx_cli.plan import JobSpec

__all__ = ["launch"]

_PASSED_ON = ("PYTHONPATH", "OMP_NUM_THREADS")


@add_options(table())
@click.command("launch", cls=ScriptCommand)
@inventory_options
@click.option("--dry-run", is_flag=True, help="Print what would be started, and start nothing.")
@click.option("--shell", is_flag=True, help="With --dry-run: print start scripts that a user can run by hand.")
@click.option("--json", is_flag=True, help="Print the result as one JSON object; see above.")
@click.option("--detach", is_flag=True, help="Return once all processes run; the job runs detached.")
@click.option(
    "--lease",
    type=Duration(2.0, 30 * 86_400.0),
    metavar="DURATION",
    help="How long the job runs without this machine, as with a closed laptop; at least 2s.  "
    "[default: that of --silence]",
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
    help="A new or empty directory for the job's logs and events; by default under the jobs in your home.",
)
@export_options
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="[-- python train.py ...]")
def launch(
    script: tuple[str, ...],
    hosts: Path | None,
    local: bool,
    accept_new_host_keys: bool,
    dry_run: bool,
    shell: bool,
    json: bool,
    detach: bool,
    lease: float | None,
    sync: tuple[Path, ...],
    job_dir: Path | None,
    tensorboard: str | None,
    metrics_port: int | None,
    metrics_token: str | None,
    **parameters: Any,
) -> int:
    """Start a training job, watch it and wait for its end.

    The job runs on the machines of the inventory (see geomx init), or without one on this machine, over loopback: a
    central party and the participating ones. Every worker runs the script after "--"; without one it trains the
    bundled network.

    \b
    geomx launch                                  two parties of two workers on this machine
    geomx launch -- python train.py               the same with your own script
    geomx launch --hosts sites.toml --sync data   on the machines of sites.toml
    geomx launch --detach                         start and return; later: geomx attach

    A script's output goes to the logs: geomx logs -f. At the end a summary is printed to stdout, or with --json one
    object: "schema_version", "job", "status" ("done", "failed", "interrupted" or "done in part"), "exit_code",
    "accuracy", "loss", "rounds", "samples_per_s", "training_s", "first_step_s", "total_s", "bytes" ("lan" and "wan",
    each sent and received; "encoded" and "encoded_lan", before and after encoding with --compress and --compress-lan),
    "directory", "logs" (null when they are on other hosts), "failure" ("process", "host", "cause", "hint", "tail"; or
    null) and "error" ("message" and "hint"; or null). For a job that could not be started the object has only
    "schema_version" and "error", with "exit_code" in it.

    With --detach the command prints how to attach to the job, or with --json "schema_version", "job", "status"
    ("detached"), "exit_code" and "directory". With --dry-run --json it prints the whole plan.
    """
    if shell and (json or not dry_run):
        raise UsageError("--shell prints scripts in place of the text of --dry-run", "write --dry-run --shell")
    if detach and (tensorboard or metrics_port):
        hint = "geomx dashboard --tensorboard DIR --metrics-port NUMBER exports it afterwards"
        raise UsageError("with --detach nothing is exported: launch ends at once", hint)
    _warn(unknown_variables(os.environ))
    inventory, options = machines(hosts, local, values(table(), parameters))
    ignored = _without_effect(inventory)
    _warn(f"{where}{sentence}" for sentence, where in ignored.items())
    _warn(unused(click.get_current_context(), table(), str(options["algo"]), script=bool(script)))
    from geomx_cli.jobs.store import rank_scope
    from geomx_cli.jobs.store.script import check_script
    from geomx_cli.plan import JobSpec

    if not dry_run:
        check_script(script, inventory)
    chosen = rank_scope.choose(str(options["rank_scope"]), script, str(options["algo"]), inventory)
    if chosen.sentence:
        click.echo(chosen.sentence, err=True)
    inventory = inventory.model_copy(update={"rank_scope": chosen.scope})
    spec = JobSpec(
        options=options,
        script=script,
        job_dir=str(job_dir.absolute()) if job_dir else "",
        python=sys.executable,
        env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
    )
    if dry_run:
        return _show(inventory, spec, sync, json=json, shell=shell)
    from geomx_cli.commands.data import Progress
    from geomx_cli.jobs.actions import launch as launching

    launch_options = launching.LaunchOptions(
        on_download=Progress(),
        detach=detach,
        lease=lease,
        sync=sync,
        warned=tuple(ignored),
        ssh=ssh_options(accept_new_host_keys),
        chooses_ports=inventory_path(hosts, local=local) is not None,
        exporting=lambda progress: exporting(progress, tensorboard, metrics_port, metrics_token),
    )
    return report(launching.launch(inventory, spec, launch_options), json=json)


def _warn(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        click.echo(f"warning: {sentence}", err=True)


def _without_effect(inventory: "Inventory") -> dict[str, str]:
    """Return a sentence for each variable without effect, with the inventory location where it is set, if any."""
    hosts: dict[str, list[str]] = {}
    for host in inventory.hosts:
        for sentence in without_effect(host.env):
            hosts.setdefault(sentence, []).append(host.name)
    in_inventory = {sentence: f"env of {', '.join(names)}: " for sentence, names in hosts.items()}
    return in_inventory | dict.fromkeys(without_effect(os.environ, launching=True), "")


def _show(inventory: "Inventory", spec: "JobSpec", sync: tuple[Path, ...], *, json: bool, shell: bool) -> int:
    from geomx_cli.commands._plan_shell import plan_shell
    from geomx_cli.commands._plan_text import plan_text
    from geomx_cli.jobs.actions.launch import prepared, working_dirs
    from geomx_cli.jobs.store import payload
    from geomx_cli.plan import plan
    from geomx_cli.plan.ports import choose

    inventory = choose(inventory, None)
    spec = prepared(replace(spec, carried=payload.pack(spec.script, sync).words))
    found = plan(inventory, replace(spec, key_dir="") if shell else spec)
    if shell:
        click.echo(plan_shell(found, working_dirs(inventory, found)))
    elif json:
        print_json(found.to_json(), indent=2)
    else:
        click.echo(plan_text(found))
    return 0
