"""A script that exchanges nothing at the time gets the job's failure in its own code, once."""

import subprocess
import sys

import pytest
from cluster import ROOT

pytestmark = pytest.mark.processes

SCRIPT = r"""if True:
    import os, sys, time
    from geomx_cli.core import plugins
    from geomx_cli.core.errors import PeerLost
    from geomx_cli.core.event_log import EventLog
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime import standalone
    from geomx_cli.runtime.script.ending import FailureNotice
    from geomx_cli.contract.settings import Settings

    def say(text):
        os.write(1, text.encode() + b"\n")

    standalone.begin()
    settings = Settings.from_environment(plugins.table())
    client = Client(settings, EventLog(None), plugins.deliveries()["direct"].worker())
    FailureNotice(client, lambda failure: say(f"told: {failure.message}"), lambda: False)
    node = client._worker.node
    node.loop.submit(lambda: node.fail(PeerLost("B/worker:0 failed", "", peer="B/worker:0")))
    try:
        if sys.argv[1] == "exchanges":
            while True:
                client.control.barrier("party")
        while True:
            time.sleep(60) if sys.argv[1] == "sleeps" else sum(range(1000))
    except PeerLost as error:
        say(f"met: {error.message}")
        try:
            time.sleep(2)
            say("saved")
        finally:
            os._exit(0)
"""


@pytest.mark.parametrize("what", ["sleeps", "computes", "exchanges"])
def test_the_failure_is_raised_where_the_script_is_and_no_more_while_it_saves(what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, what], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    *first, last = done.stdout.splitlines()
    assert sorted(first) == ["met: B/worker:0 failed", "told: B/worker:0 failed"] and last == "saved", done.stderr
