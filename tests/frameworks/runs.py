"""Runs of scripts/ by geomx and, as the control, by torchrun or in one process."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cluster import ROOT, free_ports

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT = 500
"""Seconds of a run; it takes some, but the machine may be loaded."""


@dataclass
class Runs:
    """Scripts with two workers, each in a folder of `folder`."""

    folder: Path

    def control(self, script: str, *words: str) -> list[dict[str, Any]]:
        """What both workers keep by torchrun with gloo."""
        (port,) = free_ports(1)
        runner = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
        self._run([*runner, str(SCRIPTS / script), str(self.folder / "control"), *words])
        return self.kept("control")

    def job(self, script: str, *words: str, options: str = "", name: str = "job") -> list[dict[str, Any]]:
        """What both workers keep in a job of two parties with one worker each."""
        launch = ["launch", "--local", "--json", "--timeout", "5m", "--parties", "2", "--workers", "1"]
        launch += [*options.split(), "--job-dir", str(self.folder / f"{name}.job"), "--", "python"]
        argv = [sys.executable, "-m", "geomx_cli", *launch, str(SCRIPTS / script), str(self.folder / name), *words]
        assert json.loads(self._run(argv))["status"] == "done"
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

    def _run(self, argv: list[str]) -> str:
        own = {key: text for key, text in os.environ.items() if not key.startswith(("DMLC_", "GEOMX_"))}
        env = {**own, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            argv, cwd=self.folder, env=env, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        logs = [path.read_text()[-3000:] for path in sorted(self.folder.glob("*.job/logs/*worker*.log"))]
        assert done.returncode == 0, "\n".join((done.stdout[-3000:], done.stderr[-3000:], *logs))
        return done.stdout

