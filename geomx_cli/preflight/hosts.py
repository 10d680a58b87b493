"""Checks of a host's facts against a job. Pure functions."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from geomx_cli import __version__
from geomx_cli.contract.addresses import is_loopback
from geomx_cli.contract.frontends import FRONTENDS, needs
from geomx_cli.core import deliveries, plugins
from geomx_cli.core.options import defaults
from geomx_cli.core.units import format_bytes, format_duration
from geomx_cli.inventory import Host, Inventory
from geomx_cli.plan import JobSpec, Plan
from geomx_cli.plan.topology import TopologyNode, build_topology
from geomx_cli.preflight.connect import listening
from geomx_cli.preflight.diagnose import Check
from geomx_cli.preflight.probe_pool import OLDEST_PYTHON, Facts, Skew, old_python
from geomx_cli.probe.facts import code_digest

__all__ = [
    "DISTRIBUTIONS", "Requirements", "check_clock", "check_hardware", "check_host", "check_memory",
    "check_restarts", "check_slow_start", "check_torch", "names_gpus", "requirements", "warn_of_gpus",
]  # fmt: skip

# A job's requirements for each host. Pure functions, except that the script is read.

SHARED_MEMORY = 64 * 2**20
"""Agents keep the state of processes in /dev/shm if it has at least this many free bytes (agent/state_folder.py)."""
DISTRIBUTIONS = ("numpy", "mxnet", "torch")
"""Distributions whose versions are checked."""
# Minimum memory of a process, in bytes.
_ANY_PROCESS, _BUNDLED_WORKER = 25 << 20, 140 << 20
_EVERYWHERE = ("zmq", "msgspec", "numpy")
_IMPORT = r"^\s*(?:(?:import|from)\s+(?:geomx_cli\.)?{name}\b|from\s+geomx_cli\s+import\s.*\b{name}\b)"


@dataclass(frozen=True)
class Requirements:
    """A job's requirements for one host.

    processes: number of processes.
    training: number of training workers.
    memory: in bytes.
    modules: required modules.
    instead: another framework that has the job's bundled network; "" for none.
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
    """Return the frameworks that workers import: the bundled network's, or the frameworks whose imports are in the
    script's files.
    """
    if not spec.script:
        framework = needs(str(spec.options["network"]), str(spec.options.get("framework", "auto")))
        return (framework,) if framework else ()
    text = "\n".join(_text(Path(word)) for word in spec.script if word.endswith(".py"))
    return tuple(name for name in ("mxnet", "torch") if re.search(_IMPORT.format(name=name), text, re.MULTILINE))


def _other(network: str, frameworks: tuple[str, ...]) -> str:
    having = (each.framework for each in FRONTENDS.values() if network in each.networks)
    return next((each for each in having if each and each not in frameworks), "")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""  # it exists only on the hosts


_SKEW = 2.0
_CLOCK = "geomx corrects its records for this, but not times that scripts print; use NTP there (chrony, timesyncd)"
_LITTLE_DISK, _LOW_DISK = 100e6, 1e9
_OLDEST_TORCH = (2, 4)
_EXTRAS = {"mxnet": "geomx-cli[mxnet]", "torch": "geomx-cli[torch]", "zmq": "pyzmq"}


def check_host(host: Host, facts: Facts, skew: Skew, required: Requirements) -> list[Check]:
    """Return the checks of a single host that launch requires."""
    return [
        _version(host, facts),
        _python(host, facts),
        *_modules(host, facts, required),
        check_clock(host.name, skew),
        *_folders(host, facts),
        _address(host, facts),
    ]


def check_clock(host: str, skew: Skew) -> Check:
    """Warn if a host's clock is certainly off by more than two seconds. geomx corrects the times of events. It cannot
    correct times that a script prints, times of files, or checks of other programs, e.g. of certificates.
    """
    if abs(skew.ahead) - skew.uncertainty <= _SKEW:
        return Check(host, "clock")
    way = "ahead of" if skew.ahead > 0 else "behind"
    what = f"its clock is {format_duration(abs(skew.ahead))} {way} that of this machine"
    return Check(host, "clock", "warning", what, _CLOCK)


def check_memory(facts: Mapping[str, Facts], required: Mapping[str, Requirements]) -> Iterator[Check]:
    """Check that the processes fit into each machine's memory; hosts on one machine are added up."""
    for hosts in _machines(facts):
        memory, free = sum(required[host].memory for host in hosts), min(facts[host].memory for host in hosts)
        count = sum(required[host].processes for host in hosts)
        if not free or memory <= free:
            yield Check(", ".join(hosts), "memory")
            continue
        what = f"{count} processes need at least {format_bytes(memory)} of memory, and there are {format_bytes(free)}"
        yield Check(", ".join(hosts), "memory", "problem", what, "take fewer parties, workers or servers there")


def names_gpus(host: Host) -> bool:
    """Whether the inventory gives workers of this host a GPU."""
    return any(device.startswith("gpu") for device in host.devices)


def warn_of_gpus(hosts: Iterable[Host], facts: Mapping[str, Facts]) -> Iterator[Check]:
    """Check the GPUs named in the inventory before a launch. Only warn, because geomx sees only NVIDIA's GPUs."""
    for host in hosts:
        if host.name in facts and names_gpus(host):
            found = _gpus(host, facts[host.name])
            yield found if found.level == "ok" else replace(found, level="warning")


def check_hardware(
    hosts: Iterable[Host], facts: Mapping[str, Facts], required: Mapping[str, Requirements]
) -> Iterator[Check]:
    """Check the GPUs named in the inventory, and the number of cores against the workers' threads."""
    by_name = {host.name: host for host in hosts}
    for name, known in facts.items():
        yield _gpus(by_name[name], known)
    for names in _machines(facts):
        threads = sum(required[name].training * by_name[name].threads for name in names)
        cores = min(facts[name].cores for name in names)
        if threads <= cores:
            yield Check(", ".join(names), "cores")
            continue
        what = f"the workers take {threads} cores, and there are {cores}"
        fix = "give it fewer workers (devices) or threads, or expect slow training"
        yield Check(", ".join(names), "cores", "warning", what, fix)


def check_slow_start(facts: Mapping[str, Facts], plan: Plan) -> Iterator[Check]:
    """Warn if TCP forgets between two rounds how much the links between parties can carry. Then each exchange begins
    with about 15 kB, and each doubling of that takes one more round trip. For algorithms with pauses between rounds.
    """
    if plugins.algorithms()[str(plan.spec.options["algo"])].exchanges == "gradients":
        return
    serving = dict.fromkeys(process.host for process in plan.processes if process.role in ("server", "global_server"))
    hosts = {host: facts[host] for host in serving if host in facts}
    if len({known.boot or host for host, known in hosts.items()}) < 2:
        return
    for host, known in hosts.items():
        if not known.slow_start:
            yield Check(host, "tcp")
            continue
        what = "TCP begins each exchange after a pause slowly again (net.ipv4.tcp_slow_start_after_idle is 1)"
        fix = "as root there: sysctl -w net.ipv4.tcp_slow_start_after_idle=0, and in /etc/sysctl.d for good"
        yield Check(host, "tcp", "warning", what, fix)


def check_restarts(facts: Mapping[str, Facts], plan: Plan) -> Iterator[Check]:
    """Warn if killed processes keep their state on a disk, because each round waits for their commits."""
    if not int(plan.spec.options["restarts"]):
        return
    for host in plan.hosts:
        known = facts.get(host)
        if known is None:
            continue
        if known.shared_memory >= SHARED_MEMORY:
            yield Check(host, "restarts")
            continue
        has = f"has only {format_bytes(known.shared_memory)} free" if known.shared_memory else "is not in memory"
        what = f"/dev/shm {has}: what processes save for --restarts goes to the job's disk, and slows rounds down"
        fix = "give the container or host more (docker run --shm-size=1g), or use --restarts 0"
        yield Check(host, "restarts", "warning", what, fix)


def _machines(facts: Mapping[str, Facts]) -> Sequence[Sequence[str]]:
    """Group the hosts by machine."""
    found: dict[str, list[str]] = {}
    for name, known in facts.items():
        found.setdefault(known.boot or name, []).append(name)
    return list(found.values())


def _version(host: Host, facts: Facts) -> Check:
    fix = f"install there what is installed here, with {facts.executable} -m pip (docs/how-to/sites.md)"
    if facts.version != __version__:
        what = f"geomx {facts.version} is in {facts.package}, and this machine has {__version__}"
        return Check(host.name, "geomx", "problem", what, fix)
    if facts.code != code_digest():
        what = f"geomx {__version__} in {facts.package} has other source code than the one here"
        return Check(host.name, "geomx", "warning", what, fix)
    return Check(host.name, "geomx")


def _python(host: Host, facts: Facts) -> Check:
    numbers = tuple(int(part) for part in facts.python.split(".")[:2] if part.isdigit())
    if numbers >= OLDEST_PYTHON:
        return Check(host.name, "python")
    error = old_python(host.name, facts.python, facts.executable)
    return Check(host.name, "python", "problem", error.message.removeprefix(f"host {host.name}: "), error.hint)


def _modules(host: Host, facts: Facts, required: Requirements) -> Iterator[Check]:
    missing = [name for name in required.modules if name in facts.missing]
    if missing:
        packages = " ".join(f"'{_EXTRAS.get(name, name)}'" for name in missing)
        what = f"{facts.executable} has no {', '.join(missing)}"
        fix = f"there: {facts.executable} -m pip install {packages}"
        if {"torch", "mxnet"}.intersection(missing) and facts.versions.get(required.instead):
            fix += f", or train with {required.instead}, which it has: --framework {required.instead}"
        if "torch" in missing and facts.versions.get("mxnet"):
            fix += "; better in an environment of its own, as MXNet wants an old numpy"
        yield Check(host.name, "modules", "problem", what, fix)
        return
    mxnet, numpy = (facts.versions.get(name, "") for name in ("mxnet", "numpy"))
    if "mxnet" in required.modules and mxnet == "1.9.1" and numpy.partition(".")[0] not in ("", "0", "1"):
        what = f"{facts.executable} has numpy {numpy}, with which mxnet {mxnet} does not work"
        fix = f"there: {facts.executable} -m pip install 'numpy<2'"
        yield Check(host.name, "modules", "problem", what, fix)
        return
    if "torch" in required.modules and (wrong := _torch(host, facts)):
        yield Check(host.name, "modules", "problem", *wrong)
        return
    yield Check(host.name, "modules")


def _torch(host: Host, facts: Facts) -> tuple[str, str] | None:
    """What is wrong with the installed PyTorch, and how to correct it."""
    version = facts.versions.get("torch", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers and numbers < _OLDEST_TORCH:
        what = f"{facts.executable} has torch {version}, and geomx needs {'.'.join(map(str, _OLDEST_TORCH))} or newer"
        return what, f"there: {facts.executable} -m pip install --upgrade torch"
    if not facts.versions.get("torch.cuda", "unknown") and facts.gpus and names_gpus(host):
        what = f"{facts.executable} has torch {version}, which is built without CUDA, and is to train on GPUs"
        return what, "install a build for its CUDA there, see https://pytorch.org/get-started/locally"
    return None


def check_torch(facts: Mapping[str, Facts], required: Mapping[str, Requirements]) -> Iterator[Check]:
    """Warn if hosts have different versions of PyTorch or NCCL. PyTorch may then draw other numbers from the same seed.
    """
    known = {name: found.versions for name, found in facts.items() if "torch" in required[name].modules}
    torch = _by_version({name: versions.get("torch", "").partition("+")[0] for name, versions in known.items()})
    if len(torch) > 1:
        yield _differ("torch", torch, "install one version on all: others may draw other numbers from one seed")
    elif torch:
        yield Check(", ".join(*torch.values()), "torch")
    nccl = _by_version({name: versions.get("torch.nccl", "") for name, versions in known.items()})
    if len(nccl) > 1:
        yield _differ("NCCL", nccl, "install one build of torch on all: workers that use NCCL need the same")


def _by_version(versions: Mapping[str, str]) -> dict[str, list[str]]:
    """The hosts that have each version."""
    found: dict[str, list[str]] = {}
    for name, version in versions.items():
        if version:
            found.setdefault(version, []).append(name)
    return found


def _differ(what: str, versions: Mapping[str, list[str]], fix: str) -> Check:
    described = ", and ".join(f"{version} on {', '.join(names)}" for version, names in sorted(versions.items()))
    names = ", ".join(name for names in versions.values() for name in names)
    return Check(names, "torch", "warning", f"{what} {described}", fix)


def _folders(host: Host, facts: Facts) -> Iterator[Check]:
    state, work = facts.state, facts.work
    elsewhere = "free space or fix permissions, or choose another state_dir"
    if host.shares_files:
        elsewhere += ", or without an inventory another --job-dir"
    if state.error:
        what = f"cannot write to {state.path}, the directory of jobs: {state.error}"
        yield Check(host.name, "disk", "problem", what, elsewhere)
    elif state.free < _LOW_DISK:
        little = state.free < _LITTLE_DISK
        what = f"only {format_bytes(state.free)} of disk are free at {state.path}, where jobs lie"
        what += f": less than {format_bytes(_LITTLE_DISK if little else _LOW_DISK)}"
        yield Check(host.name, "disk", "problem" if little else "warning", what, elsewhere)
    else:
        yield Check(host.name, "disk")
    if host.workdir and not work.exists:
        what = f"there is no folder {work.path}, its workdir"
        yield Check(host.name, "workdir", "problem", what, "make it, or choose another workdir")
    if facts.sockets:
        what = f"no unix socket can be made in the folder for temporary files: {facts.sockets}"
        yield Check(host.name, "sockets", "problem", what, "choose another folder with TMPDIR, or make room there")


def _address(host: Host, facts: Facts) -> Check:
    """Check that the address to bind is the host's own."""
    wrong = facts.unusable.get(listening(host))
    if wrong is None:
        return Check(host.name, "address")
    what = f"nothing can listen at {listening(host)}: {wrong}"
    own = [address for each in facts.addresses.values() for address in each if not is_loopback(address)]
    return Check(host.name, "address", "problem", what, f"set listen to one of {', '.join(own)}, or leave it out")


def _gpus(host: Host, facts: Facts) -> Check:
    wanted = {int(device.removeprefix("gpu")) for device in host.devices if device.startswith("gpu")}
    absent = sorted(number for number in wanted if number >= len(facts.gpus))
    if not absent:
        return Check(host.name, "gpus")
    there = ", ".join(f"gpu{number} ({name})" for number, name in enumerate(facts.gpus)) or "no GPU"
    what = f"there is {there}, and the inventory wants {', '.join(f'gpu{number}' for number in absent)}"
    return Check(host.name, "gpus", "problem", what, "correct its devices, or see what nvidia-smi says there")
