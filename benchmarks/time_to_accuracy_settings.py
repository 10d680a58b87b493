"""Settings of time_to_accuracy.py: the options of each row, and those tried to find them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from geomx_cli.core.options import Value

__all__ = ["CODECS", "GRID", "MXNET", "ROUNDS", "ROWS", "TASKS", "Row", "Task"]

MXNET = "mxnet"
GRID = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True)
class Row:
    """options: of geomx launch; `algo` may also be "mxnet", its own dist_sync, with a server at each of the sites
    `servers` and slices of `bound` elements. tried: the settings that --sweep tries beside the six rates of GRID;
    start: the settings used with those rates. same_as: the row with the same arithmetic, whose rate is used. task: the
    only task of this row.
    """

    options: Mapping[str, Value]
    tried: Sequence[Mapping[str, Value]] = ()
    start: Mapping[str, Value] = field(default_factory=dict)
    same_as: str = ""
    task: str = ""
    servers: Sequence[str] = ()
    bound: int = 1_000_000


@dataclass(frozen=True)
class Task:
    """options: of all rows. rows: the settings that differ from those of ROWS."""

    options: Mapping[str, Value]
    targets: Sequence[float]
    rows: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)


def _momenta(*values: float) -> list[dict[str, Value]]:
    return [{"momentum": value} for value in values]


def _pairs(first: str, second: str, *values: tuple[Value, Value]) -> list[dict[str, Value]]:
    return [{first: one, second: other} for one, other in values]


SPREAD = {"topology": "spread"}
MOMENTA = _momenta(0.0, 0.5, 0.8, 0.9, 0.95, 0.99)
INNER = _pairs("inner_steps", "outer_momentum", (10, 0.5), (20, 0.5), (30, 0.0), (30, 0.5), (30, 0.9), (60, 0.5))
ROWS: Mapping[str, Row] = {
    "default": Row({"algo": "fsa"}),
    "fsa": Row({"algo": "fsa", **SPREAD, "lr": 0.05}, MOMENTA),
    "fsa-central": Row({"algo": "fsa", "topology": "central"}, same_as="fsa"),
    "mixed": Row({"algo": "mixed", **SPREAD, "lr": 0.2, "momentum": 0.5}, MOMENTA, {"momentum": 0.0}),
    "mixed-dcasgd": Row(
        {"algo": "mixed", **SPREAD, "lr": 0.2, "momentum": 0.0, "optimizer": "dcasgd", "dc_lambda": 0.02},
        [{"dc_lambda": value} for value in (0.01, 0.02, 0.04, 0.1, 0.5, 2.0)], {"dc_lambda": 0.0},
    ),
    "hfa": Row(
        {"algo": "hfa", **SPREAD, "lr": 0.05, "k1": 20, "k2": 3},
        _pairs("k1", "k2", (5, 4), (10, 4), (20, 2), (20, 3), (20, 5), (20, 10)), {"k1": 20, "k2": 2},
    ),
    "esync": Row(
        {"algo": "esync", **SPREAD, "lr": 0.1, "min_local_steps": 12, "global_lr": 1.3},
        _pairs("min_local_steps", "global_lr", (6, 1.0), (12, 1.0), (24, 1.0), (48, 1.0), (12, 1.3), (24, 1.3)),
        {"min_local_steps": 12, "global_lr": 1.0},
    ),
    "diloco": Row(
        {"algo": "diloco", **SPREAD, "lr": 0.05, "inner_steps": 60, "outer_momentum": 0.5}, INNER, {"inner_steps": 30}
    ),
    "diloco-streaming": Row(
        {"algo": "diloco", **SPREAD, "lr": 0.05, "inner_steps": 40, "outer_momentum": 0.5, "fragments": 2,
         "overlap": 10},
        _pairs("inner_steps", "overlap", (20, 5), (40, 5), (40, 10), (40, 15), (60, 10), (60, 20)),
        {"inner_steps": 40, "overlap": 10},
    ),
    # An outer step without momentum, as the residual has that role (arXiv:2508.15706), and rounds of about 20 steps.
    "diloco-sparseloco": Row(
        {"algo": "diloco", **SPREAD, "lr": 0.05, "inner_steps": 20, "outer_lr": 1.0, "outer_momentum": 0.0,
         "compress": "sparseloco"},
        task="iid",
    ),
    "hfa-sparseloco": Row(
        {"algo": "hfa", **SPREAD, "lr": 0.05, "k1": 5, "k2": 4, "compress": "sparseloco"}, task="iid"
    ),
    "party-alone": Row(
        {"algo": "fsa", **SPREAD, "parties": 1, "split": "iid", "data": "time_to_accuracy_data:party_a"},
        same_as="fsa", task="by-party",
    ),
    "sync": Row({"algo": "sync"}, same_as="fsa", task="iid"),
    "async": Row({"algo": "async", "lr": 0.5, "momentum": 0.0}, MOMENTA, task="iid"),
    "mxnet": Row({"algo": MXNET}, same_as="fsa", servers="AB", bound=10_000),
    "mxnet-2bit": Row(
        {"algo": MXNET, "lr": 0.4, "momentum": 0.0, "compress": "2bit:0.004"}, task="iid", servers="AB", bound=10_000
    ),
    "mxnet-central": Row({"algo": MXNET}, same_as="fsa", servers="C", bound=10_000),
}  # fmt: skip
"""Rates and settings are the best of --sweep --seeds 1 --epochs 1, of twelve runs each; mxnet's bound, of --bounds.
With sparseloco they are the best of four (diloco) and three (hfa) runs over loopback, and mxnet-2bit's those of four
runs of one epoch with seed 4, of which the two with momentum did not learn.
"""

TASKS: Mapping[str, Task] = {
    "iid": Task({}, (0.80, 0.87)),
    "by-party": Task(
        {"split": "by-party"}, (0.80,),
        {
            "hfa": {"k1": 5, "k2": 4},
            "esync": {"lr": 0.05, "min_local_steps": 6, "global_lr": 1.0},
            "diloco": {"inner_steps": 30},
            "diloco-streaming": {"overlap": 5},
        },
    ),
}

ROUNDS: Mapping[str, Mapping[str, Value]] = {
    "fsa": {"lr": 0.05},
    "hfa": {"lr": 0.05, "k1": 5, "k2": 4},
    "diloco": {"lr": 0.05, "inner_steps": 20, "outer_lr": 1.0, "outer_momentum": 0.0},
}
"""The algorithms of --codecs: between parties they exchange after every step, or every 20 steps."""

# What sparse codecs leave out returns later as a residual, which has the role of a momentum.
_SPARSE: Mapping[str, Mapping[str, Value]] = {"fsa": {"lr": 0.1, "momentum": 0.0}}
# Momentum moves all weights, also those of which nothing was sent: workers add it, so that it is not sent.
_ON_WORKERS: Mapping[str, Mapping[str, Value]] = {"fsa": {"optimizer_on": "worker", "lr": 0.2, "momentum": 0.5}}
CODECS: Mapping[str, Mapping[str, Mapping[str, Value]]] = {
    "none": {},
    "fp16": {},
    "bf16": {},
    "int8": {},
    "q4": {},
    "mpq:0.01,pull=union": _SPARSE,
    "bsc:0.01,pull=union": _SPARSE,
    "bsc:0.02,pull=union": _SPARSE,
    "topk:0.01,pull=union": {"fsa": {"lr": 0.4, "momentum": 0.0}},
    "topk:0.01,pull=union,warmup=200": _ON_WORKERS,
    "topk:0.01+int8,pull=union": {"fsa": {"lr": 0.4, "momentum": 0.0}},
    "topk:0.01+int8,pull=union,warmup=200": _ON_WORKERS,
    "sparseloco": _ON_WORKERS,
    "sparseloco:0.99": _ON_WORKERS,
    "1bit:0": {"fsa": {"lr": 0.6, "momentum": 0.0}},
    "1bit:0,warmup=200": {"fsa": {"lr": 0.25, "momentum": 0.0}},
    "2bit:0.01": _SPARSE,
    "2bit:0.002": {"fsa": {"lr": 0.4, "momentum": 0.0}},
    "2bit:0.004": {"fsa": {"lr": 0.6, "momentum": 0.0}},
    "2bit:0.03": {},
}
"""The codecs of --codecs, with the options that differ from ROUNDS, by algorithm."""
