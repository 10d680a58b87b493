"""Names of the environment variables of a job's processes, and names of variables without effect: unknown names with
GEOMX_, and variables of MXNet and GeoMX that geomx ignores.
"""

from collections.abc import Iterator, Mapping

from geomx_cli.core.option import did_you_mean
from geomx_cli.core.plugins import table

__all__ = [
    "INTER_TS", "INTRA_TS", "NO_EFFECT", "OWN", "SETTINGS", "USE_HFA", "of_options", "unknown_variables",
    "without_effect", "without_effect_at_launch",
]  # fmt: skip

NO_EFFECT = " has no effect"
USE_HFA = "MXNET_KVSTORE_USE_HFA"
INTER_TS, INTRA_TS = "ENABLE_INTER_TS", "ENABLE_INTRA_TS"
SETTINGS: Mapping[str, str] = {
    "master": "DMLC_ROLE_MASTER_WORKER", "central_workers": "DMLC_ENABLE_CENTRAL_WORKER",
    "num_all_workers": "DMLC_NUM_ALL_WORKER", "interface": "DMLC_INTERFACE", "node_host": "DMLC_NODE_HOST",
    "job": "GEOMX_JOB", "job_dir": "GEOMX_JOB_DIR", "output_dir": "GEOMX_OUTPUT_DIR", "process": "GEOMX_PROCESS",
    "party": "GEOMX_PARTY", "party_index": "GEOMX_PARTY_INDEX", "host": "GEOMX_HOST", "rank": "GEOMX_RANK",
    "global_rank": "GEOMX_GLOBAL_RANK",
    "bind": "GEOMX_BIND", "advertise": "GEOMX_ADVERTISE", "key_file": "GEOMX_KEY_FILE", "insecure": "GEOMX_INSECURE",
    "wan_share": "GEOMX_WAN_SHARE", "links": "GEOMX_LINKS", "device": "GEOMX_DEVICE", "group_size": "GEOMX_GROUP_SIZE",
    "rendezvous": "GEOMX_RENDEZVOUS", "peers": "GEOMX_PEERS", "clock_ahead": "GEOMX_CLOCK_AHEAD",
    "supervised": "GEOMX_SUPERVISED", "incarnation": "GEOMX_INCARNATION", "state_dir": "GEOMX_STATE_DIR",
    "stop_file": "GEOMX_STOP_FILE", "start_dir": "GEOMX_START_DIR",
    "training_since": "GEOMX_TRAINING_SINCE",
}  # fmt: skip
"""The variables of a process's settings, by field of NodeSettings."""
OWN = frozenset(
    (
        "GEOMX_GLOBAL_SCHEDULER", "GEOMX_HOSTS", "GEOMX_RESTART_COUNT", "GEOMX_SCHEDULER", "GEOMX_SCRIPT_PROCESS",
        *SETTINGS.values(),
    )
)  # fmt: skip
"""Variables that geomx reads in addition to the options' variables, and variables that scripts may read."""


def of_options() -> tuple[str, ...]:
    """Return the variables that set options."""
    return (USE_HFA, INTER_TS, INTRA_TS, *(option.env for option in table()))


def unknown_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each unknown GEOMX_... variable."""
    known = OWN.union(of_options())
    for name in sorted(environment):
        if name.startswith("GEOMX_") and name not in known:
            close = did_you_mean(name, known, cutoff=0.8)
            yield f"{name} means nothing to geomx" + (f"; {close}" if close else "")


_RESENDS = "geomx always sends again what was lost with a connection"
_OWN_SUM = "geomx adds the arrays of a worker's devices in its own way"
_WITHOUT_EFFECT: Mapping[str, str] = {
    "DGT_INFO": "the telemetry of servers says what datagrams do",
    **dict.fromkeys(("PS_RESEND", "PS_RESEND_TIMEOUT"), _RESENDS),
    "PS_DROP_MSG": "geomx drops no messages; tc netem emulates a link that does",
    "PS_HEARTBEAT_INTERVAL": "set GEOMX_HEARTBEAT (--heartbeat), with a unit",
    "PS_HEARTBEAT_TIMEOUT": "set GEOMX_SILENCE (--silence), with a unit",
    "PS_VERBOSE": "a process's event log says what it does",
    "DMLC_LOCAL": "geomx launch has the processes of a host use unix sockets; by hand, give 127.0.0.1 as the address",
    "DMLC_USE_KUBERNETES": "set DMLC_NODE_HOST to the address that others dial; in the inventory, address and listen",
    **dict.fromkeys(
        ("MXNET_KVSTORE_USETREE", "MXNET_KVSTORE_SERIAL_PUSH", "MXNET_KVSTORE_REDUCTION_NTHREADS"), _OWN_SUM
    ),
    "MXNET_KVSTORE_DIST_ROW_SPARSE_VERBOSE": "a process's event log says what it does",
}  # fmt: skip
"""For each variable that MXNet or GeoMX reads and geomx does not: the reason, or the replacement."""
_LAUNCH_SETS = "geomx launch gives each process its own; addresses and interfaces of hosts are in the inventory"
_OFF = frozenset(("", "0", "0.0", "no", "false", "off"))


def without_effect(environment: Mapping[str, str], *, launching: bool = False) -> Iterator[str]:
    """Yield a sentence for each variable of MXNet's or GeoMX's that is set, has no "off" value, and has no effect.

    launching: check the environment of `geomx launch`, which also ignores variables that only processes started by
        hand read.
    """
    for name in sorted(environment):
        if environment[name].strip().lower() in _OFF:
            continue
        if name in _WITHOUT_EFFECT:
            yield f"{name}{NO_EFFECT}: {_WITHOUT_EFFECT[name]}"
        elif launching and name == USE_HFA:
            yield f"{name}{NO_EFFECT} on geomx launch: write --algo hfa"
        elif launching and name in (INTER_TS, INTRA_TS):
            where = "inter" if name == INTER_TS else "intra"
            yield f"{name}{NO_EFFECT} on geomx launch: write --tsengine {where}, or both"
        elif launching and name.startswith("DMLC_") and name not in of_options():
            yield f"{name}{NO_EFFECT} on geomx launch: {_LAUNCH_SETS}"


def without_effect_at_launch(
    environment: Mapping[str, str], hosts: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Return, for each variable without effect, a sentence about it, and where it is set. The place is "" for the
    launch's `environment`, otherwise a text such as "env of a, b: ".

    hosts: the variables that the inventory sets, by host.
    """
    setting: dict[str, list[str]] = {}
    for host, variables in hosts.items():
        for sentence in without_effect(variables):
            setting.setdefault(sentence, []).append(host)
    in_inventory = {sentence: f"env of {', '.join(names)}: " for sentence, names in setting.items()}
    return in_inventory | dict.fromkeys(without_effect(environment, launching=True), "")
