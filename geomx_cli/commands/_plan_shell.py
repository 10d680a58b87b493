"""Renders a plan as a single readable shell script, to be copied to every machine and run there by hand."""

import shlex
from collections.abc import Iterator, Mapping

from geomx_cli.core.units import counted
from geomx_cli.plan import Plan, Process

__all__ = ["plan_shell"]

_HEAD = """\
#!/bin/sh
# Starts the processes of one host of this job and waits for them:   sh start.sh HOST
# Copy it to every machine and start all hosts within a minute of each other; Ctrl-C ends what it has started.
# The links between hosts have no keys (GEOMX_INSECURE=1): use it only in a network that you trust."""

_TAIL = """\
*)
  echo "usage: sh start.sh HOST, one of: {hosts}" >&2
  exit 2
  ;;
esac
status=0
for process in $processes; do wait "$process" || status=$?; done
exit $status"""


def plan_shell(plan: Plan, working_dirs: Mapping[str, str]) -> str:
    """Return the script; `working_dirs`: working directory of each host's processes. `plan` has no key files."""
    return "\n".join(_lines(plan, working_dirs))


def _lines(plan: Plan, working_dirs: Mapping[str, str]) -> Iterator[str]:
    yield _HEAD
    yield f"# job {plan.job}: {len(plan.processes)} processes on {counted(len(plan.hosts), 'host')}"
    yield "set -u\nprocesses="
    yield "trap 'kill $processes 2>/dev/null' INT TERM"
    yield 'case "${1:-}" in'
    for host in plan.hosts:
        logs = shlex.quote(f"{plan.job_dirs[host]}/logs")
        yield f"{host})"
        yield f"  mkdir -p {logs} && mkdir -p -m 700 {shlex.quote(plan.socket_dirs[host])} || exit 5"
        if working_dirs[host].startswith(plan.job_dirs[host] + "/"):
            what = f", and {', '.join(plan.spec.carried)} before the start" if plan.spec.carried else ""
            yield f"  # what the processes write goes here{what}"
            yield f"  mkdir -p {shlex.quote(working_dirs[host])} || exit 5"
        yield f"  cd {shlex.quote(working_dirs[host])} || exit 5"
        for process in plan.on_host(host):
            yield from _start(process, plan.job_dirs[host])
        yield "  ;;"
    yield _TAIL.format(hosts=" ".join(plan.hosts))


def _start(process: Process, job_dir: str) -> Iterator[str]:
    yield f"  # {process.name}"
    yield "  env \\"
    for name, value in {**process.env, "GEOMX_INSECURE": "1"}.items():
        yield f"    {name}={shlex.quote(value)} \\"
    log = shlex.quote(f"{job_dir}/logs/{process.file_name}.log")
    program, *arguments = process.argv
    home = '"$HOME"/' if program.startswith("~/") else ""
    command = " ".join([home + shlex.quote(program.removeprefix("~/")), *map(shlex.quote, arguments)])
    yield f"    {command} >{log} 2>&1 &"
    yield '  processes="$processes $!"'
