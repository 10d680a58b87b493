"""A job's requirements for each host. Pure functions, except that the script is read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from geomx_cli.core import deliveries, plugins
from geomx_cli.core.options import defaults
from geomx_cli.inventory import Host, Inventory
from geomx_cli.plan import JobSpec
from geomx_cli.plan.topology import TopologyNode, build_topology
from geomx_cli.runtime import frontends
from geomx_cli.runtime.training import networks

__all__ = ["DISTRIBUTIONS", "Requirements", "requirements"]

DISTRIBUTIONS = ("numpy", "mxnet", "torch")
"""Distributions whose versions are checked."""
# Minimum memory of a process, in bytes.
_ANY_PROCESS, _BUNDLED_WORKER = 25 << 20, 140 << 20
_EVERYWHERE = ("zmq", "msgspec", "numpy")
_IMPORT = r"^\s*(?:(?:import|from)\s+(?:geomx_cli\.)?{name}\b|from\s+geomx_cli\s+import\s.*\b{name}\b)"


@dataclass(frozen=True)
class Requirements:
    """Number of `processes` and of training workers (`training`), `memory` in bytes, and required `modules`. instead:
    another framework that has the job's bundled network, "" for none.
    """

    processes: int
    training: int
    memory: int
    modules: tuple[str, ...]
    instead: str = ""


def requirements(inventory: Inventory, spec: JobSpec) -> Mapping[str, Requirements]:
    """Return the job's requirements for each host."""
    nodes, frameworks = build_topology(inventory), _frameworks(spec)
    return {
        host.name: _required(host, [node for node in nodes if node.host.name == host.name], spec, frameworks)
        for host in inventory.hosts
    }


def _required(host: Host, nodes: list[TopologyNode], spec: JobSpec, frameworks: tuple[str, ...]) -> Requirements:
    workers = sum(node.role == "worker" for node in nodes)
    training = sum(node.global_rank is not None for node in nodes)
    bundled = 0 if spec.script else workers
    saving = () if spec.script else ("safetensors",)
    chain = deliveries.chain(defaults(plugins.table()) | dict(spec.options))
    own = [module for name in chain for module in getattr(plugins.find("delivery", name), "modules", ())]
    modules = (*_EVERYWHERE, *own, *(("psutil",) if host.interface else ()), *(frameworks if workers else ()), *saving)
    return Requirements(
        processes=len(nodes),
        training=training,
        memory=len(nodes) * _ANY_PROCESS + bundled * (_BUNDLED_WORKER - _ANY_PROCESS),
        modules=modules if nodes else (),
        instead="" if spec.script else _other(str(spec.options["network"]), frameworks),
    )


def _frameworks(spec: JobSpec) -> tuple[str, ...]:
    """Return the frameworks that workers import: those of the bundled network, or the ones found by searching the
    script's files for imports.
    """
    if not spec.script:
        framework = networks.needs(str(spec.options["network"]), str(spec.options.get("framework", "auto")))
        return (framework,) if framework else ()
    text = "\n".join(_text(Path(word)) for word in spec.script if word.endswith(".py"))
    return tuple(name for name in ("mxnet", "torch") if re.search(_IMPORT.format(name=name), text, re.MULTILINE))


def _other(network: str, frameworks: tuple[str, ...]) -> str:
    having = (each.framework for each in map(frontends.find, frontends.NAMES) if network in each.networks)
    return next((each for each in having if each and each not in frameworks), "")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""  # it exists on the hosts only
