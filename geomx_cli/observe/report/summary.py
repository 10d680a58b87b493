"""A trial's results: the JSON of ESync's own tools, and summary.json with additional data."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from geomx_cli.core.atomic import write_atomic
from geomx_cli.core.errors import CheckFailed
from geomx_cli.observe.report.record import WorkerRecords
from geomx_cli.observe.report.run_records import RunRecords, title

__all__ = ["SUMMARY_VERSION", "Reached", "Summary", "original", "write"]

SUMMARY_VERSION = 1
MEBIBYTES_OF_RESNET18 = 42.6
WORKERS_OF_ESYNC = 6


@dataclass(frozen=True)
class Reached:
    """The first evaluation that reached the target. `bytes`: what all workers had sent and received by then;
    wan_bytes: what had been sent between the parties, None if unknown.
    """

    seconds: float
    accuracy: float
    bytes: int
    wan_bytes: int | None


@dataclass(frozen=True)
class Summary:
    """seconds: of the worker that trained longest. samples_per_s: of all workers. busy: fraction of its training that a
    worker computed, averaged over all; bytes: what all workers sent, and received; wan_bytes: what was sent between the
    parties, None if unknown.

    With `parity` samples_per_s is computed as ESync's plotting tool does it, and so is traffic, in MiB/s: ResNet-18's
    size times rounds, pushes only, over the time of one worker; else traffic is bytes in both directions per second, in
    MB/s. busy is then the fraction of the time outside the exchange.
    """

    network: str
    mode: str
    workers: int
    rounds: int
    samples: int
    seconds: float
    samples_per_s: float
    traffic: float
    busy: float
    bytes: tuple[int, int]
    wan_bytes: int | None
    accuracy: float | None
    target: float
    reached: Reached | None
    parity: bool

    @classmethod
    def of(cls, trial: RunRecords, target: float, *, parity: bool) -> "Summary":
        """Summarize the readable records. Times are those of raw points: nothing is smoothed."""
        workers = list(trial.each())
        seconds = max(worker.seconds for worker in workers)
        samples = sum(sum(worker.samples) for worker in workers)
        sent, received = (sum(getattr(worker, way) for worker in workers) for way in ("sent", "received"))
        evaluator = trial.evaluator
        first = next((point for point in evaluator.accuracies if point[1] >= target), None)
        rate, traffic = _per(samples, seconds), _per(sent + received, seconds) / 1e6
        if parity:
            rate, traffic = _original_rate(samples, workers), _original_traffic(trial.mode, workers, evaluator)
        busy = [_original_busy(one) if parity else _per(one.compute, one.seconds) for one in workers]
        return cls(
            network=trial.network, mode=trial.mode, workers=len(workers),
            rounds=max(len(worker.samples) for worker in workers), samples=samples, seconds=seconds,
            samples_per_s=rate, traffic=traffic,
            busy=sum(busy) / len(busy),
            bytes=(sent, received), wan_bytes=trial.metadata.total if trial.metadata is not None else None,
            target=target, accuracy=evaluator.accuracies[-1][1] if evaluator.accuracies else None, parity=parity,
            reached=None if first is None
            else Reached(*first, trial.bytes_by(first[0]), _wan_bytes(trial, first[0])),
        )  # fmt: skip

    def to_json(self, trial: RunRecords) -> dict[str, Any]:
        """Return the summary with each worker's own figures."""
        fields = asdict(self)
        return {
            "schema_version": SUMMARY_VERSION,
            "parity": self.parity,
            **{name: fields[name] for name in ("network", "mode", "rounds", "samples", "seconds", "samples_per_s")},
            "traffic": self.traffic,
            "busy": self.busy,
            "bytes": {"sent": self.bytes[0], "received": self.bytes[1], "wan": self.wan_bytes},
            "accuracy": self.accuracy,
            "target": {"accuracy": self.target, "reached": fields["reached"]},
            "workers": {
                host: {device: _own(worker) for device, worker in devices.items()}
                for host, devices in trial.workers.items()
            },
            "problems": trial.problems,
        }


def original(trial: RunRecords) -> dict[str, Any]:
    """Return what ESync's summary.py writes for the same records."""
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
        for host, devices in trial.workers.items()
    }


def write(trial: RunRecords, summary: Summary) -> list[Path]:
    """Write both files next to the hosts' folders; return their paths. Raises CheckFailed on failure."""
    contents = {f"{title(trial.mode)}.json": original(trial), "summary.json": summary.to_json(trial)}
    paths = []
    for name, content in contents.items():
        paths.append(trial.folder / name)
        try:
            write_atomic(paths[-1], json.dumps(content).encode())
        except OSError as error:
            raise CheckFailed(f"cannot write {paths[-1]}: {error.strerror}", "free space or fix permissions") from None
    return paths


def _own(worker: WorkerRecords) -> dict[str, Any]:
    return {
        "rounds": len(worker.samples),
        "samples": sum(worker.samples),
        "seconds": worker.seconds,
        "compute": worker.compute,
        "communicate": worker.communicate,
        "wait": worker.wait,
        "bytes": {"sent": worker.sent, "received": worker.received},
        "accuracy": [{"seconds": seconds, "accuracy": accuracy} for seconds, accuracy in worker.accuracies],
    }


def _per(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _wan_bytes(trial: RunRecords, seconds: float) -> int | None:
    return trial.metadata.bytes_by(seconds) if trial.metadata is not None else None


def _original_rate(samples: int, workers: list[WorkerRecords]) -> float:
    return float(int(_per(samples, round(workers[0].seconds))))


def _original_traffic(mode: str, workers: list[WorkerRecords], evaluator: WorkerRecords) -> float:
    if mode.startswith(("async", "dcasgd")):  # the asynchronous modes in ESync's plotting tool
        rounds, seconds = sum(len(worker.steps) for worker in workers), workers[0].seconds
    else:
        rounds, seconds = len(evaluator.accuracies) * WORKERS_OF_ESYNC, evaluator.seconds
    return float(int(_per(rounds * MEBIBYTES_OF_RESNET18, round(seconds))))


def _original_busy(worker: WorkerRecords) -> float:
    return 1.0 - _per(sum(worker.aggregation), round(worker.seconds)) if worker.seconds else 0.0
