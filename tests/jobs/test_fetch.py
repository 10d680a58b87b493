"""`geomx fetch` and `geomx jobs prune`: verified files, continued transfers, and nothing outside the folders."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster import until
from desk import Desk
from hypothesis import given
from hypothesis import strategies as st
from plans import planned
from sshd import Person, Sshd

from geomx_cli.agent import streams
from geomx_cli.agent.host_spec import HostSpec, Task
from geomx_cli.agent.prune import remove, size_of
from geomx_cli.commands.fetch import _Bar as Bar
from geomx_cli.commands.fetch import fetch as fetch_command
from geomx_cli.core.errors import CheckFailed, GeomxError, HostUnreachable, Interrupted
from geomx_cli.core.files import locked_folder
from geomx_cli.core.jsonlines import encode
from geomx_cli.core.units import format_bytes
from geomx_cli.hosts import Completed
from geomx_cli.jobs.actions.fetch import Fetched, fetch, is_safe
from geomx_cli.jobs.actions.prune import Pruned, Pruner, select
from geomx_cli.jobs.actions.streams import Listed
from geomx_cli.jobs.store import job_state
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.plan import Plan

CONTENT = bytes(range(256)) * 5000


@dataclass
class Host:
    """A host without processes: answers as the agent does. `spoils` changes what it sends."""

    name: str
    spec: HostSpec
    spoils: Callable[[bytes], bytes] = bytes
    python: str = sys.executable
    sent: bytes = b""
    asked: list[dict[str, Any]] = field(default_factory=list)

    def open(self, argv: Any) -> "Host":
        self.sent = self.spoils(encode(streams.Outputs(self.spec).listing()))
        return self

    def send(self, data: bytes) -> None:
        out = io.BytesIO()
        self.asked.append(json.loads(data))
        streams.answer(streams.Outputs(self.spec), data, out)
        self.sent += self.spoils(out.getvalue())

    def receive(self) -> bytes:
        data, self.sent = self.sent[:50_000], self.sent[50_000:]
        return data

    def errors(self) -> str:
        return ""

    def close(self) -> None:
        self.sent = b""


@dataclass
class Job:
    """A job with outputs on two of these hosts, in folders of the same path below each."""

    plan: Plan
    hosts: dict[str, Host]

    def directory_on(self, host: str) -> str:
        return f"/jobs/job-1/hosts/{host}"

    def open_hosts(self) -> dict[str, Host]:
        return self.hosts


class Quiet:
    """Counts what has arrived."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def on_list(self, files: Collection[Listed]) -> None:
        pass

    def on_bytes(self, file: Listed, done: int) -> None:
        pass

    def on_file(self, file: Fetched) -> None:
        self.files.append(file.how)

    def warn(self, text: str) -> None:
        self.files.append(text)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr("geomx_cli.jobs.actions.streams._LIMIT", 0)
    hosts = {}
    for name in ("A", "B"):
        folder = tmp_path / name / "outputs" / f"{name}-worker-0"
        folder.mkdir(parents=True)
        (folder / "model.bin").write_bytes(name.encode() + CONTENT)
        (folder / "empty").touch()
        task = Task(f"{name}/worker:0", (), {"GEOMX_OUTPUT_DIR": str(folder)})
        hosts[name] = Host(name, HostSpec("job-1", name, str(tmp_path), "/s", "/s/a", "", (), (task,)))
    return Job(planned(), hosts)


def run(job: Job, base: Path) -> tuple[dict[str, Any], list[str]]:
    quiet = Quiet()
    return fetch(job, base, quiet), sorted(quiet.files)  # type: ignore[arg-type]


def names(base: Path) -> set[str]:
    return {str(path.relative_to(base)) for path in base.rglob("*") if not path.is_dir()}


def test_files_of_the_same_name_come_from_all_hosts_once(job: Job, tmp_path: Path) -> None:
    base = tmp_path / "here"
    found, how = run(job, base)
    assert found["complete"] and how == ["fetched"] * 4
    for entry in found["files"]:
        content = Path(entry["path"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry["size"], entry["sha256"])
    folder = base / "job-1" / "outputs"
    assert [(folder / f"{name}-worker-0/model.bin").read_bytes()[:1] for name in "AB"] == [b"A", b"B"]
    assert run(job, base)[1] == ["present"] * 4
    assert not (base / "job-1" / "outputs.part").exists()


def test_small_files_come_first(job: Job, tmp_path: Path) -> None:
    Path(job.hosts["A"].spec.tasks[0].env["GEOMX_OUTPUT_DIR"], "manifest.json").write_text("{}")
    run(job, tmp_path / "here")
    assert [asked["name"] for asked in job.hosts["A"].asked] == ["empty", "manifest.json", "model.bin"]


def test_a_fetch_without_a_terminal_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("geomx_cli.jobs.view.waiting._SLOW", 0.01)
    monkeypatch.setattr("geomx_cli.jobs.view.waiting._LINE_EVERY", 0.01)
    listed, said = Listed("A/worker:0", "model.bin", 3000), [""]

    def shows(text: str) -> bool:
        said[0] += capsys.readouterr().err
        return text in said[0]

    with Bar(lines=False) as bar:
        until(lambda: shows("asking the hosts for their files ("))
        bar.on_list([listed])
        bar.on_bytes(listed, 1000)
        until(lambda: shows(f"fetching A-worker-0/model.bin: {format_bytes(1000)} of {format_bytes(3000)} ("))


def test_an_interrupted_fetch_names_the_command_that_continues_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("geomx_cli.jobs.actions.fetch.fetch", interrupted)
    monkeypatch.setattr("geomx_cli.commands.fetch.chosen", lambda name: SimpleNamespace(id="job-1"))
    with pytest.raises(Interrupted, match="what has arrived of job job-1 is kept") as caught:
        fetch_command.main(["job-1", "--to", "some where"], standalone_mode=False)
    assert caught.value.hint == "geomx fetch job-1 --to 'some where' continues"


def test_a_broken_connection_is_made_again(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geomx_cli.jobs.actions.streams._PAUSE", 0)
    monkeypatch.setattr("geomx_cli.jobs.actions.streams._LIMIT", 60)
    base, host, opened = tmp_path / "here", job.hosts["A"], Host.open
    pieces, refusals = iter([300_000, 600_000]), iter([True])
    host.spoils = lambda data: data[: next(pieces, None)] if len(data) > 300_000 else data

    def open_(self: Host, argv: Any) -> Host:
        if self is host and host.asked and next(refusals, False):
            raise HostUnreachable("host A: no route")
        return opened(self, argv)

    monkeypatch.setattr(Host, "open", open_)
    found, how = run(job, base)
    assert found["complete"] and len(found["files"]) == 4 and not (base / "job-1/outputs.part").exists()
    assert (base / "job-1/outputs/A-worker-0/model.bin").read_bytes() == b"A" + CONTENT
    broken = "host A: the connection broke; trying again, for 60 s at most"
    assert how == ["continued", "fetched", "fetched", "fetched", broken, broken], "each interruption is named once"
    assert [asked["offset"] > 0 for asked in host.asked if asked["name"] == "model.bin"] == [False, True, True]


def test_an_interrupt_opens_no_connection_again(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geomx_cli.jobs.actions.streams._LIMIT", 60)
    host, opened, opens, receive = job.hosts["A"], Host.open, [], Host.receive
    receiving, closed, transfers = threading.Event(), threading.Event(), []
    part = tmp_path / "here/job-1/outputs.part/A-worker-0/model.bin"

    def stall(self: Host) -> bytes:
        if not part.exists() or receiving.is_set():
            return receive(self)
        receiving.set()
        assert closed.wait(240)
        return b""  # its connection is closed

    def open_(self: Host, argv: Any) -> Host:
        opens.append(self.name)
        return opened(self, argv)

    def interrupted(do: Any, _: object) -> None:
        transfers.append(threading.Thread(target=do, args=(host,), daemon=True))
        transfers[0].start()
        assert receiving.wait(240)
        raise KeyboardInterrupt

    monkeypatch.setattr(Host, "receive", stall)
    monkeypatch.setattr(Host, "open", open_)
    monkeypatch.setattr("geomx_cli.jobs.actions.fetch.everywhere", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(job, tmp_path / "here")
    closed.set()
    transfers[0].join(240)
    assert not transfers[0].is_alive() and opens == ["A"]


def test_a_broken_transfer_is_continued_and_a_changed_file_sent_anew(job: Job, tmp_path: Path) -> None:
    base, host = tmp_path / "here", job.hosts["A"]
    host.spoils = lambda data: data[:300_000]
    found, _ = run(job, base)
    assert [one["host"] for one in found["problems"]] == ["A"] and not found["complete"]
    part = base / "job-1/outputs.part/A-worker-0/model.bin"
    assert 0 < part.stat().st_size <= 300_000
    host.spoils = bytes
    assert run(job, base)[1] == ["continued", "present", "present", "present"]
    assert host.asked[-1]["offset"] > 0 and not part.parent.parent.exists()
    folder = Path(host.spec.tasks[0].env["GEOMX_OUTPUT_DIR"])
    (folder / "model.bin").write_bytes(b"X" + CONTENT)  # of the same size
    assert run(job, base)[1] == ["fetched", "present", "present", "present"]
    assert (base / "job-1/outputs/A-worker-0/model.bin").read_bytes() == b"X" + CONTENT
    part.parent.mkdir(parents=True)
    part.write_bytes(b"of an earlier file")
    (base / "job-1/outputs/A-worker-0/model.bin").unlink()
    assert run(job, base)[1] == ["fetched", "present", "present", "present"]


def test_a_file_that_vanishes_or_changes_on_the_way_is_named(job: Job, tmp_path: Path) -> None:
    def vanish(data: bytes) -> bytes:
        shutil.rmtree(tmp_path / "A", ignore_errors=True)
        return data

    job.hosts["A"].spoils = vanish
    job.hosts["B"].spoils = lambda data: data.replace(CONTENT, CONTENT[::-1])
    found, how = run(job, tmp_path / "here")
    told = {one["problem"].split(": ")[0]: one["problem"] for one in found["problems"]}
    assert set(told) == {"A-worker-0/model.bin", "A-worker-0/empty", "B-worker-0/model.bin"} and how == ["fetched"]
    assert "No such file" in told["A-worker-0/empty"] and "has changed" in told["B-worker-0/model.bin"]
    assert names(tmp_path / "here") == {"job-1/outputs/B-worker-0/empty"}


def test_a_file_that_grows_or_shrinks_meanwhile(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, host = tmp_path / "here", job.hosts["A"]
    assert run(job, base)[0]["complete"]
    model = Path(host.spec.tasks[0].env["GEOMX_OUTPUT_DIR"]) / "model.bin"
    send = Host.send

    def grow(self: Host, data: bytes) -> None:
        if self is host:
            model.write_bytes(b"A" + CONTENT + b"more")
        send(self, data)

    monkeypatch.setattr(Host, "send", grow)
    assert run(job, base)[1] == ["continued", "present", "present", "present"]
    assert (base / "job-1/outputs/A-worker-0/model.bin").read_bytes() == b"A" + CONTENT + b"more"

    class Shrinking(io.BytesIO):
        def write(self, data: Any) -> int:
            if data == b'{"size": 1280005, "offset": 0}\n':
                os.truncate(model, 300_000)
            return super().write(data)

    shutil.rmtree(base)
    monkeypatch.setattr(Host, "send", send)
    monkeypatch.setattr(io, "BytesIO", Shrinking)
    found, how = run(job, base)
    assert how == ["fetched"] * 3, "only that file is another"
    assert [one["problem"].split(";")[0] for one in found["problems"]] == [
        "A-worker-0/model.bin: it has changed while it was sent"
    ]


@pytest.mark.parametrize(
    "listed",
    [
        {"process": "A/worker:0", "name": "../../../x", "size": 1}, {"process": "A/worker:0", "name": "/x", "size": 1},
        {"process": "B/worker:0", "name": "x", "size": 1}, {"process": "../x", "name": "x", "size": 1},
        {"process": "A/worker:0", "name": "a/./x", "size": 1}, {"process": "A/worker:0", "name": "\ud800", "size": 1},
        {"process": "A/worker:0", "name": "x" * 5000, "size": 1}, {"process": "A/worker:0", "name": "x", "size": -1},
        {"process": "A/worker:0", "name": "x", "size": 1 << 62},
    ],
)  # fmt: skip
def test_names_that_lead_elsewhere_are_refused(job: Job, tmp_path: Path, listed: dict[str, Any]) -> None:
    job.hosts.pop("B")
    job.hosts["A"].spoils = lambda data: json.dumps({"files": [listed]}).encode() + b"\n"
    found, how = run(job, tmp_path / "here")
    assert len(found["problems"]) == 1 and not how and not names(tmp_path / "here") and not job.hosts["A"].asked


@pytest.mark.parametrize("answer", [b"", b"no list\n", b"{}\n", b'{"files": 3}\n', b"{" + b"[" * 5000 + b"\n"])
def test_an_answer_that_is_no_list_is_one_problem_of_its_host(job: Job, tmp_path: Path, answer: bytes) -> None:
    job.hosts["A"].spoils = lambda data: answer
    found, how = run(job, tmp_path / "here")
    assert [one["host"] for one in found["problems"]] == ["A"] and len(how) == 2


def test_more_than_the_disk_holds_is_refused_at_once(job: Job, tmp_path: Path) -> None:
    """It ends the transfer of that file, and no other host's."""
    for number, size in enumerate((1 << 60, 1 << 62), 1):
        job.hosts["A"].spoils = lambda data, size=size: data.replace(b": %d" % (len(CONTENT) + 1), b": %d" % size)
        found, how = run(job, tmp_path / f"{size}")
        assert [one["host"] for one in found["problems"]] == ["A"], found
        assert len(how) == 3 and [one["name"] for one in job.hosts["A"].asked] == ["empty"] * number
    with locked_folder(tmp_path / "here"), pytest.raises(CheckFailed, match="another geomx"):
        run(job, tmp_path / "here")


@given(st.text(st.sampled_from("./a\n\u202e\ud800"), max_size=8))
def test_a_safe_name_stays_below(name: str) -> None:
    if is_safe(name):
        place = os.path.normpath(f"/base/folder/{name}")
        assert place.startswith("/base/folder/") and name.isprintable()


# prune


def ended(name: str, ago: float) -> Pruned:
    return Pruned(KnownJob(name, Path("/none"), 0.0), time.time() - ago)


def test_jobs_are_chosen_by_their_end() -> None:
    jobs = [ended("a", 100), ended("b", 10), ended("c", 1000)]
    assert [one.job.id for one in select(jobs, older_than=0, keep=0)] == ["b", "a", "c"]
    assert [one.job.id for one in select(jobs, older_than=50, keep=0)] == ["a", "c"]
    assert [one.job.id for one in select(jobs, older_than=50, keep=2)] == ["c"]
    assert not select(jobs, older_than=0, keep=3)


def test_a_detached_job_ended_when_its_last_host_did(tmp_path: Path) -> None:
    state = job_state.JobState("detached", 1, 1, "boot", "here", time.time() - 1000)
    state.write(tmp_path)
    job_state.finish(tmp_path, {"status": "done", "total_s": 100.0})
    found = job_state.JobState.read(tmp_path)
    assert found is not None and found.ended is not None and 890 < time.time() - found.ended < 910


def test_only_what_is_the_jobs_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, other = tmp_path / "job", tmp_path / "other"
    for path in (folder / "logs" / "deep", folder / "outputs", other):
        path.mkdir(parents=True)
    (other / "thesis").write_text("all my work")
    (folder / "outputs" / "link").symlink_to(other)
    (folder / "hosts").symlink_to(other)
    (folder / "logs" / "deep" / "log").write_bytes(bytes(100_000))
    (folder / "mine").write_text("mine")
    assert 100_000 <= size_of([folder]) < 200_000
    rmdir = Path.rmdir

    def busy(path: Path) -> None:
        if path.name == "deep":
            raise PermissionError(1, "Operation not permitted", str(path))
        rmdir(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", busy)
        assert remove(folder, ("hosts", "logs")) == f"{folder}/logs/deep cannot be removed: Operation not permitted"
    assert remove(folder, ("hosts", "logs", "outputs", "none")) == ""
    assert [path.name for path in folder.iterdir()] == ["mine"] and (other / "thesis").exists()


class Answering:
    """A host that answers with `answers` in turn, or cannot be reached."""

    python = sys.executable

    def __init__(self, name: str, *answers: dict[str, Any]) -> None:
        self.name, self.answers = name, list(answers)

    def run(self, argv: Any, **_: Any) -> Completed:
        if not self.answers:
            raise HostUnreachable(f"host {self.name}: no route")
        return Completed(0, json.dumps(self.answers.pop(0)).encode(), b"")

    def close(self) -> None:
        pass


def test_what_hosts_share_counts_once_and_a_job_stays_until_all_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = planned().to_json()
    fields["job_dirs"]["B"] = "/elsewhere"
    (tmp_path / "plan.json").write_text(json.dumps({**fields, "here": []}))
    job = KnownJob("job-1", tmp_path, 0.0)
    shared, gone = {"bytes": 7000, "place": "/home/x 5", "left": ""}, {"bytes": 0, "place": "/home/x", "left": ""}
    left = {**shared, "left": "/home/x/logs cannot be removed: busy"}
    hosts = [Answering("central", shared, shared, left, gone, gone), Answering("A", shared, shared, gone, gone, gone)]
    hosts.append(Answering("B"))
    monkeypatch.setattr(Pruner, "_hosts", lambda *_: {host.name: host for host in hosts})
    one = Pruned(job, 0.0)
    Pruner().measure(one)
    assert one.sizes == {"central": 7000, "A": 0, "B": None} and one.bytes - one.own == 7000
    Pruner().remove(one)
    assert one.problems == ["host B: no route", "host central: /home/x/logs cannot be removed: busy"]
    assert not one.removed and (tmp_path / "plan.json").exists()
    for name in ("dashboard.json", "dashboard.html", "thesis"):
        (tmp_path / name).touch()
    hosts[2].answers = [gone, gone]
    Pruner().remove(one)
    assert not one.removed and "thesis" in one.problems[0] and (tmp_path / "plan.json").exists()
    (tmp_path / "thesis").unlink()
    for host in hosts:
        host.answers = [gone, gone]
    Pruner().remove(one)
    assert one.removed and not one.problems and not tmp_path.exists()


def test_a_shared_folder_stays_while_a_host_runs_or_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({**planned().to_json(), "here": []}))
    idle = {"bytes": 7000, "place": "/home/x 5", "left": ""}
    hosts = [Answering("central", idle), Answering("A", {**idle, "running": 2}), Answering("B")]
    monkeypatch.setattr(Pruner, "_hosts", lambda *_: {host.name: host for host in hosts})
    one = Pruned(KnownJob("job-1", tmp_path, 0.0), 0.0)
    Pruner(forget_unreachable=True).remove(one)
    assert one.problems == ["host B: no route", "host A: processes of it still run there"] and not one.removed
    hosts[0].answers, hosts[1].answers = [idle], [idle]
    Pruner().remove(one)
    assert one.problems == ["host B: no route"] and not one.removed, "those that share its path are not asked again"
    hosts[0].answers, hosts[1].answers = [idle, idle], [idle, idle]
    Pruner(forget_unreachable=True).remove(one)
    assert one.removed and not one.problems and not tmp_path.exists()


def test_an_ended_job_is_removed_though_a_full_disk_has_kept_its_end_from_being_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({**planned().to_json(), "here": []}))
    job_state.JobState("running", 1, 1, "boot", "here", 0.0).write(tmp_path)
    idle = {"bytes": 7000, "place": "/home/x 5", "left": ""}
    hosts = [Answering(name, {**idle, "running": 1}, idle, idle) for name in ("central", "A", "B")]
    monkeypatch.setattr(Pruner, "_hosts", lambda *_: {host.name: host for host in hosts})
    one = Pruned(KnownJob("job-1", tmp_path, 0.0), 0.0)
    Pruner().remove(one)
    assert not one.removed and "processes of it still run there" in one.problems[0]
    Pruner().remove(one)
    assert one.removed and not one.problems and not tmp_path.exists()


def test_a_damaged_job_is_removed_here_and_blocks_no_other(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "plan.json").write_text('{"job": "jo')
    job_state.JobState("done", 1, 1, "boot", "here", 0.0).write(tmp_path)
    one = Pruned(KnownJob("job-1", tmp_path, 0.0), 0.0)
    Pruner().measure(one)
    assert one.hosts is None and "plan.json" in one.problems[0] and not one.sizes
    Pruner().remove(one)
    assert one.removed and not one.problems and not tmp_path.exists()


# Two hosts behind sshd.


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[Desk, str, list[Sshd]]]:
    """A job whose workers on two hosts have saved files."""
    person, desk = Person(tmp_path / "home"), Desk(tmp_path)
    machines = [Sshd(tmp_path / "machines" / name, name, person) for name in ("alpha", "beta")]
    for machine in machines:
        machine.start()
    story = {"*": "ends", **dict.fromkeys(("central/worker:0", "A/worker:0", "A/worker:1"), "saves")}
    launch = desk.launch("--json", story=story, sites=machines)
    assert launch.finish() == 0, launch.errors
    place = f"{machines[0].state_dir}/jobs/{launch.id}/outputs/central-worker-0/model.bin"
    assert json.loads(launch.output)["model"] == f"central:{place}"
    yield desk, launch.id, machines
    desk.close()
    for machine in machines:
        with contextlib.suppress(GeomxError):
            machine.stop()


@pytest.mark.processes
def test_outputs_of_a_process_that_failed_come_with_a_warning(desk: Desk) -> None:
    launch = desk.launch(story={"*": "forever", "A/worker:0": "spills"})
    assert launch.finish() == 1
    done = desk.geomx("fetch", "--to", "here")
    assert "model.bin" in done.stdout
    assert "warning: A/worker:0 failed (exited with status 1: OSError: [Errno 28] No space left" in done.stderr


@pytest.mark.processes
def test_outputs_come_back_from_two_hosts_and_are_pruned(saved: tuple[Desk, str, list[Sshd]]) -> None:
    desk, name, machines = saved
    done = desk.geomx("fetch", "--to", "res")
    assert done.returncode == 7 and done.stderr.count("passwords: a link") == 3
    folder = desk.folder / "res" / name / "outputs"
    workers = {"A-worker-0", "A-worker-1", "central-worker-0"}
    assert names(folder) == {f"{worker}/{file}" for worker in workers for file in ("model.bin", "notes/a b.txt")}
    assert (folder / "A-worker-1" / "model.bin").read_bytes() == b"A/worker:1" * 50_000
    listed = [line.split(maxsplit=1) for line in desk.geomx("logs", "collect", "--to", "res").stdout.splitlines()]
    assert ["A/worker:1", "model.bin  500 kB  on A"] in listed
    assert ["central/worker:0", "model.bin  800 kB  on central"] in listed
    assert f"model: central:{machines[0].state_dir}" in desk.geomx("status").stdout
    running = desk.launch("--detach")
    assert running.finish() == 0
    machines[1].stop()
    done = desk.geomx("jobs", "prune", "--yes")
    assert done.returncode == 7 and "host A: " in done.stderr and name in done.stdout
    assert not Path(machines[0].state_dir, "jobs", name).exists(), "the reachable host's part is gone"
    machines[1].start()
    done = desk.geomx("jobs", "prune")
    assert done.returncode == 2 and "nobody can be asked whether to remove 1 job" in done.stderr
    bare = desk.geomx("jobs", "prune", "--older-than", "30", "--yes")
    assert bare.returncode == 2 and "'30' has no unit; write 30s, 30h or 30d" in bare.stderr
    assert [one["job"] for one in desk.json("jobs", "prune", "--dry-run")["jobs"]] == [name]
    (found,) = desk.json("jobs", "prune", "--yes")["jobs"]
    assert found["removed"] and not found["hosts"]["central"] and found["hosts"]["A"] > 1_000_000
    assert not [path for path in desk.folder.rglob(name) if "res" not in path.parts]
    assert [one["job"] for one in desk.json("jobs")["jobs"]] == [running.id]
