"""Record files of rounds in the format of ESync's own workers."""

import json
from pathlib import Path
from typing import Any

PHASES = {"get_batch": 0.01, "forward and backward": 0.05}


def write(folder: Path, number: int, record: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = record if isinstance(record, str) else json.dumps({"num_iters": number, **record})
    (folder / f"iter-{number}.txt").write_text(text)


def esync_record(number: int, steps: int, *, evaluator: bool) -> dict[str, Any]:
    """A round with 64 samples per step."""
    time = {str(step): PHASES | {"local update": 0.002} for step in range(steps)}
    record = {"time": {**time, str(steps): {"check ready": 0.001, "global update": 2.5}}, "num_samples": 64 * steps}
    return {**record, "total_time": 10.4 * number, **({"accuracy": 0.1 + 0.1234567 * number} if evaluator else {})}


def sync_record(number: int) -> dict[str, Any]:
    time = {"0": PHASES | {"global aggregate": 2.5}}
    return {"time": time, "num_samples": 64, "total_time": 10.4 * number, "accuracy": 0.1 + 0.1234567 * number}
