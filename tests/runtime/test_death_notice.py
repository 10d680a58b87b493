"""What an agent has a scheduler told of a process that has ended and cannot do so itself."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cluster import clean_environment, free_ports

from geomx_cli.core import plugins
from geomx_cli.core.errors import PeerLost
from geomx_cli.core.event_log import EventLog
from geomx_cli.core.module_command import module_command
from geomx_cli.core.options import defaults
from geomx_cli.ps.cluster.config import PlaneSettings
from geomx_cli.ps.cluster.scheduler import Scheduler
from geomx_cli.runtime.settings import Settings

pytestmark = pytest.mark.processes


def test_a_worker_that_died_before_it_joined_ends_the_wait_for_it(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    plane = PlaneSettings("127.0.0.1", port, 1, 1)
    common = {"local": plane, "job": "j", "job_dir": str(tmp_path), "party": "A", "options": defaults()}
    own = Settings(role="scheduler", process="A/scheduler:0", bind=(f"tcp://127.0.0.1:{port}",), **common)  # type: ignore[arg-type]
    scheduler, ended = Scheduler(own, plane, EventLog(None)), list[PeerLost]()

    def run() -> None:
        try:
            scheduler.run()
        except PeerLost as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    worker = Settings(role="worker", process="A/worker:0", rank=0, **common)  # type: ignore[arg-type]
    command = module_command(sys.executable, "geomx_cli.runtime.death_notice", "was killed by SIGKILL", "see dmesg")
    env = {**clean_environment(), **worker.to_environment(plugins.table())}
    assert subprocess.run(command, env=env, check=False, timeout=60).returncode == 0
    thread.join(60)
    assert [(error.message, error.hint, error.peer) for error in ended] == [
        ("A/worker:0 was killed by SIGKILL", "see dmesg", "A/worker:0")
    ]
