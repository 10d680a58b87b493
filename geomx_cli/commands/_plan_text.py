"""Renders a plan as readable text."""

import shlex
from collections.abc import Iterator, Mapping

from msgspec import structs

from geomx_cli.core.units import counted
from geomx_cli.inventory import Host, Inventory
from geomx_cli.plan import Plan, Process
from geomx_cli.plan.automatic_topology import topology_line

__all__ = ["for_shell", "plan_shell", "plan_text"]

# Renders a plan as a single readable shell script, to be copied to every machine and run there by hand.

_STATE, _PACKAGE = "@STATE@", "@PACKAGE@"
_EXPANSIONS = {_STATE: '"${XDG_STATE_HOME:-$HOME/.local/state}"', _PACKAGE: '"$package"'}
"""What stands in a plan for a path that each machine knows of itself, and how a shell there finds it."""

_HEAD = """\
#!/bin/sh
# Starts the processes of one host of this job and waits for them:   sh start.sh HOST
# Copy it to every machine and start all hosts within a minute of each other; Ctrl-C ends what it has started.
# The links between hosts have no keys (GEOMX_INSECURE=1): use it only in a network that you trust."""

_START = """\
processes= names= interrupted=
start() {
  [ -z "$interrupted" ] || return
  name=$1
  shift
  env "$@" >"$logs/$name.log" 2>&1 &
  processes="$processes $!" names="$names $name"
}
# After a second: the process started last has this shell's handlers until it has begun, and would lose the signal.
trap 'interrupted=1; sleep 1; kill $processes ${!:-} 2>/dev/null' INT TERM"""

_TAIL = """\
*)
  echo "usage: sh start.sh HOST, one of: {hosts}" >&2
  exit 2
  ;;
esac
status=0
set -- $names
for process in $processes; do
  wait "$process"
  ended=$?
  if [ -z "$interrupted" ] && [ $ended -ne 0 ]; then
    status=$ended
    echo "$1 ended with exit status $ended: $logs/$1.log" >&2
  fi
  shift
done
wait
for name in $names; do rm -f "$sockets/$name.sock"; done
rmdir "$sockets" 2>/dev/null
if [ -n "$interrupted" ]; then
  echo "job $job: interrupted; its processes on this host have ended" >&2
  exit 130
fi
[ $status -ne 0 ] || echo "job $job: all its processes on this host have ended without errors" >&2
exit $status"""


def for_shell(inventory: Inventory) -> Inventory:
    """Return the inventory without paths of this machine for other ones, whose own are known only there."""

    def own(host: Host) -> Host:
        if host.shares_files:
            return host
        known = {"python": host.python or "python3", "state_dir": host.state_dir or f"{_STATE}/geomx"}
        return structs.replace(host, **known, package=host.package or _PACKAGE, sockets="/tmp/gx")

    return inventory.with_hosts(map(own, inventory.hosts))


def plan_shell(plan: Plan, working_dirs: Mapping[str, str]) -> str:
    """Return the script; `working_dirs`: working directory of each host's processes. `plan` has no key files, and is
    of an inventory `for_shell`.
    """
    return "\n".join(_lines(plan, working_dirs))


def _lines(plan: Plan, working_dirs: Mapping[str, str]) -> Iterator[str]:
    yield _HEAD
    yield f"# job {plan.job}: {len(plan.processes)} processes on {counted(len(plan.hosts), 'host')}"
    yield f"set -u\njob={shlex.quote(plan.job)}\n{_START}"
    yield 'case "${1:-}" in'
    for host in plan.hosts:
        yield f"{host})"
        own = plan.on_host(host)
        if any(_PACKAGE in value for process in own for value in process.env.values()):
            find = "import geomx_cli; print(geomx_cli.__path__[0])"
            yield f"  package=$({_word(own[0].argv[0])} -P -c {shlex.quote(find)}) || exit 5"
        yield f"  logs={_word(f'{plan.job_dirs[host]}/logs')} sockets={_word(plan.socket_dirs[host])}"
        yield '  mkdir -p "$logs" && mkdir -p -m 700 "$sockets" || exit 5'
        for output in (process.env.get("GEOMX_OUTPUT_DIR") for process in own):
            if output:
                yield f"  mkdir -p {_word(output)} || exit 5"
        if working_dirs[host].startswith(plan.job_dirs[host] + "/"):
            what = f", and {', '.join(plan.spec.carried)} before the start" if plan.spec.carried else ""
            yield f"  # what the processes write goes here{what}"
            yield f"  mkdir -p {_word(working_dirs[host])} || exit 5"
        yield f"  cd {_word(working_dirs[host])} || exit 5"
        what = "its process is" if len(own) == 1 else f"its {len(own)} processes are"
        yield f'  echo "job $job: {what} starting on {host}; logs: $logs" >&2'
        for process in own:
            yield from _start(process)
        yield "  ;;"
    yield _TAIL.format(hosts=" ".join(plan.hosts))


def _start(process: Process) -> Iterator[str]:
    yield f"  start {shlex.quote(process.file_name)} \\"
    for name, value in {**process.env, "GEOMX_INSECURE": "1"}.items():
        yield f"    {name}={_word(value)} \\"
    yield f"    {' '.join(map(_word, process.argv))}"


def _word(text: str) -> str:
    """Quote a word, except for the home before "~/" and the paths in _EXPANSIONS."""
    if text.startswith("~/"):
        return f'"$HOME"/{_word(text[2:])}'
    for token, expansion in _EXPANSIONS.items():
        if token in text:
            return expansion.join(_word(part) if part else "" for part in text.split(token))
    return shlex.quote(text)


def plan_text(plan: Plan) -> str:
    """List each host's processes, one per line, then the command, endpoints and environment of each."""
    details = (line for process in plan.processes for line in _details(process))
    return "\n".join([*_overview(plan), "", *details])


def _overview(plan: Plan) -> Iterator[str]:
    processes = counted(len(plan.processes), "process")
    yield f"job {plan.job}: {processes} on {plan.where}, {topology_line(plan)}"
    if plan.network:
        yield plan.network
    width = max(len(process.name) for process in plan.processes)
    for host in plan.hosts:
        yield f"\nhost {host}"
        for process in plan.on_host(host):
            listens = "  ".join(endpoint.bind for endpoint in process.endpoints) or "dials out only"
            yield f"  {process.name:<{width}}  {listens}"


def _details(process: Process) -> Iterator[str]:
    yield f"{process.name} on {process.host}"
    yield f"  command      {shlex.join(process.argv)}"
    for endpoint in process.endpoints:
        dialled = "" if endpoint.bind == endpoint.advertised else f", dialled as {endpoint.advertised}"
        yield f"  listens      {endpoint.bind} ({endpoint.purpose}, {endpoint.plane} plane{dialled})"
    for number, (name, value) in enumerate(process.env.items()):
        yield f"  {'' if number else 'environment':<11}  {name}={shlex.quote(value)}"
    yield ""
