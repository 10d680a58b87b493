"""Renders a plan as a single readable shell script, to be copied to every machine and run there by hand."""

import shlex
from collections.abc import Iterator, Mapping

from geomx_cli.core.units import counted
from geomx_cli.inventory import Host, Inventory
from geomx_cli.plan import Plan, Process

__all__ = ["for_shell", "plan_shell"]

_STATE, _PACKAGE = "@STATE@", "@PACKAGE@"
_EXPANSIONS = {_STATE: '"${XDG_STATE_HOME:-$HOME/.local/state}"', _PACKAGE: '"$package"'}
"""What stands in a plan for a path that each machine knows of itself, and how a shell there finds it."""

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


def for_shell(inventory: Inventory) -> Inventory:
    """Return the inventory without paths of this machine for other ones, whose own are known only there."""

    def own(host: Host) -> Host:
        if host.shares_files:
            return host
        known = {"python": host.python or "python3", "state_dir": host.state_dir or f"{_STATE}/geomx"}
        return host.model_copy(update={**known, "package": host.package or _PACKAGE, "sockets": "/tmp/gx"})

    return inventory.with_hosts(map(own, inventory.hosts))


def plan_shell(plan: Plan, working_dirs: Mapping[str, str]) -> str:
    """Return the script; `working_dirs`: working directory of each host's processes. `plan` has no key files, and is
    of an inventory `for_shell`.
    """
    return "\n".join(_lines(plan, working_dirs))


def _lines(plan: Plan, working_dirs: Mapping[str, str]) -> Iterator[str]:
    yield _HEAD
    yield f"# job {plan.job}: {len(plan.processes)} processes on {counted(len(plan.hosts), 'host')}"
    yield "set -u\nprocesses="
    yield "trap 'kill $processes 2>/dev/null' INT TERM"
    yield 'case "${1:-}" in'
    for host in plan.hosts:
        yield f"{host})"
        own = plan.on_host(host)
        if any(_PACKAGE in value for process in own for value in process.env.values()):
            find = "import geomx_cli; print(geomx_cli.__path__[0])"
            yield f"  package=$({_word(own[0].argv[0])} -P -c {shlex.quote(find)}) || exit 5"
        logs = _word(f"{plan.job_dirs[host]}/logs")
        yield f"  mkdir -p {logs} && mkdir -p -m 700 {_word(plan.socket_dirs[host])} || exit 5"
        if working_dirs[host].startswith(plan.job_dirs[host] + "/"):
            what = f", and {', '.join(plan.spec.carried)} before the start" if plan.spec.carried else ""
            yield f"  # what the processes write goes here{what}"
            yield f"  mkdir -p {_word(working_dirs[host])} || exit 5"
        yield f"  cd {_word(working_dirs[host])} || exit 5"
        for process in own:
            yield from _start(process, plan.job_dirs[host])
        yield "  ;;"
    yield _TAIL.format(hosts=" ".join(plan.hosts))


def _start(process: Process, job_dir: str) -> Iterator[str]:
    yield f"  # {process.name}"
    if output := process.env.get("GEOMX_OUTPUT_DIR"):
        yield f"  mkdir -p {shlex.quote(output)} || exit 5"
    yield "  env \\"
    for name, value in {**process.env, "GEOMX_INSECURE": "1"}.items():
        yield f"    {name}={_word(value)} \\"
    command = " ".join(map(_word, process.argv))
    yield f"    {command} >{_word(f'{job_dir}/logs/{process.file_name}.log')} 2>&1 &"
    yield '  processes="$processes $!"'


def _word(text: str) -> str:
    """Quote a word, except for the home before "~/" and the paths in _EXPANSIONS."""
    if text.startswith("~/"):
        return f'"$HOME"/{_word(text[2:])}'
    for token, expansion in _EXPANSIONS.items():
        if token in text:
            return expansion.join(_word(part) if part else "" for part in text.split(token))
    return shlex.quote(text)
