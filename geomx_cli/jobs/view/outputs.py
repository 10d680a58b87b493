"""What a job's processes have saved, and where it is."""

from collections.abc import Iterable, Mapping
from typing import Any

from geomx_cli.core.units import counted, format_bytes
from geomx_cli.core.untrusted import plain
from geomx_cli.jobs.view.reducer import ProcessState
from geomx_cli.plan import Plan

__all__ = ["host_suffix", "is_here", "log_paths", "model_of", "on_hosts", "outputs_of", "summary_line"]

# Descriptions of where a job's files are.


def host_suffix(host: str, plan: Plan) -> str:
    """Suffix for a path on `host`, if that is another machine; equal paths may be different files there."""
    return "" if host in plan.sharing else f" on host {host}"


def log_paths(plan: Plan) -> str:
    """Describe where the job's logs are."""
    return f"logs are in {plan.spec.job_dir}/logs" if is_here(plan) else f"logs lie {on_hosts(plan.job)}"


def is_here(plan: Plan) -> bool:
    """Whether all of the job's files are on this machine."""
    return all(host in plan.sharing and path == plan.spec.job_dir for host, path in plan.job_dirs.items())


def on_hosts(job: str) -> str:
    """How to access logs on other machines."""
    return f"on the hosts: geomx logs {job}, or geomx logs collect {job} --to DIR"


def outputs_of(rows: Iterable[ProcessState]) -> list[dict[str, Any]]:
    """Return what each process has saved: at most eight files by name, and the number and bytes of all."""
    return [
        {
            "process": row.process.name,
            "host": row.process.host,
            "folder": row.process.env["GEOMX_OUTPUT_DIR"],
            "files": {plain(name).replace("\n", ""): size for name, size in row.outputs.files.items()},
            "count": row.outputs.count,
            "bytes": row.outputs.bytes,
        }
        for row in rows
        if row.outputs is not None and "GEOMX_OUTPUT_DIR" in row.process.env
    ]


def model_of(outputs: Iterable[Mapping[str, Any]], plan: Plan) -> str | None:
    """Return the place of the model, the first file called model.*, as PATH on this machine, else as HOST:PATH."""
    for saved in outputs:
        for name in saved["files"]:
            if name.startswith("model.") and "/" not in name:
                return _place(f"{saved['folder']}/{name}", saved["host"], plan)
    return None


def summary_line(result: Mapping[str, Any]) -> tuple[str, str]:
    """Return the line of a summary about the job's outputs; ("", "") without any.

    result: see result.py; or the totals of a job, with "model".
    """
    outputs, model = result["outputs"], result["model"]
    if model:
        return "model", model
    if not outputs:
        return "", ""
    files, size = sum(one["count"] for one in outputs), sum(one["bytes"] for one in outputs)
    return "outputs", f"{counted(files, 'file')}, {format_bytes(size)}: geomx fetch {result['job']}"


def _place(path: str, host: str, plan: Plan) -> str:
    return path if host in plan.sharing else f"{host}:{path}"
