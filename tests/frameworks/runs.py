"""Runs of scripts/ by geomx and, as the control, with gloo as under torchrun."""

import json
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forks
import numpy as np
from cluster import free_ports
from desk import Desk
from forked_launch import ForkedLaunch
from rehearsal import Rehearsal

from geomx_cli.core.root_cause import Failure

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT = 500
"""Seconds of a run; it takes some, but the machine may be loaded."""
TWO = ("--local", "--parties", "2", "--workers", "1")


@dataclass
class Runs:
    """Scripts with two workers, each in a folder of the desk's. Processes are forked from one that has imported the
    frameworks, which takes longer than most scripts, unless a function says otherwise.
    """

    desk: Desk

    @property
    def folder(self) -> Path:
        """Of results and jobs."""
        return self.desk.folder

    def control(self, script: str, *words: str, imported: str = "frameworks") -> list[dict[str, Any]]:
        """What both workers keep with gloo and the variables of torchrun."""
        (port,) = free_ports(1)
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        own |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
        argv = [str(SCRIPTS / script), str(self.folder / "control"), *words]
        started = []
        for rank in ("0", "1"):
            env = {**self.desk.environment, **own, "RANK": rank, "LOCAL_RANK": rank}
            log = self.folder / f"control{rank}.log"
            started.append((log, forks.server(imported).start(argv, env, self.folder, log)))
        assert all(process.wait(LIMIT) == 0 for _, process in started), [log.read_text() for log, _ in started]
        return self.kept("control")

    def job(
        self, script: str, *words: str, options: str = "", name: str = "job", late: Container[str] = ()
    ) -> list[dict[str, Any]]:
        """What both workers keep in a job of two parties with one worker each. late: see Rehearsal."""
        self._rehearsed(script, words, options, name, late).finish(LIMIT)
        return self.kept(name)

    def failure(self, script: str, *words: str, options: str) -> Failure:
        """Why a job fails."""
        return self._rehearsed(script, words, options, "job").failure(LIMIT)

    def supervised(self, script: str, *words: str, options: str = "", name: str = "job") -> list[dict[str, Any]]:
        """As `job`, under agents, which start workers again."""
        launch = (*TWO, *options.split(), "--json", "--job-dir", str(self.folder / f"{name}.job"), "--")
        script_words = ("python", str(SCRIPTS / script), str(self.folder / name), *words)
        launched = ForkedLaunch.begin(self.desk, *launch, *script_words, imported="frameworks")
        assert launched.finish(LIMIT) == 0, launched.errors
        return self.kept(name)

    def events(self, kind: str, process: str = "A-worker-0", name: str = "job") -> list[dict[str, Any]]:
        """Events of a job's worker."""
        path = self.folder / f"{name}.job/events/{process}.jsonl"
        return [event for event in map(json.loads, path.read_text().splitlines()) if event["event"] == kind]

    def log(self, process: str = "A-worker-0", name: str = "job") -> str:
        """The output of a job's process."""
        return (self.folder / f"{name}.job/logs/{process}.log").read_text()

    def kept(self, name: str) -> list[dict[str, Any]]:
        """What both workers of a run keep."""
        found = []
        for rank in range(2):
            with np.load(self.folder / name / f"{rank}.npz") as file:
                found.append(dict(file))
        return found

    def _rehearsed(
        self, script: str, words: tuple[str, ...], options: str, name: str, late: Container[str] = ()
    ) -> Rehearsal:
        argv = ["--", "python", str(SCRIPTS / script), str(self.folder / name), *words]
        job = (*TWO, *options.split(), "--job-dir", str(self.folder / f"{name}.job"))
        return Rehearsal(self.desk, *job, *argv, imported="frameworks", late=late)
