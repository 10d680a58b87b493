"""Environment <-> Settings: the configuration of one process of a job. The only module that reads
the variables of a job.

The `DMLC_*` variables have the same meaning as in MXNet and GeoMX, so that a process can be started by hand with only
these; `GEOMX_*` carry additional data of the planner. The table of options gives each option's variable.

    every process
      DMLC_ROLE                               scheduler, server or worker (unset: worker)
      DMLC_NODE_HOST, DMLC_INTERFACE, PORT    own address, or the interface that has it, and the port to listen on
      GEOMX_INSECURE=1                        listen on non-loopback addresses without keys
      MXNET_KVSTORE_USE_HFA=1, _HFA_K1, _K2   the algorithm HFA with these periods, 1 if not set (or GEOMX_ALGO)
      ENABLE_INTER_TS=1, ENABLE_INTRA_TS=1    TSEngine between parties, inside them: GEOMX_TSENGINE=inter, intra or both
    processes of a party (the global servers are the servers of the central party)
      DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT     address of the party's scheduler
      DMLC_NUM_SERVER, DMLC_NUM_WORKER        number of servers and workers of the party
      GEOMX_RANK_SCOPE                        what kv.rank and kv.num_workers count, the same for all workers: party, or
                                              global: then the worker of global rank 0 is the master, and a central
                                              party that does not train has neither scheduler nor worker
    master worker, in the central party
      DMLC_ROLE_MASTER_WORKER=1               configures the global servers and provides the initial weights
    central party
      DMLC_ENABLE_CENTRAL_WORKER=1            its workers train, including the master
    global scheduler, global servers and local servers (without these a party is a flat cluster by itself)
      DMLC_ROLE_GLOBAL                        global_scheduler, or global_server in addition to DMLC_ROLE=server
      DMLC_PS_GLOBAL_ROOT_URI, _PORT          address of the global scheduler
      DMLC_NUM_GLOBAL_SERVER, _WORKER         number of global servers and local servers

    from the planner, and from the agent that starts a process
      GEOMX_JOB, GEOMX_JOB_DIR, GEOMX_PROCESS, GEOMX_PARTY, GEOMX_PARTY_INDEX, GEOMX_HOST
      GEOMX_OUTPUT_DIR                        worker: its folder for what geomx fetch brings: the model
      GEOMX_RANK, GEOMX_GLOBAL_RANK           ranks, otherwise assigned by schedulers; DMLC_NUM_ALL_WORKER
      GEOMX_BIND, GEOMX_ADVERTISE             endpoints, separated by spaces
      GEOMX_SCHEDULER, GEOMX_GLOBAL_SCHEDULER endpoints to dial instead of tcp://URI:PORT
      GEOMX_DEVICE                            gpuN: train on that GPU, the only one in CUDA_VISIBLE_DEVICES
      GEOMX_GROUP_SIZE, GEOMX_RENDEZVOUS      worker with GEOMX_REDUCE=torch: the size of its party's process group, and
                                              where that forms; all but its first worker have no DMLC_PS_... variables
      GEOMX_KEY_FILE, GEOMX_WAN_SHARE, GEOMX_LINKS
      GEOMX_CLOCK_AHEAD                       seconds that the host's clock is ahead of that of the launching machine
      GEOMX_SUPERVISED=1                      an agent reports if this process ends, hangs or is stopped
      GEOMX_INCARNATION, GEOMX_STATE_DIR      which life of the process this is, from 0; where its state survives it
      GEOMX_STOP_FILE                         exists once the job is asked to stop
      GEOMX_START_DIR                         bundled worker: what a job with other numbers of workers has left to it
      GEOMX_RESTART_COUNT                     script: how often all workers have begun again (--on-worker-loss)
      GEOMX_TRAINING_SINCE                    when its training has begun before that, in Unix seconds
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from geomx_cli.contract.config import NodeSettings, PlaneSettings, Role
from geomx_cli.core.env_names import INTER_TS, INTRA_TS, SETTINGS, USE_HFA, of_options
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Option, decode, encode
from geomx_cli.core.units import plain_number

__all__ = ["PlaneSettings", "Role", "Settings", "factor_of", "factors", "none_are_set"]

# The option `slowdown`, which makes workers slower than their machines.


def factors(text: str) -> list[tuple[str, float]]:
    """Parse the option `slowdown`, as in "A/worker:1=8,B=2" or "8", to (name, factor) pairs.

    A name is a process of the plan or a party, "" the last worker. Raises InvalidSettings for invalid values.
    """
    found = []
    for part in filter(None, text.split(",")):
        who, named, number = part.rpartition("=")
        if named and not who.strip():
            hint = "write a worker or party, or the number alone"
            raise InvalidSettings(f"--slowdown {text}: there is nobody before the =", hint)
        try:
            factor = float(plain_number(number.strip()))
        except ValueError:
            factor = 0.0
        if not 1 <= factor <= 10_000:
            raise InvalidSettings(f"--slowdown {text}: {number!r} is no factor", "write one from 1, as in A/worker:1=8")
        found.append((who.strip(), factor))
    return found


def factor_of(text: str, process: str, party: str, is_last: bool) -> float:
    """Return the slowdown factor of this worker; `process` is its name in the plan."""
    found = 1.0
    for who, factor in factors(text):
        if who in (process, party) or (not who and is_last):
            found *= factor
    return found


_HFA = {"MXNET_KVSTORE_HFA_K1": "k1", "MXNET_KVSTORE_HFA_K2": "k2"}


@dataclass(frozen=True)
class Settings(NodeSettings):
    """NodeSettings with conversion to and from environment variables."""

    def to_environment(self, table: Iterable[Option]) -> dict[str, str]:
        """Return the exact variables for this process; options at their default are omitted."""
        env = {
            "DMLC_ROLE": "" if self.role == "global_scheduler" else self.role.removeprefix("global_"),
            "DMLC_ROLE_GLOBAL": self.role if self.role.startswith("global_") else "",
            "PORT": str(self.port or ""),
        }
        for field in fields(NodeSettings):
            value = getattr(self, field.name)
            if field.name in SETTINGS and value != field.default:
                env[SETTINGS[field.name]] = _encode(value)
        env |= _plane_to_environment(self.local, "", "GEOMX_SCHEDULER")
        env |= _plane_to_environment(self.upper, "GLOBAL_", "GEOMX_GLOBAL_SCHEDULER")
        for option in table:
            value = self.options.get(option.name, option.default)
            if value != option.default:
                env[option.env] = encode(option, value)
        if self.options.get("algo") == "hfa":
            env |= {USE_HFA: "1", **{name: str(self.options[key]) for name, key in _HFA.items()}}
        return {name: text for name, text in env.items() if text}

    @classmethod
    def from_environment(cls, table: Iterable[Option], env: Mapping[str, str] | None = None) -> "Settings":
        """Read a process's settings. Raises InvalidSettings naming the missing or invalid variable."""
        env = _with_tsengine(_with_hfa(os.environ if env is None else env))
        role = _role(env)
        return cls(
            role=role,
            local=_local(env, role),
            upper=_upper(env, role),
            port=_int(env, "PORT", 0) if env.get("PORT", "0").isdigit() else 0,
            options={
                option.name: decode(option, env[option.env]) if env.get(option.env) else option.default
                for option in table
            },
            **{
                field.name: _decode(env, variable, field.default)
                for field in fields(NodeSettings)
                if (variable := SETTINGS.get(field.name)) and env.get(variable)
            },
        )


def _with_hfa(env: Mapping[str, str]) -> Mapping[str, str]:
    """Translate the variables by which GeoMX scripts request HFA; both periods default to 1."""
    if _int(env, USE_HFA, 0) != 1 or env.get("GEOMX_ALGO", "hfa") != "hfa":
        return env
    return {**dict.fromkeys(_HFA, "1"), **env, "GEOMX_ALGO": "hfa"}


def _with_tsengine(env: Mapping[str, str]) -> Mapping[str, str]:
    """Translate the variables by which GeoMX scripts request TSEngine."""
    inter, intra = (_int(env, name, 0) == 1 for name in (INTER_TS, INTRA_TS))
    where = "both" if inter and intra else "inter" if inter else "intra"
    return {"GEOMX_TSENGINE": where, **env} if inter or intra else env


def none_are_set() -> bool:
    """Return whether no variable assigns this process to a cluster."""
    of_jobs = (name for name in os.environ if name.startswith("DMLC_") or name in ("GEOMX_JOB", "GEOMX_SCHEDULER"))
    return not set(of_jobs).difference(of_options())


def _encode(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(value)
    return "1" if value is True else str(value)


def _decode(env: Mapping[str, str], name: str, default: object) -> Any:
    """Return the value of a variable that is set, for a field with this default."""
    match default:
        case str():
            return env[name]
        case bool():
            return _int(env, name) == 1
        case tuple():
            return tuple(env[name].split())
        case float():
            return _share(env, name) if name == SETTINGS["wan_share"] else _seconds(env, name)
    return _int(env, name)


def _plane_to_environment(plane: PlaneSettings | None, infix: str, scheduler: str) -> dict[str, str]:
    if plane is None:
        return {}
    return {
        f"DMLC_PS_{infix}ROOT_URI": plane.uri,
        f"DMLC_PS_{infix}ROOT_PORT": str(plane.port),
        f"DMLC_NUM_{infix}SERVER": str(plane.servers),
        f"DMLC_NUM_{infix}WORKER": str(plane.workers),
        scheduler: plane.scheduler,
    }


def _role(env: Mapping[str, str]) -> Role:
    upper, role = env.get("DMLC_ROLE_GLOBAL", ""), env.get("DMLC_ROLE", "") or "worker"
    match upper, role:
        case ("global_scheduler", _):
            return "global_scheduler"
        case ("global_server", "server"):
            return "global_server"
        case ("", "scheduler" | "server" | "worker"):
            return role
    raise InvalidSettings(
        f"DMLC_ROLE={role!r} with DMLC_ROLE_GLOBAL={upper!r} is no role",
        "DMLC_ROLE is scheduler, server or worker; DMLC_ROLE_GLOBAL is global_scheduler, or global_server on a server",
    )


def _local(env: Mapping[str, str], role: Role) -> PlaneSettings | None:
    optional = role == "global_server" or (role == "worker" and env.get(SETTINGS["group_size"]))
    if role == "global_scheduler" or (optional and not env.get("DMLC_PS_ROOT_URI")):
        return None
    return _plane(env, "", "GEOMX_SCHEDULER")


def _upper(env: Mapping[str, str], role: Role) -> PlaneSettings | None:
    if role.startswith("global_") or (role == "server" and env.get("DMLC_PS_GLOBAL_ROOT_URI")):
        return _plane(env, "GLOBAL_", "GEOMX_GLOBAL_SCHEDULER")
    return None


def _plane(env: Mapping[str, str], infix: str, scheduler: str) -> PlaneSettings:
    uri = f"DMLC_PS_{infix}ROOT_URI"
    if not env.get(uri):
        hint = "it is the address of the scheduler; geomx launch sets it, python -m geomx_cli.runtime --help explains"
        raise InvalidSettings(f"{uri} is not set", hint)
    port = _int(env, f"DMLC_PS_{infix}ROOT_PORT", None)
    if not 0 < port < 65536:
        raise InvalidSettings(f"DMLC_PS_{infix}ROOT_PORT={port} is no port", "it lies between 1 and 65535")
    servers = _int(env, f"DMLC_NUM_{infix}SERVER", None)
    workers = _int(env, f"DMLC_NUM_{infix}WORKER", None)
    if servers < 1 or workers < 1:
        raise InvalidSettings(
            f"DMLC_NUM_{infix}SERVER={servers}, DMLC_NUM_{infix}WORKER={workers}: each must be at least 1",
            "they count the members of the plane, and are the same in all of its processes",
        )
    return PlaneSettings(env[uri], port, servers, workers, env.get(scheduler, ""))


def _int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if not text:
        if default is None:
            raise InvalidSettings(f"{name} is not set", "geomx launch sets it for you")
        return default
    try:
        return int(text)
    except ValueError:
        raise InvalidSettings(f"{name}={text!r} is no whole number", f"set {name} to a number") from None


def _seconds(env: Mapping[str, str], name: str) -> float:
    try:
        seconds = float(env[name])
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise InvalidSettings(f"{name}={env[name]!r} is no number of seconds", "geomx launch sets it")
    return seconds


def _share(env: Mapping[str, str], name: str) -> float:
    text = env[name]
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise InvalidSettings(f"{name}={text!r} is no part of a link", "it lies between 0 and 1")
    return share
