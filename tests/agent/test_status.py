"""What an agent's status keeps of the events of its processes."""

from pathlib import Path

from geomx_cli.agent.host_spec import HostSpec, Task
from geomx_cli.agent.status import StatusFile
from geomx_cli.core.conventions import JobClock


def test_of_warnings_the_first_that_affects_the_result_is_kept(tmp_path: Path) -> None:
    spec = HostSpec("job-1", "A", str(tmp_path), "/s", "/s/a", "", (), (Task("A/worker:0", (), {}),))
    status = StatusFile(tmp_path, spec, JobClock(), lambda message: None)
    for number, (message, affects) in enumerate([("slow", False), ("the loss is nan", True), ("and again", True)], 1):
        event = {"event": "warning", "time": 7.0, "number": number, "message": message, "affects_result": affects}
        status.record_event("A/worker:0", event)
    assert status._newest["A/worker:0"] == {
        "warning": {"event": "warning", "time": 7.0, "number": 2, "message": "the loss is nan", "affects_result": True}
    }
