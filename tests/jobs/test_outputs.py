"""Outputs of processes: what an agent reports at their end, and what the summary says."""

import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plans import planned

from geomx_cli.agent import outputs, prune, streams
from geomx_cli.agent.host_spec import HostSpec, Task
from geomx_cli.agent.status import _bounded
from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.events import OutputsWritten, parse
from geomx_cli.core.files import open_below
from geomx_cli.core.jsonlines import read_objects
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.jobs.view.result import Outcome, in_words, result
from geomx_cli.plan import Plan
from geomx_cli.runtime.bundled import checkpoint


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Task]:
    """A worker whose output folder has files, and much that is none."""
    folder = tmp_path / "outputs" / "A-worker-0"
    (folder / "deep").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    for name in ("a", "deep/b", "model.bin"):
        (folder / name).write_text(name)
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "deep/up").symlink_to(tmp_path)
    (folder / "model.bin.0123abcd.part").touch()
    os.mkfifo(folder / "pipe")
    yield Task("A/worker:0", (sys.executable,), {"GEOMX_OUTPUT_DIR": str(folder), "GEOMX_RANK": "0"})


def spec(task: Task, job_dir: Path) -> HostSpec:
    return HostSpec("job-1", "A", str(job_dir), "/s", "/s/a", "", (), (task,))


def test_files_are_listed_and_links_and_pipes_left_out(task: Task, tmp_path: Path) -> None:
    files, left_out = outputs.outputs(spec(task, tmp_path))
    assert [(file["name"], file["size"]) for file in files] == [("a", 1), ("model.bin", 9), ("deep/b", 6)]
    told = "\n".join(left_out)
    assert len(left_out) == 3 and "/link: a link" in told and "/pipe: a pipe" in told and "/deep/up: a link" in told


@pytest.mark.parametrize("name", ["../secret", "deep/../a", "/etc/passwd", "", "a/", "link", "deep/up/secret", "pipe"])
def test_nothing_else_is_opened(task: Task, name: str) -> None:
    folder = outputs.folder_of(task)
    assert folder is not None
    with pytest.raises(CheckFailed):
        open_below(folder, name)
    with open_below(folder, "deep/b") as file:
        assert file.read() == b"deep/b"


def answer_to(task: Task, folder: Path, **request: object) -> bytes:
    """What the host answers to a request for a file."""
    out, asked = io.BytesIO(), {"process": task.name, "offset": 0, "sha256": "", **request}
    streams.answer(streams.Outputs(spec(task, folder)), json.dumps(asked).encode(), out)
    return out.getvalue()


def test_a_request_for_what_has_vanished_is_answered_with_a_problem(task: Task, tmp_path: Path) -> None:
    for request in ({"name": "gone"}, {"name": "a", "process": "B/worker:0"}):
        (answer,) = answer_to(task, tmp_path, **request).splitlines()
        assert json.loads(answer)["problem"]
    whole = answer_to(task, tmp_path, name="a")
    assert answer_to(task, tmp_path, name="a", offset=2) == whole, "it has become shorter"


def test_the_end_of_a_process_is_followed_by_its_outputs(task: Task, tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    folder = Path(task.env["GEOMX_OUTPUT_DIR"])
    for number in range(9):
        (folder / f"b{number}").write_text("12")
    (folder / "model.two").touch()
    assert outputs.record(task, log, 7.0) is None
    ((fields, _),) = read_objects(log)
    event = parse(fields)
    assert isinstance(event, OutputsWritten) and (event.count, event.bytes, event.time) == (13, 34, 7.0)
    assert list(event.files)[:3] == ["model.bin", "model.two", "a"] and len(event.files) == 8
    assert _bounded(fields["files"]) == fields["files"], "status.json has them too"
    log.unlink()
    log.symlink_to(tmp_path / "secret")
    unwritten = outputs.record(task, log, 7.0)
    assert unwritten is not None and unwritten["count"] == 13, "its agent reports it without the log"
    assert (tmp_path / "secret").read_text() == "secret"


def test_what_was_saved_on_another_disk_is_listed_sent_told_and_pruned(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "DISKS", (str(tmp_path / "tmp"),))
    monkeypatch.setattr(checkpoint, "LIMIT", 0.0)
    monkeypatch.setattr(checkpoint, "_PAUSE", 0.0)
    (tmp_path / "tmp").mkdir()
    folder = Path(task.env["GEOMX_OUTPUT_DIR"])

    def write(place: Path) -> None:
        if place == folder:
            raise OSError(28, "No space left on device")
        (place / "model.bin").write_text("newer than the other")

    place = checkpoint.save_at_last(folder, write, lambda _: None, "the model")
    files, _ = outputs.outputs(spec(task, tmp_path))
    assert [(file["name"], file["size"]) for file in files] == [("model.bin", 20), ("a", 1), ("deep/b", 6)]
    for name, content in (("model.bin", b"newer"), ("a", b"a")):
        assert content in answer_to(task, tmp_path, name=name)
    assert outputs.record(task, tmp_path / "log", 7.0) is None
    event = next(read_objects(tmp_path / "log"))[0]
    assert (event["files"], event["count"], event["bytes"]) == ({"model.bin": 9, "a": 1, "deep/b": 6}, 4, 36)
    (tmp_path / "hosts/A").mkdir(parents=True)
    (tmp_path / "hosts/A/agent.json").write_bytes(spec(task, tmp_path).encode())
    (tmp_path / "hosts/B").mkdir()
    assert prune.main(tmp_path / "hosts/A", ()) == 0
    assert not place.exists() and not folder.exists() and (tmp_path / "tmp").is_dir()
    assert [path.name for path in (tmp_path / "hosts").iterdir()] == ["B"], "that host removes it itself"


def test_a_folder_on_another_disk_that_others_made_is_not_used(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "DISKS", (str(tmp_path),))
    (theirs,) = outputs.fallback_folders(Path(task.env["GEOMX_OUTPUT_DIR"]))
    theirs.mkdir()
    (theirs / "bait").touch()
    theirs.chmod(0o777)
    assert "bait" not in {file["name"] for file in outputs.outputs(spec(task, tmp_path))[0]}
    theirs.chmod(0o700)
    assert "bait" in {file["name"] for file in outputs.outputs(spec(task, tmp_path))[0]}


def test_an_empty_folder_goes(tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "A-worker-0"
    folder.mkdir(parents=True)
    outputs.record(Task("A/worker:0", (), {"GEOMX_OUTPUT_DIR": str(folder)}), tmp_path / "log", 7.0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("files", [{str(number): 1 for number in range(9)}, {"n" * 401: 1}, {"a": -1}])
def test_events_of_a_script_are_bounded(files: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        parse({"event": "outputs", "time": 1.0, "files": files, "count": 1, "bytes": 1})


def summary(plan: Plan, *processes: str, file: str = "model.bin") -> dict[str, Any]:
    progress = Progress.of(plan, 0.0)
    for name in processes:
        progress.apply(name, OutputsWritten(time=1.0, files={file: 3}, count=2, bytes=1000), 1.0)
    return result(plan, Outcome(), None, progress.totals(), 1.0)


def test_the_summary_says_where_the_model_is() -> None:
    plan = planned()
    path = "/jobs/job-1/outputs/B-worker-1/model.bin"
    assert summary(plan, "B/worker:1")["model"] == path
    object.__setattr__(plan, "sharing", ("central", "A"))
    found = summary(plan, "B/worker:1")
    assert found["model"] == f"B:{path}", "the path is the same on both machines"
    assert ["model", f"B:{path}"] in [line.split() for line in in_words(found).splitlines()]
    found = summary(plan, "A/worker:0", "B/worker:1", file="weights")
    assert found["model"] is None and "4 files, 2 kB: geomx fetch job-1" in in_words(found)
