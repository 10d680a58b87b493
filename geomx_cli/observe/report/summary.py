"""A run's results: the JSON of ESync's own tools, and summary.json with additional data."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.events import VALIDATION_LOSS
from geomx_cli.core.files import write_atomic
from geomx_cli.observe.report.modes import title
from geomx_cli.observe.report.record import WorkerRecords
from geomx_cli.observe.report.run_records import RunRecords

__all__ = ["SUMMARY_VERSION", "Reached", "Summary", "original", "write"]

SUMMARY_VERSION = 1
MEBIBYTES_OF_RESNET18 = 42.6
WORKERS_OF_ESYNC = 6


@dataclass(frozen=True)
class Reached:
    """The first evaluation that reached the target. None means unknown.

    bytes: the bytes that all workers had sent and received by then.
    wan_bytes: the bytes sent between the parties by then.
    """

    seconds: float
    accuracy: float
    bytes: int | None
    wan_bytes: int | None


@dataclass(frozen=True)
class Summary:
    """The results of a run. None, and an outcome of "", mean unknown: the value is not in the records.

    seconds: of the worker that trained longest.
    samples_per_s: of all workers.
    busy: the fraction of its training in which a worker computed, averaged over all workers.
    goodput: the share of a worker's time spent on training that was kept, averaged over all workers.
    bytes: the bytes that all workers sent and received.
    wan_bytes: the bytes sent between the parties.
    traffic: bytes in both directions per second, in MB/s.
    outcome: see Metadata.

    With `parity`, samples_per_s and traffic are computed as by ESync's plotting tool. traffic is then in MiB/s:
    ResNet-18's size times rounds, pushes only, over the time of one worker. busy is then the fraction of the time
    outside the exchange.
    """

    network: str
    mode: str
    workers: int
    rounds: int
    samples: int
    seconds: float
    samples_per_s: float | None
    traffic: float | None
    busy: float | None
    bytes: tuple[int, int] | None
    wan_bytes: int | None
    accuracy: float | None
    target: float
    reached: Reached | None
    parity: bool
    validation_loss: float | None = None
    outcome: str = ""
    goodput: float | None = None

    @classmethod
    def of(cls, run: RunRecords, target: float, *, parity: bool) -> "Summary":
        """Summarize the readable records. Times are times of raw points: nothing is smoothed."""
        workers = list(run.each())
        seconds = max(worker.seconds for worker in workers)
        samples = sum(sum(worker.samples) for worker in workers)
        ways = [(one.sent or 0, one.received or 0) for one in workers if (one.sent, one.received) != (None, None)]
        total = (sum(sent for sent, _ in ways), sum(received for _, received in ways)) if ways else None
        evaluator = run.evaluator
        first = next((point for point in evaluator.accuracies if point[1] >= target), None)
        rate, traffic = _per(samples, seconds), None if total is None else _per(sum(total), 1e6 * seconds)
        if parity:
            rate, traffic = _original_rate(samples, workers), _original_traffic(run.mode, workers, evaluator)
        parts = [_original_busy(one) if parity else one.busy for one in workers]
        busy = [part for part in parts if part is not None]
        of_script = run.metadata.rounds if run.metadata is not None else 0
        return cls(
            network=run.network, mode=run.mode, workers=len(workers),
            rounds=of_script or max(worker.rounds for worker in workers), samples=samples, seconds=seconds,
            samples_per_s=rate, traffic=traffic,
            busy=sum(busy) / len(busy) if busy else None,
            bytes=total, wan_bytes=run.metadata.total if run.metadata is not None else None,
            validation_loss=_validation_loss(workers),
            outcome=run.metadata.outcome if run.metadata is not None else "",
            goodput=run.goodput,
            target=target, accuracy=evaluator.accuracies[-1][1] if evaluator.accuracies else None, parity=parity,
            reached=None if first is None
            else Reached(*first, run.bytes_by(first[0]), run.wan_bytes_by(first[0])),
        )  # fmt: skip

    def to_json(self, run: RunRecords) -> dict[str, Any]:
        """Return the summary with each worker's own figures."""
        fields = asdict(self)
        return {
            "schema_version": SUMMARY_VERSION,
            "parity": self.parity,
            **{name: fields[name] for name in ("network", "mode", "rounds", "samples", "seconds", "samples_per_s")},
            "outcome": self.outcome or None,
            "traffic": self.traffic,
            "busy": self.busy,
            "goodput": self.goodput,
            "bytes": {**_both_ways(self.bytes), "wan": self.wan_bytes},
            "accuracy": self.accuracy,
            "validation_loss": self.validation_loss,
            "target": {"accuracy": self.target, "reached": fields["reached"]},
            "workers": {
                host: {
                    device: {**_own(worker), "goodput": run.goodputs.get(f"{host}/{device}")}
                    for device, worker in devices.items()
                }
                for host, devices in run.workers.items()
            },
            "problems": run.problems,
            "warnings": run.warnings,
        }


def original(run: RunRecords) -> dict[str, Any]:
    """Return the object that ESync's summary.py writes for the same records."""
    return {
        host: {
            device: {
                "accuracy_list": [round(point[1], 3) for point in worker.accuracies if point[1]],
                "num_samples_list": worker.samples.tolist(),
                "self_iters_list": worker.steps.tolist(),
                "elapsed_time_list": [round(seconds) for seconds in worker.elapsed],
                "aggregate_time_list": worker.aggregation.tolist(),
            }
            for device, worker in devices.items()
        }
        for host, devices in run.workers.items()
    }


def write(run: RunRecords, summary: Summary) -> list[Path]:
    """Write both files next to the hosts' folders; return their paths. Raises CheckFailed on failure."""
    contents = {f"{title(run.mode)}.json": original(run), "summary.json": summary.to_json(run)}
    paths = []
    for name, content in contents.items():
        paths.append(run.folder / name)
        try:
            write_atomic(paths[-1], json.dumps(content).encode())
        except OSError as error:
            raise CheckFailed(f"cannot write {paths[-1]}: {error.strerror}", "free space or fix permissions") from None
    return paths


def _own(worker: WorkerRecords) -> dict[str, Any]:
    return {
        "rounds": worker.rounds,
        "samples": sum(worker.samples),
        "seconds": worker.seconds,
        "compute": worker.compute,
        "communicate": worker.communicate,
        "wait": worker.wait,
        "bytes": _both_ways((worker.sent, worker.received)),
        "accuracy": [{"seconds": seconds, "accuracy": accuracy} for seconds, accuracy in worker.accuracies],
        "validation_loss": [
            {"seconds": seconds, "validation_loss": value if math.isfinite(value) else None}
            for seconds, value in zip(*worker.metrics.get(VALIDATION_LOSS, ((), ())), strict=True)
        ],
    }


def _validation_loss(workers: list[WorkerRecords]) -> float | None:
    """Return the last value, as the mean over the workers that have one. None if none has, or if one is not finite."""
    last = [column[1][-1] for one in workers if (column := one.metrics.get(VALIDATION_LOSS)) is not None]
    return sum(last) / len(last) if last and all(map(math.isfinite, last)) else None


def _both_ways(counts: tuple[int | None, int | None] | None) -> dict[str, int | None]:
    sent, received = counts or (None, None)
    return {"sent": sent, "received": received}


def _per(count: float, seconds: float) -> float | None:
    return count / seconds if seconds else None


def _original_rate(samples: int, workers: list[WorkerRecords]) -> float:
    return float(int(_per(samples, round(workers[0].seconds)) or 0))


def _original_traffic(mode: str, workers: list[WorkerRecords], evaluator: WorkerRecords) -> float:
    if mode.startswith(("async", "dcasgd")):  # the asynchronous modes in ESync's plotting tool
        rounds, seconds = sum(len(worker.steps) for worker in workers), workers[0].seconds
    else:
        rounds, seconds = len(evaluator.accuracies) * WORKERS_OF_ESYNC, evaluator.seconds
    return float(int(_per(rounds * MEBIBYTES_OF_RESNET18, round(seconds)) or 0))


def _original_busy(worker: WorkerRecords) -> float:
    return 1.0 - (_per(sum(worker.aggregation), round(worker.seconds)) or 0.0) if worker.seconds else 0.0
