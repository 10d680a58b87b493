"""Failure messages for users: process, host, cause, end of the log, and hint."""

import importlib.util
import re
import sysconfig
from pathlib import Path
from typing import Any

from geomx_cli.core.errors import TrainingFailed
from geomx_cli.core.root_cause import Failure
from geomx_cli.jobs.view.outputs import host_suffix, is_here
from geomx_cli.plan import Plan

__all__ = ["explain", "failure_fields"]

_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '(?P<name>\w+(\.\w+)*)'")
_NO_FILE = re.compile(r"FileNotFoundError: \[Errno 2\] No such file or directory: '(?P<path>[^']+)'")
_LOCAL_RANK = re.compile(r"required: .*--local[_-]rank")
_MOST = 8  # names of processes in a message


def explain(failure: Failure, plan: Plan) -> TrainingFailed:
    """Return the error with its message and hint."""
    there, job_dir = host_suffix(failure.host, plan), plan.job_dirs[failure.host]
    if not failure.process:
        agent_log = f"{job_dir}/hosts/{failure.host}/agent.log"
        who = f"host {failure.host}" if failure.fault == "host" else f"the agent on host {failure.host}"
        message = f"{who} {failure.cause}\n  the agent's log is {agent_log}{there}"
        return TrainingFailed(message, failure.hint)
    process = plan.process(failure.process)
    who = f"{process.name} ({process.role.replace('_', ' ')} {process.rank} of party {process.party}"
    first = "" if failure.fault == "link" else "failed first: it "
    message = f"{who}, on host {failure.host}) {first}{failure.cause}"
    if failure.also:
        message += f"; so did {', '.join(failure.also[:_MOST])}"
        message += f" and {len(failure.also) - _MOST} more" if len(failure.also) > _MOST else ""
    log = f"{job_dir}/logs/{process.file_name}.log{there}"
    if tail := _news(failure):
        message += f"\n  the end of its log, {log}:\n" + "\n".join(f"    {line}" for line in tail)
    else:
        message += f"\n  its log is {log}"
    missing = _missing_module(failure, process.argv[0], plan) or _missing_file(failure, plan)
    return TrainingFailed(message, missing or failure.hint or _usual(failure))


def _missing_module(failure: Failure, python: str, plan: Plan) -> str:
    """The hint for an import of a module that the host does not have; "" for other failures."""
    found = _NO_MODULE.search(failure.cause)
    if found is None:
        return ""
    name = found["name"].partition(".")[0]
    others = sorted({plan.process(other).host for other in failure.also} - {failure.host})
    more = f" and {len(others) + 1 - _MOST} more" if len(others) >= _MOST else ""
    where = f"hosts {', '.join([failure.host, *others][:_MOST])}{more}" if others else f"host {failure.host}"
    install = f"install {name} on {where}"
    if "python" in Path(python).name:  # not of a launcher, as env or bash
        install += f" ({python} -m pip install {name})"
    if is_here(plan):
        return install
    if own := _own_source(name):
        return f"send it to the hosts: --sync {own}"
    return f"{install}, or if it is your own, send it: --sync {name}.py"


def _own_source(name: str) -> str:
    """The user's module `name` on this machine, here or as pip install -e has left it; "" for others."""
    if here := next((path for path in (name, f"{name}.py") if Path(path).exists()), ""):
        return here
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return ""
    if found is None or not found.has_location or found.origin is None:
        return ""
    path = Path(found.origin).parent if found.submodule_search_locations else Path(found.origin)
    installed = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return "" if any(path.is_relative_to(folder) for folder in installed) else str(path)


def _missing_file(failure: Failure, plan: Plan) -> str:
    """The hint for a file that the script has not found on its host, but is on this machine; "" for other failures."""
    found = _NO_FILE.search(failure.cause)
    if found is None or is_here(plan) or not Path(found["path"]).exists():
        return ""
    path = Path(found["path"])
    if path.is_absolute() or ".." in path.parts:
        return f"{path} is on this machine only: put it on the hosts"
    return f"{path} is on this machine only: send it to the hosts with --sync {path}, or put it there"


def _news(failure: Failure) -> list[str]:
    """The end of the log, if it adds to the cause and the hint."""
    known = (failure.cause, failure.hint)
    lines = [line.strip().removeprefix("error: ") for line in failure.tail]
    if all(any(line in text for text in known) for line in lines):
        return []
    return [line for line in failure.tail if not _repeats(line, failure)]


def _repeats(line: str, failure: Failure) -> bool:
    """Whether the line is geomx's own error, in which its traceback ends: message and hint are shown already."""
    return bool(failure.message and failure.hint) and line.endswith(f": {failure.message} ({failure.hint})")


def _usual(failure: Failure) -> str:
    """The default hint, for failures without a specific one."""
    if failure.ending == "out of memory" or "out of memory" in failure.message:  # as CUDA's
        return "put fewer workers on that host, or make batches smaller"
    if any(_LOCAL_RANK.search(line) for line in failure.tail):
        how = "write it behind the script's name, as --local_rank {local_rank}"
        return f"it awaits --local_rank, which torch.distributed.launch used to give: {how}, or read LOCAL_RANK instead"
    if failure.ending == "killed":
        return "find out who killed it (a user, or the system: dmesg) and launch again"
    if failure.ending == "unstarted":
        return "see that it is there on that host and may be executed, and launch again"
    if failure.ending in ("exited", "reported") and not failure.tail:
        return "its log is empty: run it by itself to see why it ends"
    return "correct what the log shows and launch again"


def failure_fields(failure: Failure) -> dict[str, Any]:
    """The failure's fields for JSON output."""
    fields = {name: getattr(failure, name) for name in ("process", "host", "cause", "hint")}
    return {**fields, "tail": list(failure.tail)}
