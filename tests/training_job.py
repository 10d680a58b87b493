"""A whole bundled job in this process, whose workers may be killed, and then continue from their state."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from whole_job import WholeJob

from geomx_cli.contract.config import NodeSettings
from geomx_cli.core import plugins
from geomx_cli.core.errors import TrainingFailed
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.client import Client
from geomx_cli.ps.control_client import _in_loop as in_loop
from geomx_cli.ps.operation_queue import OperationQueue
from geomx_cli.runtime.bundled import job

EQUAL = ("parameters", "rounds", "samples", "stopped", "accuracy")


class Killed(BaseException):
    """The worker ends here."""


class TrainingJob(WholeJob):
    """A bundled job of two parties of two workers, each with a state directory; a killed one begins its next life.

    kills: of all workers. finished: the last event of each, by global rank. warnings: of all workers.
    """

    def __init__(self, folder: Path, *, recovers: bool = True, **options: Any) -> None:
        self.folder, self.kills = folder, 0
        self._recovers = recovers
        self.finished: dict[int, dict[str, Any]] = {}
        self.warnings: list[str] = []
        super().__init__(**{
            "network": "linear", "batch_size": 8, "epochs": 2, "compress_min": 16, "eval_every": 5, **options
        })  # fmt: skip

    def _work(self, settings: NodeSettings) -> None:
        folder = self.folder / settings.process.replace("/", "-")
        folder.mkdir(parents=True)
        log = folder / "events.jsonl"
        settings = replace(settings, state_dir=str(folder) if self._recovers else "")
        delivery: Any = plugins.find("delivery", str(settings.options["delivery"]))
        client = Client(settings, EventLog(log), delivery.worker())
        while True:
            try:
                job.main(client)
            except Killed:
                self.kills += 1
                forget(client)
            except Exception as error:
                client.close(TrainingFailed(repr(error)))  # else all wait for it
                raise
            else:
                break
        client.leave()
        client.close()
        events = [json.loads(line) for line in log.read_text().splitlines()]
        self.finished[client.global_rank] = next(event for event in events if event["event"] == "finished")
        self.warnings += [event["message"] for event in events if event["event"] == "warning"]

    def ends(self) -> list[Any]:
        """What must not depend on kills, by rank."""
        return results([self.finished[rank] for rank in sorted(self.finished)])


def results(events: Sequence[dict[str, Any]]) -> list[Any]:
    return [[event.get(name) for name in EQUAL] for event in events]


def forget(client: Client) -> None:
    """Leave nothing in a client but its connections."""
    worker, old = client._worker, client._worker.operations

    def replace_operations() -> None:
        worker.operations = OperationQueue(worker.node, worker.upstream, worker._delivery)
        worker.operations.contributors, worker.operations.compression = old.contributors, old.compression

    in_loop(worker, replace_operations)
    client.tensors.clear()
    client._left = False
    client.control.barriers = {"party": 0, "all": 0}
