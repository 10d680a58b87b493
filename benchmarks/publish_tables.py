"""The tables of docs/results that publish.py measures: the commands of each, and its rows."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["TABLES", "Table"]

PYTHON, TORCH = ".venv/bin/python benchmarks/", ".venv-torch/bin/python benchmarks/"
FRAMEWORKS = ".venv-frameworks/bin/python benchmarks/"
Results = Sequence[Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Table:
    """name: of its file and of its place in `page`.
    commands: each prints one object with `results` if it gets --json.
    rows: the cells of each row, of the results of all commands.
    counted: a sentence that says what a cell has, and of how many runs.
    minutes: what measuring takes on two cores, about.
    """

    name: str
    page: str
    commands: Sequence[str]
    heads: Sequence[str]
    rows: Callable[[Results], Iterator[Sequence[Any]]]
    counted: str
    minutes: int


def middle(values: Sequence[float], form: str = ".2f", scale: float = 1.0) -> str:
    """The median and, of several values, the lowest and highest; a value that was not reached is a dash."""
    if not values:
        return "-"
    each = [_number(scale * value, form) for value in (min(values), statistics.median_low(values), max(values))]
    return each[1] if len(values) == 1 else f"{each[1]} [{each[0]}, {each[2]}]"


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "-"


SYSTEMS = {"store": "geomx, KVStore", "client": "geomx, client", "mxnet": "MXNet `dist_sync`"}
TOPOLOGIES = {"flat": "one server", "central": "global server at C", "spread": "a server in each party"}


def _named(one: Mapping[str, Any]) -> str:
    topology = "at C" if one["system"] == "mxnet" and one["topology"] == "flat" and one["rate"] else ""
    return f"{SYSTEMS[one['system']]}, {topology or TOPOLOGIES[one['topology']]}"


def loopback(results: Results) -> Iterator[Sequence[Any]]:
    """Time, ratio, CPU and memory without links."""
    for one in results[0]:
        peaks = [one["peak_bytes"][role] / 1e6 for role in ("worker", "server", "global_server")
                 if role in one["peak_bytes"]]  # fmt: skip
        yield (
            _named(one), middle(one["all_seconds"], ".0f", 1e3), f"{one['ratio_to_mxnet']:.2f}",
            f"{1e3 * one['cpu_seconds']['worker']:.0f}", " / ".join(f"{peak:.0f}" for peak in peaks),
        )  # fmt: skip


def wide(results: Results) -> Iterator[Sequence[Any]]:
    """Time over links, with numbers of workers."""
    for one in (one for command in results for one in command):
        limit = "" if one["system"] == "mxnet" else f"{one['ratio']:.2f}"
        sent = max(ways["sent"] for site, ways in one["link_bytes"].items() if site != "C")
        yield (
            _named(one), one["workers"], middle(one["all_seconds"]), f"{sent / 1e6:.0f}", limit,
            f"{one['ratio_to_mxnet']:.2f}",
        )  # fmt: skip


def peers(results: Results) -> Iterator[Sequence[Any]]:
    """Time of every system on both networks."""
    fast, far = results[0]
    for name, row in fast["rows"].items():
        cells = []
        for network in (fast, far):
            if one := network["rows"].get(name):
                cells.append(f"{middle(one['all_seconds'])}, {one['ratio']:.2f} x")
            else:
                cells.append("-")
        links = [ways for site, ways in row["link_bytes"].items() if site != "C"]
        yield row["title"], *cells, f"{max(ways['sent'] for ways in links) / 1e6:.0f}"


def encoded(results: Results) -> Iterator[Sequence[Any]]:
    """Time of an exchange with each codec, over two links."""
    runs = [one for command in results for one in command]
    for spec in dict.fromkeys(one["options"].get("compress", "") for one in runs):
        found = [one for one in runs if one["options"].get("compress", "") == spec]
        sent = max(ways["sent"] for site, ways in found[0]["link_bytes"].items() if site != "C")
        times = [f"{middle(one['all_seconds'])}, {one['ratio']:.2f} x" for one in found]
        yield f"`{spec}`" if spec else "none", f"{sent / 1e6:.3g}", *times


def speeds(results: Results) -> Iterator[Sequence[Any]]:
    """CPU time of codecs, compiled and in numpy."""
    plain, fast = results
    for one, other in zip(plain, fast, strict=True):
        yield (
            f"`{one['codec']}`", f"{one['encode_ms']:.1f}", f"{one['decode_ms']:.1f}", f"{other['encode_ms']:.1f}",
            f"{other['decode_ms']:.1f}", one["bytes"], f"{one['ratio']:.1f}",
        )  # fmt: skip


def accuracy(results: Results) -> Iterator[Sequence[Any]]:
    """Time and bytes to each target, and the accuracy at the end."""
    rows = [row for command in results for row in command]
    stock = [row for row in rows if row["name"].startswith("mxnet")]
    for row in rows:
        cells: list[str] = []
        for index, mark in enumerate(row["targets"]):
            base = min((one["targets"][index]["seconds"] for one in stock), default=math.inf)
            ratio = base / mark["seconds"]
            sooner = f"{ratio:.1f} x" if 0 < ratio < math.inf else "-"
            cells += [middle(mark["all_seconds"], ".1f"), sooner, _number(mark["wan_bytes"] / 1e6, ".3g")]
        yield f"`{row['name']}`", *cells, middle(row["accuracies"], ".3f")


def parted(results: Results) -> Iterator[Sequence[Any]]:
    """Steps to the target, and the accuracy at the end."""
    for row in results[0]:
        steps = row["targets"][0]["steps"]
        yield f"`{row['name']}`", steps or "-", middle(row["accuracies"], ".3f")


def finals(results: Results) -> Iterator[Sequence[Any]]:
    """The accuracy with each codec, of two algorithms."""
    rows = results[0]
    for codec in dict.fromkeys(row["codec"] for row in rows):
        of = {row["name"]: row["all"] for row in rows if row["codec"] == codec}
        yield f"`{codec}`", *(middle(of.get(name, []), ".3f") for name in ("fsa", "diloco"))


def losses(results: Results) -> Iterator[Sequence[Any]]:
    """Loss, time and bytes of a language model."""
    for rows in results:
        single = min((row["loss"] for row in rows if row["name"].startswith("single")), default=math.nan)
        for row in rows:
            loss, sent, share = row["loss"], row["wan_bytes"], row["computing"]
            more = "" if loss is None or row["name"].startswith("single") else f"{100 * (loss / single - 1):+.1f} %"
            yield (
                f"`{row['name']}`", "as one process" if loss is None else f"{loss:.3f}", more, f"{row['seconds']:.0f}",
                "" if share is None else f"{100 * share:.1f} %", "" if not sent else f"{sent / 1e6:.3g}",
            )  # fmt: skip


def frameworks(results: Results) -> Iterator[Sequence[Any]]:
    """Loss, time and bytes of HF's Trainer and Lightning's."""
    titles = {"hf": "HF Trainer", "lightning": "Lightning"}
    rows = {"single": "one process", "diloco": "one line, `diloco` with `sparseloco`", "ddp": "DDP, `fsa`"}
    single = {row["framework"]: row["loss"] for row in results[0] if row["row"] == "single"}
    for row in results[0]:
        loss = row["loss"]
        more = f"{100 * (loss / single[row['framework']] - 1):+.2f} %" if row["row"] == "diloco" else ""
        yield (
            f"{titles[row['framework']]}, {rows[row['row']]}", "as one process" if loss is None else f"{loss:.4f}",
            more, f"{row['seconds']:.0f}", f"{row['wan_bytes'] / 1e6:.4g}" if row["wan_bytes"] else "",
        )  # fmt: skip


def layers(results: Results) -> Iterator[Sequence[Any]]:
    """Steps with and without P3."""
    for one in (one for command in results for one in command):
        took = one["seconds"]
        yield (
            one["model"], f"{one['exchange']:.2f}", *(_number(took.get(name, math.inf), ".2f")
                                                      for name in ("plain", "p3", "mxnet")),
            f"{took['plain'] / took['p3']:.2f} of {one['bound']:.2f}",
        )  # fmt: skip


def spokes(results: Results) -> Iterator[Sequence[Any]]:
    """Exchanges with and without TSEngine."""
    for one in (one for command in results for one in command):
        times = one["seconds"]
        gain = statistics.median_low(times["direct"]) / statistics.median_low(times["tsengine"])
        yield middle(times["direct"]), middle(times["tsengine"]), f"{gain:.1f} x"


def lossy(results: Results) -> Iterator[Sequence[Any]]:
    """Exchanges with and without DGT on links that lose packets."""
    rows = results[0]
    for congestion in dict.fromkeys(row["congestion"] for row in rows):
        times = [statistics.median_low(row["seconds"]) for row in rows if row["congestion"] == congestion]
        yield congestion, *(_number(seconds, ".2f") for seconds in times), f"{times[0] / times[1]:.2f} x"


def memory(results: Results) -> Iterator[Sequence[Any]]:
    """Peak memory of a worker."""
    titles = {"mxnet": "MXNet `dist_sync`", "flat": "geomx, one server", "central": "geomx, two levels"}
    stock = next(one["peak_bytes"] for one in results[0] if one["system"] == "mxnet")
    for one in results[0]:
        peak, step = one["peak_bytes"], one["seconds"]
        yield titles[one["system"]], f"{peak / 1e6:.0f}", f"{peak / stock:.2f}", f"{1e3 * step:.0f}"


def hosts(results: Results) -> Iterator[Sequence[Any]]:
    """Seconds of commands by the number of hosts."""
    for one in results[0]:
        yield one["hosts"], one["client"], *(f"{one[name]:.1f}" for name in ("agents", "status", "collect", "stop"))


def kills(results: Results) -> Iterator[Sequence[Any]]:
    """Kills by role, and seconds without training."""
    (found,) = results[0]
    for row in found["rows"]:
        seconds = row["seconds"]
        late = seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))]
        role = row["role"].replace("_", " ")
        yield role, len(seconds), f"{statistics.median(seconds):.1f}", f"{late:.1f}", f"{seconds[-1]:.1f}"
    yield "all", f"{found['killed']} in {found['jobs']} jobs", f"{len(found['wrong'])} jobs with another result", "", ""


def renumbered(results: Results) -> Iterator[Sequence[Any]]:
    """A job that was not stopped, and those that go on with other numbers."""
    for one in results[0]:
        stopped = one["stopped_at"]
        yield (
            f"{one['parties']} x {one['workers']}", "not stopped" if stopped is None else f"{stopped} samples",
            f"{one['samples']} of {one['due']}", *("-" if one[name] is None else f"{one[name]:.3f}"
                                                   for name in ("loss_before", "loss_after")),
            f"{one['accuracy']:.3f}",
        )  # fmt: skip


def pauses(results: Results) -> Iterator[Sequence[Any]]:
    """How long training stands still while a job gets other numbers."""
    for network in dict.fromkeys(row["network"] for row in results[0]):
        rows = [row for row in results[0] if row["network"] == network]
        columns = [[row[name] for row in rows] for name in ("pause_s", "command_to_first_round_s")]
        yield f"`{network}`", *(middle(column, ".1f") for column in columns)


def absences(results: Results) -> Iterator[Sequence[Any]]:
    """A party that is cut off, and comes back."""
    for row in results[0]:
        skipped = max(row["skipped"].values()) / max(row["calm_samples"].values())
        yield (
            f"`{row['algorithm']}`", f"{row['until_out_s']:.0f}", f"{row['until_back_s']:.1f}", f"{row['others']:.0%}",
            f"{skipped:.0%}", f"{row['accuracy']:.3f}", f"{row['calm_accuracy']:.3f}",
        )  # fmt: skip


def faults(results: Results) -> Iterator[Sequence[Any]]:
    """A job with faults and without."""
    (row,) = results[0]
    kinds = ", ".join(f"{row[kind]} {name}" for kind, name in (("kill", "kills"), ("stop", "stops"), ("cut", "cuts")))
    yield "none", "", row["calm_rounds"], f"{row['calm_samples_per_s']:,.0f}", "", ""
    first, last = row["losses"]
    kept = f"{row['kept']:.1%}"
    yield kinds, row["restarts"], row["rounds"], f"{row['samples_per_s']:,.0f}", kept, f"{first:.3f} to {last:.3f}"


def decoupled(results: Results) -> Iterator[Sequence[Any]]:
    """Times to accuracies with a slow party and kills."""
    for row in results[0]:
        times = ["-" if seconds is None else f"{seconds:.1f}" for seconds in row["reached_s"].values()]
        others = f"{row['others_samples_s']:,.0f}"
        yield f"`{row['algorithm']}`", *times, others, row["restarts"], f"{row['accuracy']:.3f}"


MODELS = {
    "cnn": "PyTorch: a CNN", "lm": "PyTorch: a language model", "gan": "PyTorch: a GAN, two optimizers",
    "trainer": "MXNet: Gluon's Trainer", "module": "MXNet: `Module.fit`",
}  # fmt: skip
"""Of users' scripts whose processes are killed."""


def script_kills(results: Results) -> Iterator[Sequence[Any]]:
    """Models by algorithms: kills, and how many jobs end with other bits."""
    for row in (row for found in results for row in found):
        model, _, algorithm = row["row"].partition("/")
        wrong = len(row["wrong"])
        yield MODELS[model], algorithm, row["kills"], row["jobs"], f"{row['jobs'] - wrong} of {row['jobs']}"


def recovery_of_peers(results: Results) -> Iterator[Sequence[Any]]:
    """Of each system: whether it goes on, seconds of standing still and of the killed worker, steps, state, lines."""
    for row in results[0]:
        after = row["after_kills"]
        still, back = (_each(after, name) for name in ("still", "back"))
        if row["goes_on"] != "yes":
            yield row["title"], row["goes_on"], still, back, "", "", "", "", "", row["lines"]
            continue
        right = ["-" if None in (found := [each[name] for each in after]) else "yes" if all(found) else "no"
                 for name in ("rate", "data")]  # fmt: skip
        off = row["difference"]
        weights = "-" if off is None else f"differ by {off:.2g}" if off else "same bits"
        yield row["title"], "yes", still, back, f"{row['lost']:g}", f"{row['again']:g}", *right, weights, row["lines"]


def _each(found: Sequence[Mapping[str, Any]], name: str) -> str:
    return ", ".join("-" if each[name] is None else f"{each[name]:.1f}" for each in found)


def saving(results: Results) -> Iterator[Sequence[Any]]:
    """Milliseconds of saving ResNet-18, and of starting a process."""
    (found,) = results[0]
    for row in found["write"]:
        yield f"{row['where']}: {WRITES[row['what']]}", _spread(row)
    for row in found["start"]:
        yield f"start of a {row['kind']}, with its imports", _spread(row)


def rounds_saved(results: Results) -> Iterator[Sequence[Any]]:
    """Times of a round without and with saving, and memory by role with it."""
    for command in results:
        for off, on in zip(command[::2], command[1::2], strict=True):
            more = [100 * (b / a - 1) for a, b in zip(off["all_seconds"], on["all_seconds"], strict=True)]
            yield (
                off["rate"] or "loopback", *(middle(one["all_seconds"], ".0f", 1e3) for one in (off, on)),
                middle(more, ".1f"),
                *(f"{on['peak_bytes'][role] / 1e6:.0f} + {on['saved_bytes'][role] / 1e6:.0f}"
                  for role in ("server", "global_server")),
            )  # fmt: skip


def _spread(row: Mapping[str, Any]) -> str:
    return f"{row['median_ms']:.0f} [{row['lowest_ms']:.0f}, {row['highest_ms']:.0f}]"


WRITES = {
    "pwritev": "46.8 MB by `pwritev`", "commit of 1": "46.8 MB to a state file",
    "commit of 3": "3 \u00d7 46.8 MB to a state file",
}  # fmt: skip
CODECS = ("", "fp16", "int8", "q4", "bsc:0.01", "sparseloco")
PUSHPULL = PYTHON + "pushpull.py --system store"
SHORT = "--iterations 3 --warm-up 1"
SYSTEMS_COMPARED = (
    "geomx-fsa geomx-ddp geomx-diloco geomx-shards geomx-reduce geomx-central two-level torchft-local-sgd"
    " torchft-diloco ddp hivemind flower geomx-fsa-fp16 two-level-fp16 hivemind-fp16"
)
LOOPBACK = "--epochs 2 --rate '' --rtt ''"
TABLES: Sequence[Table] = (
    Table(
        "exchange-loopback", "exchange.md",
        [PYTHON + "pushpull.py --topology flat central --system client store mxnet --repeat 3"],
        ["", "ms", "to MXNet's time", "CPU ms of the workers", "peak MB of a worker / server / global server"],
        loopback, "Medians of 3 runs of 20 exchanges [lowest, highest].", 2,
    ),
    Table(
        "exchange-wan", "exchange.md",
        [PUSHPULL + " mxnet --topology central spread --rate 200mbit --iterations 2 --warm-up 1 --repeat 3",
         PUSHPULL + " mxnet --topology spread --rate 200mbit --iterations 2 --warm-up 1 --workers 4"],
        ["", "workers in each party", "s", "MB sent by a party", "to the wire limit", "to MXNet's best"],
        wide, "Medians of 3 runs of 2 exchanges [lowest, highest]. Numbers without brackets are from one run."
        " MXNet's best is its shortest time with the same command.", 6,
    ),
    Table(
        "peers", "exchange.md", [TORCH + f"peers.py --iterations 3 --system {SYSTEMS_COMPARED}"],
        ["", "200 Mbit/s: s, ratio", "100 Mbit/s, 50 ms: s, ratio", "MB sent by a party"], peers,
        "Medians of 3 exchanges [lowest, highest], and the ratio to the wire limit of the same run.", 12,
    ),
    Table(
        "exchange-codecs", "exchange.md",
        [f"{PUSHPULL} --topology spread --rate {rate} {SHORT}" + f" --set compress={spec}" * bool(spec)
         for spec in CODECS for rate in ("200mbit", "50mbit")],
        ["SPEC", "MB sent by a party", "200 Mbit/s: s, ratio", "50 Mbit/s: s, ratio"], encoded,
        "One run of 3 exchanges each, and the ratio to the wire limit of the encoded bytes.", 4,
    ),
    Table(
        "codec-speed", "exchange.md", [PYTHON + "codec_speed.py", PYTHON + "codec_speed.py --fast"],
        ["SPEC", "encode: ms", "decode: ms", "encode, fast: ms", "decode, fast: ms", "bytes", "ratio"], speeds,
        "The best of 10 passes.", 1,
    ),
    Table(
        "p3", "exchange.md",
        [PYTHON + f"delivery.py --model {model} --megabytes {size} --rate 200mbit --rtt 30ms --ratio 1.0"
         " --systems plain p3 mxnet --iterations 2 --warm-up 1" for model, size in (("resnet50", 0), ("vgg19", 150))],
        ["", "the exchange alone: s", "a step: s", "with `--p3`: s", "MXNet: s", "times as fast, and upper bound"],
        layers, "Means of 2 steps in one run.", 4,
    ),
    Table(
        "tsengine", "exchange.md",
        [PYTHON + "delivery.py --spoke 100mbit --rate 400mbit --warm-up 4 --iterations 6 --runs 3"],
        ["directly: s", "with TSEngine: s", "times as fast"], spokes,
        "Medians of 3 runs of 6 exchanges [lowest, highest].", 3,
    ),
    Table(
        "dgt", "exchange.md",
        [PYTHON + "delivery_lossy.py --congestion reno bbr --wait 100ms --iterations 2 --warm-up 1"],
        ["TCP's congestion control", "directly: s", "with `--dgt 1`: s", "times as fast"], lossy,
        "One run of 2 exchanges each.", 2,
    ),
    Table(
        "worker-memory", "exchange.md", [PYTHON + "worker_memory.py --steps 100"],
        ["", "peak MB of a worker", "to MXNet's", "ms a step"], memory, "One run each.", 1,
    ),
    Table(
        "kills", "recovery.md", [PYTHON + "recovery.py --kills 200 --seed 4"],
        ["", "kills", "median: s", "95 %: s", "longest: s"], kills,
        "Seconds from a kill to the end of the next round, less the longest time between two rounds without kills.", 8,
    ),
    Table(
        "script-kills", "recovery.md", [TORCH + "recovery_scripts.py", PYTHON + "recovery_scripts.py"],
        ["script", "algorithm", "kills", "jobs", "jobs with the same bits"], script_kills,
        "20 kills of workers and servers for each row.", 20,
    ),
    Table(
        "recovery-peers", "recovery.md", [TORCH + "recovery_peers.py"],
        ["", "goes on", "the other stands still: s", "killed one is back: s", "steps lost", "steps again",
         "learning rate right", "data position right", "final weights", "lines"],
        recovery_of_peers, "One run with 3 kills, and one without.", 20,
    ),
    Table(
        "recovery-costs", "recovery.md", [PYTHON + "recovery_costs.py --only write start"], ["", "ms"], saving,
        "Medians of 20 [lowest, highest].", 2,
    ),
    Table(
        "round-costs", "recovery.md",
        [f"{PYTHON}pushpull.py --topology central --saving off on {more}"
         for more in ("--repeat 9", "--rate 200mbit --iterations 3 --warm-up 1 --repeat 5")],
        ["link of a party", "a round without saving: ms", "a round with saving: ms", "more: %",
         "a server: MB + MB saved", "a global server: MB + MB saved"], rounds_saved,
        "Medians [lowest, highest] of 9 pairs of runs of 20 rounds on loopback, of 5 pairs of 3 rounds on the link.",
        5,
    ),
    Table(
        "faults", "recovery.md", [PYTHON + "faults.py"],
        ["faults", "restarts", "rounds", "samples/s", "kept", "training loss"], faults,
        "One run of 30 minutes of both jobs at the same time.", 32,
    ),
    Table(
        "decoupled", "recovery.md", [PYTHON + "decoupled.py --network cnn"],
        ["", *(f"s to {accuracy:.2f}" for accuracy in (0.7, 0.8, 0.85, 0.88)), "samples/s of the fast parties",
         "restarts", "accuracy at the end"],
        decoupled, "One run of both jobs at the same time. \"-\" means: not reached.", 6,
    ),
    Table(
        "party-loss", "recovery.md", [PYTHON + "party_loss.py"],
        ["", "left out after: s", "back after its return: s", "others' rounds meanwhile", "samples skipped by it",
         "accuracy", "without faults"],
        absences, "One run of each pair of jobs.", 21,
    ),
    Table(
        "other-numbers", "recovery.md", [PYTHON + "other_numbers.py --to docs/figures/other-numbers.png"],
        ["parties x workers", "continues after", "trained on, of all jobs", "loss before", "loss after", "accuracy"],
        renumbered, "One run of each job.", 2,
    ),
    Table(
        "scale", "recovery.md", [PYTHON + "scale.py --repeats 5"],
        ["network", "pause: s", "from the command to the first round: s"], pauses, "Medians of 5 [lowest, highest].", 4,
    ),
    Table(
        "hosts", "exchange.md", [PYTHON + "sites.py --hosts 4,16,64 --client paramiko,openssh"],
        ["hosts", "client", "until all agents run: s", "`geomx status`: s", "`geomx logs collect`: s",
         "`geomx stop`: s"], hosts,
        "One run each.", 4,
    ),
    Table(
        "accuracy", "accuracy.md",
        [PYTHON + "time_to_accuracy.py --curve --algo hfa diloco esync diloco-sparseloco",
         PYTHON + "time_to_accuracy.py --curve --algo default mxnet --seeds 1"],
        ["", "s to 0.80", "times as fast", "WAN MB", "s to 0.87", "times as fast", "WAN MB", "accuracy at the end"],
        accuracy, "Medians of 3 seeds [lowest, highest]. Times without brackets are from one seed. Bytes are from the"
        ' run with the median time. "-" means: not reached.', 15,
    ),
    Table(
        "accuracy-by-party", "accuracy.md",
        [PYTHON + f"time_to_accuracy.py --task by-party --algo default hfa diloco esync {LOOPBACK}"],
        ["", "steps to 0.80", "accuracy at the end"], parted,
        "Of 3 seeds: the steps of the run with the median time, and the median accuracy [lowest, highest].", 5,
    ),
    Table(
        "accuracy-codecs", "accuracy.md",
        [PYTHON + "time_to_accuracy.py --codecs --codec none q4 bsc:0.01,pull=union sparseloco --algo fsa diloco"
         f" {LOOPBACK}"],
        ["SPEC", "`fsa`", "`diloco`"], finals, "Medians of 3 seeds [lowest, highest].", 6,
    ),
    Table(
        "language-model", "language-model.md",
        [TORCH + "language_model.py --row single diloco-1024 fsa ddp --steps 12000"],
        ["", "validation loss", "to one process", "s", "computing", "WAN MB"], losses, "One run each.", 12,
    ),
    Table(
        "frameworks", "language-model.md", [FRAMEWORKS + "frameworks.py"],
        ["", "loss", "to one process", "s", "WAN MB"], frameworks, "One run each.", 4,
    ),
)  # fmt: skip
"""`minutes` are on two cores. Estimates are sums of measured exchanges, steps and starts."""
