"""`geomx logs collect`: files are complete and verified, or absent; nothing outside the folder is written."""

import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster import until
from desk import Desk, Launch
from plans import planned
from sshd import Person, Sshd

from geomx_cli.agent import streams
from geomx_cli.agent.host_spec import HostSpec, Task
from geomx_cli.core.jsonlines import encode
from geomx_cli.jobs.actions.collect import collect
from geomx_cli.jobs.store.registry import KnownJob

FILES = 8 * 2 + 2 * 2  # a log and an event log per process; agent.log and status.json per host


@pytest.fixture
def job(desk: Desk) -> Launch:
    """A detached job that runs until the end of the test."""
    launch = desk.launch("--detach")
    assert launch.finish() == 0, launch.errors
    return launch.wait_until_running()


def check(folder: Path, manifest: dict[str, Any]) -> None:
    """The folder has exactly what the manifest lists."""
    told = {name: value for name, value in manifest.items() if name not in ("folder", "records")}
    assert json.loads((folder / "manifest.json").read_bytes()) == told
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {"manifest.json", *(entry["file"] for entry in manifest["files"])}
    for entry in manifest["files"]:
        content = (folder / entry["file"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry["size"], entry["sha256"])


def test_running_job_and_again(desk: Desk, job: Launch) -> None:
    folder, events = desk.folder / "here", job.directory / "events" / "A-worker-1.jsonl"
    until(lambda: b"training" in events.read_bytes())  # the last that this process writes
    whole = events.read_bytes()
    with events.open("ab") as file:
        file.write(b'{"time": 1, "ev')
    first = desk.json("logs", "collect", "--to", str(folder))
    folder = folder / job.id
    check(folder, first)
    assert first["folder"] == str(folder) and first["records"] is None, "no worker has recorded a round"
    assert first["complete"] and len(first["files"]) == FILES
    assert (folder / "events" / "A-worker-1.jsonl").read_bytes() == whole
    entry = next(entry for entry in first["files"] if entry["file"] == "logs/A-worker-1.log")
    assert (entry["host"], entry["process"]) == ("A", "A/worker:1")
    log = job.directory / "logs" / "A-worker-1.log"
    with log.open("ab") as file:
        file.write(b"more and no end")
    second = desk.json("logs", "collect", job.id, "--to", str(folder.parent))
    check(folder, second)
    assert (folder / "logs" / "A-worker-1.log").read_bytes() == log.read_bytes()


@pytest.mark.processes
def test_a_host_on_which_the_job_never_started(standing: Launch, tmp_path: Path) -> None:
    spec = standing.directory / "hosts" / "A" / "agent.json"
    content = spec.read_bytes()
    spec.unlink()
    try:
        problems = collect(find(standing), tmp_path / "here")["problems"]
    finally:
        spec.write_bytes(content)
    assert problems == [{"host": "A", "problem": "the job was never started there: nothing to collect"}]


def test_what_is_no_plain_file_is_left_out_and_named(desk: Desk, job: Launch) -> None:
    events = job.directory / "events" / "A-worker-1.jsonl"
    events.unlink()
    os.mkfifo(events)
    folder = desk.folder / "here"
    done = desk.geomx("logs", "collect", "--json", "--to", str(folder))
    assert done.returncode == 7
    manifest = json.loads(done.stdout)
    check(folder / job.id, manifest)
    assert len(manifest["files"]) == FILES - 1
    assert [problem["host"] for problem in manifest["problems"]] == ["A"]
    assert f"{events} is a pipe" in manifest["problems"][0]["problem"]


def test_folder_with_something_else(desk: Desk, job: Launch) -> None:
    folder = desk.folder / "mine" / job.id
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("all my work")
    done = desk.geomx("logs", "collect", "--to", str(folder.parent))
    assert done.returncode == 3 and f"{folder} has something else in it" in done.stderr
    (folder / "manifest.json").write_text(json.dumps({"job": "another", "files": []}))
    done = desk.geomx("logs", "collect", "--to", str(folder.parent))
    assert done.returncode == 3 and "has the logs of job another" in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "thesis.txt"]
    assert desk.geomx("logs", "collect", "--to", "/proc/none").returncode == 5


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """One such job for several tests."""
    made = Desk(tmp_path_factory.mktemp("desk"))
    launch = made.launch("--detach")
    assert launch.finish() == 0, launch.errors
    yield launch.wait_until_running()
    made.close()


WRONG = ["escape", "absolute", "unlisted", "half", "changed", "nothing", "noise", "huge", "bomb", "list", "deep", "far"]


@pytest.mark.processes
@pytest.mark.parametrize("sent", WRONG)
def test_host_that_sends_what_it_should_not(standing: Launch, tmp_path: Path, sent: str) -> None:
    folder, job = tmp_path / "here", standing
    known = (job.directory / "inventory.json").read_text()
    said: list[str] = []
    before = collect(find(job), folder, said.append)
    assert said[0].startswith("collecting from ") and said[0].endswith(", 0 B so far")
    assert len(said[0].split()) > len(said[-1].split()), "the hosts that are waited for"
    replace_python(job, tmp_path, sent)
    (job.directory / "logs" / "central-worker-0.log").write_text("new\n")
    try:
        manifest = collect(find(job), folder)
    finally:
        (job.directory / "inventory.json").write_text(known)
    check(folder, manifest)
    assert [problem["host"] for problem in manifest["problems"]] == ["A"] and not manifest["complete"]
    assert (folder / "logs" / "central-worker-0.log").read_text() == "new\n"
    assert [entry for entry in manifest["files"] if entry["host"] == "A"] == [
        entry for entry in before["files"] if entry["host"] == "A"
    ]
    assert not list(tmp_path.rglob("evil*")) and not Path("/tmp/evil").exists()


def find(job: Launch) -> KnownJob:
    """The job as commands find it."""
    known = KnownJob.at(job.directory)
    assert known is not None
    return known


def replace_python(job: Launch, folder: Path, sent: str) -> None:
    """Let host A answer with bytes of ours."""
    answered = folder / "answer"
    answered.write_bytes(answer(sent))
    program = folder / "python.sh"
    program.write_text(f"#!/bin/sh\nexec cat {answered}\n")
    program.chmod(0o755)
    path = job.directory / "inventory.json"
    inventory = json.loads(path.read_bytes())
    next(host for host in inventory["hosts"] if host["name"] == "A")["python"] = str(program)
    path.write_text(json.dumps(inventory))


def answer(sent: str) -> bytes:
    """What a host sends, with a specific defect."""
    name, content = "logs/A-worker-1.log", b"evil" * 50_000
    names = {"escape": "../evil", "absolute": "/tmp/evil", "unlisted": "logs/evil.log"}
    listed = {"process": "A/worker:1", "name": names.get(sent, name), "size": len(content)}
    spoiled = {"deep": b'{"files": ' + b"[" * 200_000, "list": b'{"files": [{"name": [1]}]}'}
    first = spoiled.get(sent) or json.dumps({"files": [listed]}).encode()
    if sent in ("nothing", "noise"):
        return b"" if sent == "nothing" else b"login: " * 1000
    if sent == "bomb":  # a line without end
        return first + b"\n" + zlib.compress(b"x" * (64 << 20))
    head = {"size": 5 << 30 if sent == "huge" else len(content), "offset": 1000 if sent == "far" else 0}
    rest = encode(head) + content + encode({"sha256": "0" * 64})
    packed = first + b"\n" + zlib.compress(rest, 0)
    return packed[:-1000] if sent == "half" else packed


class Host:
    """A host without processes: answers as its agent does, or as `spoiled`."""

    def __init__(self, name: str, directory: Path, spec: HostSpec) -> None:
        self.name, self.python, self.sent, self.asked = name, "python", b"", list[dict[str, Any]]()
        self.spoiled: bytes | None = None
        self._records = streams.Records(directory, spec)

    def open(self, argv: Any) -> "Host":
        self._out = io.BytesIO()
        self._packed = streams._Deflated(self._out)
        self.asked.clear()
        self.sent = encode(self._records.listing()) if self.spoiled is None else self.spoiled
        return self

    def send(self, data: bytes) -> None:
        self.asked.append(json.loads(data))
        streams.answer(self._records, data, self._packed)
        self._packed.flush()
        self.sent += self._out.getvalue() if self.spoiled is None else b""
        self._out.seek(0)
        self._out.truncate()

    def receive(self) -> bytes:
        data, self.sent = self.sent[:10_000], self.sent[10_000:]
        return data

    def errors(self) -> str:
        return ""

    def close(self) -> None:
        pass


@pytest.fixture
def far(tmp_path: Path) -> tuple[Any, Host]:
    """A job with records on host A, and that host."""
    plan, there = planned(), tmp_path / "there"
    tasks = [Task(process.name, (), {}) for process in plan.on_host("A")]
    for task in tasks:
        for path in (there / f"logs/{task.file_name}.log", there / f"events/{task.file_name}.jsonl"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"first of {task.name}\n")
    (there / "hosts/A").mkdir(parents=True)
    (there / "hosts/A/agent.log").write_text("begun\n")
    host = Host("A", there / "hosts/A", HostSpec("job-1", "A", str(there), "/s", "/s/a", "", (), tuple(tasks)))
    job = SimpleNamespace(plan=plan, directory_on=str, open_hosts=lambda: {"A": host})
    return job, host


def test_only_what_has_been_added_is_sent_again(far: tuple[Any, Host], tmp_path: Path) -> None:
    (job, host), folder, there = far, tmp_path / "here", tmp_path / "there"
    manifest = collect(job, folder)
    check(folder, manifest)
    assert manifest["complete"] and len(manifest["files"]) == len(host.asked) > 4
    assert not any(asked["offset"] for asked in host.asked)
    log, events = there / "logs/A-worker-1.log", there / "events/A-worker-1.jsonl"
    for path in (log, events):
        with path.open("a") as file:
            file.write("second\nhalf a li")
    (folder / "logs/A-worker-0.log").write_text("changed here\n")
    manifest = collect(job, folder)
    check(folder, manifest)
    assert (folder / "logs/A-worker-1.log").read_bytes() == log.read_bytes()
    assert (folder / "events/A-worker-1.jsonl").read_text() == "first of A/worker:1\nsecond\n"
    assert all(asked["offset"] for asked in host.asked)
    assert (folder / "logs/A-worker-0.log").read_text() == "first of A/worker:0\n"


@pytest.mark.parametrize("sent", WRONG)
def test_a_host_that_sends_what_it_should_not_changes_nothing(far: tuple[Any, Host], tmp_path: Path, sent: str) -> None:
    (job, host), folder = far, tmp_path / "here"
    before = collect(job, folder)
    host.spoiled = answer(sent)
    after = collect(job, folder)
    check(folder, after)
    assert [problem["host"] for problem in after["problems"]] == ["A"] and after["files"] == before["files"]
    assert not list(tmp_path.rglob("evil*")) and not Path("/tmp/evil").exists()


def test_hosts_behind_ssh(desk: Desk, machines: Callable[..., Sshd], person: Person) -> None:
    sites = [machines("alpha"), machines("beta")]
    launch = desk.launch("--detach", sites=sites)
    assert launch.finish() == 0, launch.errors
    launch.wait_until_running()
    big = Path(sites[1].state_dir) / "jobs" / launch.id / "logs" / "A-worker-0.log"
    with big.open("ab") as file:
        file.write(os.urandom(8_000_000))
    folder = desk.folder / "here"
    manifest = desk.json("logs", "collect", "--to", str(folder))
    check(folder / launch.id, manifest)
    assert len(manifest["files"]) == FILES
    with big.open("ab") as file:
        file.write(b"the end\n")
    said: list[str] = []
    collect(find(launch), folder / launch.id, said.append)
    check(folder / launch.id, json.loads((folder / launch.id / "manifest.json").read_bytes()))
    assert (folder / launch.id / "logs" / "A-worker-0.log").read_bytes() == big.read_bytes()
    assert not [line for line in said if " MB so far" in line], "only what has grown"
    (folder / launch.id / "logs" / "A-worker-0.log").write_bytes(b"changed here\n")
    check(folder / launch.id, desk.json("logs", "collect", "--to", str(folder)))
    big.write_bytes(b"begun anew\n" * 1_000_000)
    check(folder / launch.id, desk.json("logs", "collect", "--to", str(folder)))
    sites[1].stop()
    done = desk.geomx("logs", "collect", "--to", str(folder), "--json")
    assert done.returncode == 7 and "host A: " in done.stderr
    check(folder / launch.id, json.loads(done.stdout))
    assert len(json.loads(done.stdout)["files"]) == FILES
