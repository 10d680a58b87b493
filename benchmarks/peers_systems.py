"""The systems that peers.py compares: the processes of each, at which site and with what environment they run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from peers_environment import HERE
from pushpull_job import planned
from wan import Wan

from geomx_cli.core.options import Value
from geomx_cli.hosts.ports import free_ports

__all__ = ["PARTIES", "SYSTEMS", "Member", "Setting", "System"]

FOLDER = Path(__file__).parent
PARTIES = "AB"
RANKS = 2
"""Ranks in each party."""
PIECE, PIECE_DELAYED = 1 << 20, 8 << 20
"""Bytes of a piece of gloo in two levels without and with a round trip between parties: of 1, 8 and 12 MB the fastest.
"""


@dataclass(frozen=True)
class Setting:
    """Where a system runs: the emulated network, the interpreter of its environment, an empty folder, and the name of
    the list of tensors.
    """

    wan: Wan
    python: str
    directory: Path
    tensors: str


@dataclass(frozen=True)
class Member:
    """One process. measured: it follows the protocol of peer_measure.py."""

    site: str
    argv: list[str]
    env: dict[str, str]
    measured: bool = True


@dataclass(frozen=True)
class System:
    """One row. half: the payload crosses the WAN in 16 bits. ours: it is geomx, whose WAN links are encrypted; the
    others' are not.
    """

    title: str
    environment: str
    commands: Callable[[Setting], list[Member]]
    half: bool = False
    ours: bool = False


def _ranks() -> list[tuple[int, int, str]]:
    """Global rank, rank in the party and site of each rank."""
    return [(index, index % RANKS, PARTIES[index // RANKS]) for index in range(RANKS * len(PARTIES))]


def _gloo(mode: str, dtype: str) -> Callable[[Setting], list[Member]]:
    def commands(given: Setting) -> list[Member]:
        common = {
            "MASTER_ADDR": given.wan.address(PARTIES[0]), "MASTER_PORT": str(free_ports(1)[0]),
            "WORLD_SIZE": str(len(_ranks())), "GLOO_SOCKET_IFNAME": "eth0",
            "PIECE_BYTES": str(PIECE_DELAYED if given.wan.rtt else PIECE),
        }  # fmt: skip
        argv = [given.python, str(FOLDER / "peer_gloo.py"), mode, dtype, given.tensors]
        return [Member(site, argv, common | {"RANK": str(rank)}) for rank, _, site in _ranks()]

    return commands


def _torchft(mode: str) -> Callable[[Setting], list[Member]]:
    def commands(given: Setting) -> list[Member]:
        lighthouse, *ports = (str(port) for port in free_ports(1 + len(PARTIES)))
        first = PARTIES[0]
        address = f"http://{given.wan.address(first)}:{lighthouse}"
        serve = (
            f"import time; from torchft.coordination import LighthouseServer; server = LighthouseServer("
            f"bind='[::]:{lighthouse}', min_replicas={len(PARTIES)}, join_timeout_ms=100); time.sleep(1e6)"
        )
        argv = [given.python, str(FOLDER / "peer_torchft.py"), mode, given.tensors]
        members = [Member(first, [given.python, "-c", serve], {}, measured=False)]
        for _, rank, site in _ranks():
            party = PARTIES.index(site)
            env = {
                "LOCAL_RANK": str(rank), "PARTY": str(party), "PARTIES": str(len(PARTIES)), "LIGHTHOUSE": address,
                "SITE_ADDRESS": given.wan.address(site), "STORE_PORT": ports[party], "GLOO_SOCKET_IFNAME": "eth0",
            }  # fmt: skip
            members.append(Member(site, argv, env))
        return members

    return commands


def _hivemind(dtype: str) -> Callable[[Setting], list[Member]]:
    def commands(given: Setting) -> list[Member]:
        argv = [given.python, str(FOLDER / "peer_hivemind.py"), dtype, given.tensors]
        common = {"WORLD_SIZE": str(len(_ranks())), "DHT_FILE": str(given.directory / "dht.json")}
        return [
            Member(site, argv, common | {"RANK": str(rank), "SITE_ADDRESS": given.wan.address(site)})
            for rank, _, site in _ranks()
        ]

    return commands


def _flower(given: Setting) -> list[Member]:
    """The server is in a party, whose clients' models then do not cross the WAN."""
    first = PARTIES[0]
    address = f"{given.wan.address(first)}:{free_ports(1)[0]}"
    argv = [given.python, str(FOLDER / "peer_flower.py")]
    server = Member(first, [*argv, "server", address, str(len(_ranks())), given.tensors], {})
    clients = [
        Member(site, [*argv, "client", address, str(rank), given.tensors], {}, measured=False)
        for rank, _, site in _ranks()
    ]
    return [server, *clients]


def _geomx(mode: str, **options: Value) -> Callable[[Setting], list[Member]]:
    def commands(given: Setting) -> list[Member]:
        script = ("python", str(FOLDER / "peer_geomx.py"), mode, given.tensors)
        values = {"parties": len(PARTIES), "workers": RANKS} | options
        members = []
        for process, site, argv, env in planned(values, given.directory, given.wan, script):
            trains = process.role == "worker" and process.global_rank is not None
            members.append(Member(site, argv, env, measured=trains))
        return members

    return commands


_SPREAD: dict[str, Value] = {"topology": "spread"}
_DILOCO: dict[str, Value] = {"algo": "diloco", "inner_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}

SYSTEMS: dict[str, System] = {
    "ddp": System("DistributedDataParallel, gloo", HERE, _gloo("ddp", "fp32")),
    "all-reduce": System("gloo all_reduce, 25 MB buckets", HERE, _gloo("all-reduce", "fp32")),
    "two-level": System("gloo in two levels", HERE, _gloo("two-level", "fp32")),
    "torchft-local-sgd": System("torchft LocalSGD, sharded in the party", "torchft", _torchft("local-sgd")),
    "torchft-diloco": System("torchft DiLoCo, sharded in the party", "torchft", _torchft("diloco")),
    "hivemind": System("hivemind averager", "hivemind", _hivemind("fp32")),
    "flower": System("Flower FedAvg, server at A", "flower", _flower),
    "geomx-central": System("geomx wrap, fsa, global server at C", HERE, _geomx("wrap", topology="central"), ours=True),
    "geomx-fsa": System("geomx wrap, fsa, spread", HERE, _geomx("wrap", **_SPREAD), ours=True),
    "geomx-ddp": System("geomx under DistributedDataParallel, spread", HERE, _geomx("ddp", **_SPREAD), ours=True),
    "geomx-reduce": System(
        "geomx wrap, fsa, spread, --reduce torch", HERE, _geomx("wrap", **_SPREAD, reduce="torch"), ours=True
    ),
    "geomx-diloco": System("geomx wrap, diloco, spread", HERE, _geomx("diloco", **_SPREAD, **_DILOCO), ours=True),
    "geomx-shards": System(
        "geomx wrap, diloco, spread, sharded in the party", HERE,
        _geomx("shards", **_SPREAD, **_DILOCO, reduce="torch", shards=RANKS), ours=True,
    ),
    "ddp-fp16": System("DistributedDataParallel, gloo, fp16 hook", HERE, _gloo("ddp", "fp16"), half=True),
    "two-level-fp16": System("gloo in two levels, fp16 between parties", HERE, _gloo("two-level", "fp16"), half=True),
    "hivemind-fp16": System("hivemind averager, fp16", "hivemind", _hivemind("fp16"), half=True),
    "geomx-fsa-fp16": System(
        "geomx wrap, fsa, spread, fp16", HERE, _geomx("wrap", **_SPREAD, compress="fp16"), half=True, ours=True
    ),
    "geomx-reduce-fp16": System(
        "geomx wrap, fsa, spread, --reduce torch, fp16", HERE,
        _geomx("wrap", **_SPREAD, reduce="torch", compress="fp16"), half=True, ours=True,
    ),
    "geomx-ddp-fp16": System(
        "geomx under DDP, spread, fp16", HERE, _geomx("ddp", **_SPREAD, compress="fp16"), half=True, ours=True
    ),
}
"""By name, those of equal precision together."""
