"""The systems that recovery_peers.py compares: the processes of each, and what its user writes to survive kills."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers_environment import HERE, MXNET
from recovery_task import ROUND, WORKERS

from geomx_cli.hosts.ports import free_ports

__all__ = ["LOOP", "SYSTEMS", "Member", "Setting", "System"]

FOLDER = Path(__file__).parent
LOOP = ("sh", "-c", 'until "$@"; do sleep 0.1; done', "sh")
"""Starts a process again until it ends well."""
SNAPSHOT = 10
"""Seconds between two snapshots of torchrun's script."""


@dataclass(frozen=True)
class Setting:
    """Where a system runs: its interpreter, an empty folder, and the last arguments of each script."""

    python: str
    folder: Path
    last: Sequence[str]

    def script(self, name: str, *words: object) -> tuple[str, ...]:
        """The command of a script for this system."""
        return self.python, str(FOLDER / f"recovery_peer_{name}.py"), *map(str, words), *self.last


@dataclass(frozen=True)
class Member:
    """One process. lasts: it is not waited for."""

    argv: Sequence[str]
    env: dict[str, str]
    lasts: bool = False


@dataclass(frozen=True)
class System:
    """One row.

    script: the worker's, whose lines between "recovery: begin" and "recovery: end" are the user's for recovery.
    further: what the user writes elsewhere, an item a line.
    numbered: a step that is trained again takes the place of that with the same number.
    """

    title: str
    environment: str
    members: Callable[[Setting], list[Member]]
    script: str
    further: Sequence[str] = ()
    numbered: bool = True


def _geomx(*options: str) -> Callable[[Setting], list[Member]]:
    def members(given: Setting) -> list[Member]:
        words = ["--local", "--parties", str(WORKERS), "--workers", "1", "--framework", "torch", "--restarts", "100"]
        job = ["--job-dir", str(given.folder / "job"), *words, *options]
        return [Member([sys.executable, "-m", "geomx_cli", "launch", *job, "--", *given.script("geomx")], {})]

    return members


def _torchrun(given: Setting) -> list[Member]:
    script = given.script("ddp", SNAPSHOT)
    words = [
        "--nnodes", str(WORKERS), "--nproc-per-node", "1", "--max-restarts", "100", "--monitor-interval", "0.1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}", "--rdzv-id", "recovery",
        "--local-addr", "127.0.0.1",
    ]  # fmt: skip
    # Otherwise all attempts share a store: workers whose agents have counted different numbers of restarts never meet.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return [Member([given.python, "-m", "torch.distributed.run", *words, *script[1:]], env) for _ in range(WORKERS)]


def _ddp(given: Setting) -> list[Member]:
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "WORLD_SIZE": str(WORKERS)}
    return [Member(given.script("ddp", 0), group | {"RANK": str(rank)}) for rank in range(WORKERS)]


def _torchft(mode: str) -> Callable[[Setting], list[Member]]:
    def members(given: Setting) -> list[Member]:
        port = free_ports(1)[0]
        serve = (
            "import time; from torchft.coordination import LighthouseServer; server = LighthouseServer("
            f"bind='[::]:{port}', min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=1000); time.sleep(1e6)"
        )
        argv = [(*LOOP, *given.script("torchft", mode, rank, f"http://127.0.0.1:{port}")) for rank in range(WORKERS)]
        return [Member([given.python, "-c", serve], {}, lasts=True), *(Member(each, {}) for each in argv)]

    return members


def _hivemind(given: Setting) -> list[Member]:
    env = {"SITE_ADDRESS": "127.0.0.1"}
    return [Member((*LOOP, *given.script("hivemind", rank)), env) for rank in range(WORKERS)]


def _flower(given: Setting) -> list[Member]:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    clients = [Member((*LOOP, *given.script("flower", rank, address)), {}) for rank in range(WORKERS)]
    return [Member(given.script("flower", "server", address), {}), *clients]


def _mxnet(given: Setting) -> list[Member]:
    env = {
        "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_ports(1)[0]), "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": str(WORKERS), "DMLC_NODE_HOST": "127.0.0.1", "PS_HEARTBEAT_INTERVAL": "1",
        "PS_HEARTBEAT_TIMEOUT": "2",
    }  # fmt: skip
    serve = [given.python, "-c", "import mxnet"]
    servers = [Member(serve, env | {"DMLC_ROLE": role}, lasts=True) for role in ("scheduler", "server")]
    return servers + [Member((*LOOP, *given.script("mxnet")), env | {"DMLC_ROLE": "worker"}) for _ in range(WORKERS)]


_LOOP = "a loop in the shell that starts a worker again"
_DILOCO = ("--algo", "diloco", "--inner-steps", str(ROUND))
_LIGHTHOUSE = (_LOOP, "the lighthouse's command")

SYSTEMS: dict[str, System] = {
    "geomx-fsa": System("geomx, `fsa`", HERE, _geomx("--algo", "fsa"), "geomx"),
    "geomx-diloco": System("geomx, `diloco`", HERE, _geomx(*_DILOCO), "geomx"),
    "torchft-diloco": System("torchft, DiLoCo", "torchft", _torchft("diloco"), "torchft", _LIGHTHOUSE, numbered=False),
    "torchft-local-sgd": System(
        "torchft, LocalSGD", "torchft", _torchft("local-sgd"), "torchft", _LIGHTHOUSE, numbered=False
    ),
    "hivemind": System("hivemind, local updates", "hivemind", _hivemind, "hivemind", (_LOOP,), numbered=False),
    "flower": System("Flower, FedAvg", "flower", _flower, "flower", (_LOOP,), numbered=False),
    "mxnet": System(
        "MXNet `dist_sync`", MXNET, _mxnet, "mxnet", (_LOOP, "PS_HEARTBEAT_INTERVAL", "PS_HEARTBEAT_TIMEOUT")
    ),
    "torchrun": System(
        f"torchrun, DistributedDataParallel, a snapshot every {SNAPSHOT} s", HERE, _torchrun, "ddp",
        ("--max-restarts", "--monitor-interval"),
    ),
    "ddp": System("DistributedDataParallel on gloo", HERE, _ddp, ""),
}  # fmt: skip
