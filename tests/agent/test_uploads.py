"""Checkpoints of hosts in a store: what is half written, damaged or somebody else's is skipped and named."""

import hashlib
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import until
from s3_server import BUCKET, s3_server, silent_s3

from geomx_cli.agent import processes, stored
from geomx_cli.agent.checkpoint import Part
from geomx_cli.agent.host_spec import HostSpec
from geomx_cli.agent.stored import Record
from geomx_cli.agent.uploads import Uploads
from geomx_cli.core.conventions import file_name
from geomx_cli.core.errors import GeomxError, HostUnreachable, InvalidSettings
from geomx_cli.core.options import OPTIONS, defaults
from geomx_cli.core.stores import Store, TooLarge, normal_place
from geomx_cli.jobs.store.stored_job import StoredJob, description, find_stored
from geomx_cli.plan import JobSpec, plan
from geomx_cli.plan.this_machine import this_machine

HOSTS = ("A", "B", "central")


class Job:
    """A job on three hosts, whose processes keep their names and a number."""

    def __init__(self, folder: Path, name: str, place: Path) -> None:
        self.folder, self.name, self.place = folder / name, name, place
        options = {**defaults(OPTIONS), "parties": 2, "workers": 1, "topology": "central"}
        inventory = this_machine(options, tuple(range(20000, 20040)))
        self.plan = plan(inventory, JobSpec(job=name, job_dir=str(self.folder), socket_dir="/tmp/gx-0-00000000"))
        for host in HOSTS:
            directory = self.directory(host)
            directory.mkdir(parents=True)
            spec = HostSpec(name, host, str(self.folder), "", "", "", (), (), checkpoint_to=str(place))
            (directory / "agent.json").write_bytes(spec.encode())
        (self.directory("A") / "job.json").write_bytes(description(self.plan, inventory))

    def directory(self, host: str) -> Path:
        return self.folder / "hosts" / host

    def processes(self, host: str) -> list[str]:
        return [process.name for process in self.plan.on_host(host)]

    def keep(self, number: int) -> None:
        for host in HOSTS:
            folder = self.directory(host) / "checkpoints" / str(number)
            for process in self.plan.on_host(host):
                (folder / file_name(process.name)).mkdir(parents=True)
                (folder / file_name(process.name) / "state").write_text(f"{process.name} {number}")
            Part.describe(folder, dict.fromkeys(self.processes(host), 2)).write(folder)

    def block(self, number: int) -> Path:
        """Let the upload of a checkpoint wait for the writer of one file."""
        folder = self.directory("A") / "checkpoints" / str(number)
        file = folder / "A-worker-0" / "state"
        file.write_text("")
        Part.describe(folder, dict.fromkeys(self.processes("A"), 2)).write(folder)
        file.unlink()
        os.mkfifo(file)
        return file

    def upload(self, number: int) -> None:
        self.keep(number)
        for host in HOSTS:
            stored.upload(self.directory(host), [str(number)])
        stored.publish(self.directory("A"), [str(number), *HOSTS])

    def fetch(self, host: str, number: int, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
        capsys.readouterr()
        stored.fetch(self.directory(host), [str(self.place), self.name, str(number), *self.processes(host)])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, "job-1", tmp_path / "store")


def find(place: Path) -> tuple[StoredJob, str]:
    notes: list[str] = []
    return find_stored(str(place), notes.append), "\n".join(notes)


def test_what_is_not_whole_is_skipped_and_named(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (10, 20, 30):
        job.upload(number)
    folder = job.place / "job-1"
    assert sorted(path.name for path in folder.iterdir()) == ["20", "30"]
    shutil.copytree(folder / "30", folder / "40")
    shutil.copytree(folder / "30", folder / "50")
    (folder / "50" / "complete.json").write_text("{")
    shutil.copytree(folder / "30", folder / "60")
    (folder / "60" / "complete.json").unlink()
    (folder / "notes.txt").write_text("mine")
    (job.place / "others").mkdir()
    found, notes = find(job.place)
    assert [record.number for record in found.records] == [30, 20]
    for words in ("40: skipped: it is a copy of", "50: skipped: its record", "60: skipped: it is half", "notes.txt"):
        assert words in notes
    assert "skipped what is no job's: others" in notes
    found.check(job.plan)
    assert found.is_here and found.options["parties"] == 2

    fetched = job.fetch("B", 30, capsys)
    assert not fetched["problem"] and not fetched["damaged"]
    for name in job.processes("B"):
        assert Path(fetched["folder"], file_name(name), "state").read_text() == f"{name} 30"
    worker = folder / "30" / "B" / "B-worker-0" / "state"
    worker.write_text(worker.read_text().upper())
    assert "B/B-worker-0/state is damaged" in job.fetch("B", 30, capsys)["damaged"]
    assert not job.fetch("A", 30, capsys)["damaged"]
    worker.unlink()
    found, notes = find(folder)  # the job's own folder
    assert [record.number for record in found.records] == [20] and "B/B-worker-0/state is missing" in notes
    (folder / "20" / "complete.json").write_text("[]")
    with pytest.raises(InvalidSettings, match="has no whole checkpoint"):
        find(folder)


def changed(place: Path, name: str, value: str) -> None:
    """Give a size, a life or a digest in a record another JSON value."""
    fields = json.loads(place.read_text())
    part = fields["hosts"]["A"]
    file, worker = "A-worker-0/state", "A/worker:0"
    match name:
        case "size":
            part["files"][file][0] = "VALUE"
        case "life":
            part["incarnations"][worker] = "VALUE"
        case "files":
            part["files"] = "VALUE"
        case "format":
            fields["format"] = "VALUE"
    place.write_text(json.dumps(fields).replace('"VALUE"', value))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("size", "life") for value in ("Infinity", "1e999", "NaN", "-1", "1.5", "null")),
        ("life", f"1{300 * '0'}"), ("format", "3"), ("format", "true"),
        ("files", "[[1]]"), ("files", '{"a": 3}'), ("files", "[" * 50_000 + "]" * 50_000),
    ],
)  # fmt: skip
def test_a_record_with_other_values_is_skipped(job: Job, name: str, value: str) -> None:
    job.upload(10)
    job.upload(20)
    changed(job.place / "job-1" / "20" / "complete.json", name, value)
    found, notes = find(job.place)
    assert [record.number for record in found.records] == [10]
    assert f"20: skipped: its {'format is' if name == 'format' else 'record is damaged'}" in notes


def test_larger_files_than_there_may_be_are_not_fetched(
    job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job.upload(10)
    job.upload(20)
    monkeypatch.setattr(Record, "check_sizes", lambda *_: None)  # of a store whose listing is wrong
    with (job.place / "job-1" / "20" / "B" / "B-worker-0" / "state").open("ab") as file:
        file.truncate(1 << 40)
    assert "B-worker-0/state is damaged: it has more than" in job.fetch("B", 20, capsys)["damaged"]
    with (job.place / "job-1" / "20" / "complete.json").open("ab") as file:
        file.truncate(1 << 40)
    found, notes = find(job.place)
    assert [record.number for record in found.records] == [10]
    assert "20: skipped: its record is damaged: it has more than 67.1 MB" in notes


def test_two_jobs_share_a_folder(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Job(tmp_path, "job-2", job.place)
    for number in (10, 20):
        job.upload(number)
        other.upload(number)
    with pytest.raises(InvalidSettings, match="has checkpoints of 2 jobs: job-1; job-2"):
        find(job.place)
    for each in (job, other):
        found, notes = find(job.place / each.name)
        assert (found.id, [record.number for record in found.records], notes) == (each.name, [20, 10], "")
        assert not each.fetch("A", 20, capsys)["damaged"]


class Requester:
    """Orders uploads as a control machine does, whose visitor number is 0; others have others."""

    def __init__(self, directory: Path) -> None:
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self.uploads = Uploads(directory, lambda: os.environ, lambda *answer: self.answers.append(answer))

    def begin(self, kind: str, number: int, **more: Any) -> None:
        self.uploads.obey({"type": kind, "number": number, **more})

    def ended(self) -> dict[str, Any]:
        while not self.answers:
            self.uploads.check()
            time.sleep(0.01)
        return self.answers.pop(0)[1]


@pytest.mark.processes
def test_an_upload_that_is_killed_leaves_the_one_before(job: Job) -> None:
    job.upload(10)
    job.keep(20)
    last = job.block(20)
    requester = Requester(job.directory("A"))
    requester.begin("upload", 20)
    until((job.place / "job-1" / "20" / "A" / "A-scheduler-0" / "state").exists, 30, lambda: "")
    processes.send_signal(processes.with_arguments("upload", str(job.directory("A")), "20"), signal.SIGKILL)
    ended = requester.ended()
    assert (ended["type"], ended["number"], ended["done"]) == ("uploaded", 20, False) and ended["problem"]
    found, notes = find(job.place)
    assert [record.number for record in found.records] == [10] and "20: skipped: it is half written" in notes

    requester.begin("upload", 20, limit=1.0)
    ended = requester.ended()
    assert not ended["done"] and "took longer than 1.0 s" in ended["problem"]

    last.unlink()
    last.write_text("other")
    requester.begin("upload", 20)
    ended = requester.ended()
    assert not ended["done"] and "A-worker-0/state has 5 bytes instead of 0" in ended["problem"]
    last.write_text("")
    requester.begin("upload", 20)
    ended = requester.ended()
    assert ended["done"] and not ended["problem"]
    requester.begin("publish", 20, hosts=HOSTS)  # the other hosts have not uploaded theirs
    ended = requester.ended()
    assert not ended["done"] and "lacks what host B has written" in ended["problem"]


@pytest.mark.processes
def test_who_asks_for_another_upload_takes_the_place_of_the_first(job: Job) -> None:
    for number in (10, 20):
        job.keep(number)
    job.block(10)
    requester = Requester(job.directory("A"))
    requester.begin("upload", 10)
    assert requester.uploads.number == 10
    requester.begin("drop", 0, visitor=3)  # that is not its own
    assert requester.uploads.number == 10
    requester.begin("upload", 20, visitor=3)
    assert requester.uploads.number == 20
    requester.begin("upload", 30)  # the job's next checkpoint
    while len(requester.answers) < 3:
        requester.uploads.check()
        time.sleep(0.01)
    problem = "the upload of checkpoint 20 has taken its place"
    refused = "checkpoint 20 is being uploaded for geomx stop"
    assert requester.answers == [
        (0, {"type": "uploaded", "number": 10, "done": False, "problem": problem}),
        (0, {"type": "uploaded", "number": 30, "done": False, "problem": refused}),
        (3, {"type": "uploaded", "number": 20, "done": True, "problem": ""}),
    ]
    assert requester.uploads.number == 0  # so the next checkpoints may remove it


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("memory://x", "nothing can be kept"),
        ("s3://key:secret@bucket/x", r"s3://\.\.\.@bucket/x has credentials"),
        ("s3://", "is no URL of a folder"),
        ("s3://bucket/x?versionId=1", "is no URL of a folder"),
    ],
)
def test_places_that_cannot_be_are_refused(place: str, words: str) -> None:
    with pytest.raises(InvalidSettings, match=words):
        normal_place(place)


@pytest.mark.processes
def test_files_come_back_from_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(b"")
    large.write_bytes(os.urandom(20_000_001))  # in several parts
    with s3_server(tmp_path) as s3:
        for name, text in s3.environment.items():
            monkeypatch.setenv(name, text)
        store = Store(f"s3://{BUCKET}/a")
        for source in (small, large):
            store.put(source, f"b/c/{source.name}")
            assert s3.files.cat_file(f"{BUCKET}/a/b/c/{source.name}") == source.read_bytes()
            size = source.stat().st_size
            copied = store.get(f"b/c/{source.name}", tmp_path / "back", size)
            assert copied == (size, hashlib.sha256(source.read_bytes()).hexdigest())
            assert (tmp_path / "back").read_bytes() == source.read_bytes()
        store.write("b/record", b"{}")
        assert store.read("b/record", 2) == b"{}" and store.read("b/other", 9) is None
        assert store.get("b/other", tmp_path / "back", 9) is None
        with pytest.raises(TooLarge, match="more than 9 B"):
            store.get("b/c/large", tmp_path / "back", 9)
        assert (store.names(), store.names("b"), store.names("d")) == (["b"], ["c", "record"], [])
        assert store.sizes("b") == {"c/small": 0, "c/large": 20_000_001, "record": 2}
        store.remove("b/c")
        store.remove("b/c")
        assert s3.find() == [f"{BUCKET}/a/b/record"]
        with pytest.raises(GeomxError, match=r"s3://missing/a is not there"):
            Store("s3://missing/a").put(large, "b")
        assert Store("s3://missing/a").names() == []


@pytest.mark.processes
def test_a_store_that_never_answers_has_a_limit(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    with silent_s3() as environment:
        for name, text in environment.items():
            monkeypatch.setenv(name, text)
        place = f"s3://{BUCKET}/a"
        silent = f"{place} has not answered for 1.0 s"
        with pytest.raises(HostUnreachable, match=silent):
            Store(place, 1.0).names()
        job.keep(10)
        spec = HostSpec.read(job.directory("A"))
        (job.directory("A") / "agent.json").write_bytes(replace(spec, checkpoint_to=place, timeout=1.0).encode())
        requester = Requester(job.directory("A"))
        for kind in ("upload", "publish"):
            requester.begin(kind, 10, hosts=HOSTS)
            ended = requester.ended()
            assert not ended["done"] and silent in ended["problem"]


def test_clients_errors_name_the_place_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(InvalidSettings, match="fsspec does not know it"):
        Store("s4://bucket/x")
    with pytest.raises(GeomxError, match="no permission") as denied:
        Store("s3://bucket/x").write("a", b"")
    assert denied.value.exit_code == 5
    with pytest.raises(HostUnreachable, match="cannot be reached"):
        Store("ftp://127.0.0.1:9/x").write("a", b"")
