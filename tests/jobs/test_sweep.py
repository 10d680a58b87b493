"""Sweeps: which jobs run, and what an interrupted one continues with."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from desk import Desk
from idx import write_data

from geomx_cli.core import plugins
from geomx_cli.core.errors import CheckFailed, HostUnreachable, InvalidSettings, TrainingFailed
from geomx_cli.core.errors import Interrupted as Stopped
from geomx_cli.core.files import locked_folder
from geomx_cli.core.jobs_folder import jobs_folder
from geomx_cli.core.plugins import table
from geomx_cli.hosts.ssh.options import SshOptions
from geomx_cli.jobs.actions.sweep import Runner, sweep, unfinished
from geomx_cli.jobs.actions.sweep_jobs import Cell, SweepJobs, SweepManifest, SweepSettings
from geomx_cli.jobs.store.job_state import JobState, finish, follow
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.jobs.view.result import Conclusion
from geomx_cli.plan import JobSpec
from geomx_cli.plan.this_machine import this_machine

DONE = Conclusion({"status": "done", "accuracy": 0.5})
FAILED = Conclusion({"status": "failed"}, TrainingFailed("a worker failed\nits log is there"))


@dataclass
class Jobs:
    """A runner's jobs: `ends` of jobs by (algorithm, seed), else done; `hosts` without records, at first."""

    folder: Path
    ends: dict[tuple[str, int], Any] = field(default_factory=dict)
    problems: list[dict[str, str]] = field(default_factory=list)
    launched: list[tuple[str, int]] = field(default_factory=list)
    attached: list[str] = field(default_factory=list)
    detaches: bool = False
    script: str = "a"

    def launch(self, cell: Cell) -> Conclusion:
        (jobs_folder() / cell.job).mkdir(parents=True)
        (jobs_folder() / cell.job / "plan.json").write_text("{}")
        self.launched.append((cell.algo, cell.seed))
        end = self.ends.pop((cell.algo, cell.seed), DONE)
        if isinstance(end, BaseException):
            raise end
        assert isinstance(end, Conclusion)
        return end

    def attach(self, job: KnownJob) -> Conclusion:
        self.attached.append(job.id)
        return Conclusion() if self.detaches else DONE

    def collect(self, job: KnownJob) -> Mapping[str, Any]:
        place = self.folder / "cnn" / "any" / job.id
        place.mkdir(parents=True, exist_ok=True)
        problems, self.problems = self.problems, []
        return {"records": str(place), "problems": problems}

    def run(self, *algorithms: str, seeds: int = 2, restart: bool = False, **options: Any) -> dict[str, str]:
        def settings() -> SweepSettings:
            return SweepSettings(["python", "train.py"], {"lr": 0.1, **options}, self.script)

        runner = Runner(self.launch, self.attach, self.collect, settings, print)
        cells = sweep(self.folder, list(algorithms), range(1, 1 + seeds), runner, target=0.8, restart=restart)
        return {cell.name: cell.state for cell in cells}


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Jobs(tmp_path / "sweep")


def test_a_failed_job_does_not_stop_the_others(jobs: Jobs) -> None:
    jobs.ends[("hfa", 1)] = FAILED
    jobs.ends[("fsa", 2)] = Conclusion({"status": "done in part"}, CheckFailed("a host could not be stopped"))
    found = jobs.run("fsa", "hfa")
    assert jobs.launched == [("fsa", 1), ("hfa", 1), ("fsa", 2), ("hfa", 2)], "all algorithms of a seed first"
    states = {"fsa, seed 1": "done", "hfa, seed 1": "failed", "fsa, seed 2": "done in part", "hfa, seed 2": "done"}
    assert found == states
    manifest = SweepManifest.read(jobs.folder)
    assert manifest is not None
    first, _ = unfinished(manifest.cells)
    assert first.startswith("hfa, seed 1: failed (job 2") and first.endswith(": a worker failed)")
    jobs.launched.clear()
    assert set(jobs.run("fsa", "hfa").values()) == {"done"}
    assert jobs.launched == [("hfa", 1), ("fsa", 2)], "only what was not done"
    jobs.launched.clear()
    jobs.run("fsa", "hfa", "diloco", seeds=3)
    assert jobs.launched == [("diloco", 1), ("diloco", 2), ("fsa", 3), ("hfa", 3), ("diloco", 3)]


def test_errors_of_a_refused_launch_are_shown_in_full(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    jobs.ends[("fsa", 1)] = HostUnreachable("2 problems:\n  h0: refuses\n    is sshd running?\n  h1: refuses")
    jobs.ends[("hfa", 1)] = HostUnreachable("h0: refuses", "is sshd running?")
    assert set(jobs.run("fsa", "hfa", seeds=1).values()) == {"failed"}
    said = capsys.readouterr().out
    assert "error: 2 problems:\n  h0: refuses\n    is sshd running?\n  h1: refuses\n" in said
    assert said.count("h0: refuses (is sshd running?)") == 1
    manifest = SweepManifest.read(jobs.folder)
    assert manifest is not None
    assert [cell.why for cell in manifest.cells] == ["2 problems", "h0: refuses (is sshd running?)"]


def test_a_job_collected_in_part_is_not_run_again(jobs: Jobs) -> None:
    jobs.problems = [{"host": "b", "problem": "it does not answer"}]
    assert jobs.run("fsa", seeds=1) == {"fsa, seed 1": "collected in part"}
    assert jobs.run("fsa", seeds=1) == {"fsa, seed 1": "done"} and len(jobs.launched) == 1
    manifest = SweepManifest.read(jobs.folder)
    assert manifest is not None
    (jobs.folder / manifest.cells[0].records).rmdir()
    assert jobs.run("fsa", seeds=1) == {"fsa, seed 1": "done"}
    assert len(jobs.launched) == 1 and (jobs.folder / manifest.cells[0].records).exists(), "collected again"


def test_records_outlive_their_job(jobs: Jobs) -> None:
    jobs.problems = [{"host": "b", "problem": "it does not answer"}]
    jobs.run("fsa", seeds=1)
    (folder,) = jobs_folder().iterdir()
    shutil.rmtree(folder)
    assert jobs.run("fsa", seeds=1) == {"fsa, seed 1": "collected in part"} and len(jobs.launched) == 1
    manifest = SweepManifest.read(jobs.folder)
    assert manifest is not None and manifest.cells[0].why == "host b: it does not answer"


def test_a_killed_sweep_continues_with_its_job(jobs: Jobs) -> None:
    jobs.ends[("fsa", 1)] = SystemExit()
    with pytest.raises(SystemExit):
        jobs.run("fsa")
    manifest = SweepManifest.read(jobs.folder)
    assert manifest is not None and manifest.cells[0].state == "running"
    jobs.detaches = True
    with pytest.raises(Stopped, match="continues without this sweep"):
        jobs.run("fsa")
    assert jobs.attached == [manifest.cells[0].job] and jobs.launched == [("fsa", 1)]
    jobs.detaches = False
    jobs.ends[("fsa", 2)] = Conclusion({"status": "interrupted"}, Stopped("stopped"))
    with pytest.raises(Stopped):
        jobs.run("fsa")
    assert jobs.attached == [manifest.cells[0].job] * 2 and jobs.launched == [("fsa", 1), ("fsa", 2)]
    assert set(jobs.run("fsa").values()) == {"done"} and jobs.launched[2:] == [("fsa", 2)]


def test_a_job_stopped_after_its_sweep_was_killed_runs_again(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.ends[("fsa", 1)] = SystemExit()
    with pytest.raises(SystemExit):
        jobs.run("fsa", seeds=1)
    stopped = Conclusion({"status": "interrupted"}, Stopped("stopped by geomx stop"))
    monkeypatch.setattr(jobs, "attach", lambda job: stopped)
    with pytest.raises(Stopped):  # while the second sweep followed it
        jobs.run("fsa", seeds=1)
    manifest = SweepManifest.read(jobs.folder)
    assert manifest is not None
    manifest.cells[0].state = "running"
    manifest.write(jobs.folder)
    follow(jobs_folder() / manifest.cells[0].job)
    finish(jobs_folder() / manifest.cells[0].job, {"status": "interrupted"})
    assert jobs.run("fsa", seeds=1) == {"fsa, seed 1": "done"}
    assert jobs.launched == [("fsa", 1)] * 2


def test_ctrl_c_after_the_end_of_a_job_collects_it(jobs: Jobs) -> None:
    jobs.ends[("fsa", 1)] = Conclusion({"status": "done"}, Stopped("Ctrl-C came after its end"))
    with pytest.raises(Stopped, match="came after its end"):
        jobs.run("fsa")
    assert jobs.launched == [("fsa", 1)]
    assert set(jobs.run("fsa").values()) == {"done"} and jobs.launched == [("fsa", 1), ("fsa", 2)]


@pytest.mark.parametrize("began", [False, True])
def test_ctrl_c_while_a_job_starts(jobs: Jobs, monkeypatch: pytest.MonkeyPatch, began: bool) -> None:
    def launch(cell: Cell) -> Conclusion:
        if began:
            Jobs.launch(jobs, cell)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(Stopped, match=r"interrupted; job \S+ ") as raised:
        patch.setattr(jobs, "launch", launch)
        jobs.run("fsa")
    assert raised.value.hint == "repeat the command to continue"
    assert ("was not started" in raised.value.message) == (not began)
    manifest = SweepManifest.read(jobs.folder)
    assert manifest is not None
    (cell, *_) = manifest.cells
    assert (cell.state, bool(cell.job)) == (("running", True) if began else ("pending", False))


def test_ctrl_c_while_records_are_collected(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    def collect(job: KnownJob) -> Mapping[str, Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(Stopped, match="records are not collected"):
        patch.setattr(jobs, "collect", collect)
        jobs.run("fsa")
    assert set(jobs.run("fsa").values()) == {"done"} and jobs.launched == [("fsa", 1), ("fsa", 2)]


def test_a_sweep_with_other_settings_is_refused(jobs: Jobs) -> None:
    jobs.run("fsa", seeds=1)
    with pytest.raises(InvalidSettings, match=r"other settings: --lr was 0.1 and is 0.2 "):
        jobs.run("fsa", seeds=1, lr=0.2)
    assert len(jobs.launched) == 1
    (jobs.folder / "train.py").touch()
    jobs.run("fsa", seeds=1, lr=0.2, restart=True)
    assert len(jobs.launched) == 2 and len(list(jobs.folder.glob("old-*/cnn/any/*"))) == 1
    (aside,) = jobs.folder.glob("old-*")
    assert {path.name for path in aside.iterdir()} == {"sweep.json", "cnn"}, "files of others stay"
    old = SweepSettings(["a"], {}, "1", "2")
    assert old.changes(SweepSettings(["b"], {}, "2", "2")) == ["the command is b"]
    forced, chosen, before = (SweepSettings(["a"], {"topology": name}) for name in ("auto", "spread", "central"))
    assert forced.changes(chosen) == chosen.changes(forced) == [], "algorithms of another kind were added"
    assert before.changes(chosen) == ["--topology was 'central' and is 'spread'"]
    changed = ["the script or a file of --sync has changed", "the inventory has changed"]
    assert old.changes(SweepSettings(["a"], {}, "3", "3")) == changed
    with locked_folder(jobs.folder, ".lock"), pytest.raises(CheckFailed, match="another geomx writes to"):
        jobs.run("fsa", seeds=1, lr=0.2)
    (jobs.folder / "sweep.json").write_text("{")
    with pytest.raises(InvalidSettings, match="cannot be read"):
        jobs.run("fsa", seeds=1)


def test_a_script_edited_meanwhile_ends_the_sweep(jobs: Jobs) -> None:
    def edited(cell: Cell) -> Conclusion:
        jobs.script = "b"
        return launch(cell)

    launch, jobs.launch = jobs.launch, edited  # type: ignore[method-assign]
    with pytest.raises(InvalidSettings, match="the script or a file of --sync has changed"):
        jobs.run("fsa")
    manifest = SweepManifest.read(jobs.folder)
    assert manifest is not None and [cell.state for cell in manifest.cells] == ["done", "pending"]


def test_settings_are_the_same_whichever_algorithm_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_DROP_MSG", "1")
    given = {option.name: option.default for option in table()}
    lines: list[str] = []

    def machines(name: str) -> Any:
        options = {**given, **plugins.algorithms()[name].forced_options, "algo": name, "seed": 7}
        return this_machine(options, range(20_000, 20_100)), options

    def settings(*algorithms: str) -> SweepSettings:
        jobs = SweepJobs(JobSpec(), given, machines, None, (), SshOptions(), lines.append)
        assert jobs.prepare(algorithms) == 7, "the seed of the inventory"
        return jobs.settings()

    assert settings("local", "fsa") == settings("fsa")
    assert lines[0].startswith("warning: PS_DROP_MSG has no effect")


def test_restart_waits_for_the_job_that_runs(jobs: Jobs) -> None:
    jobs.ends[("fsa", 1)] = SystemExit()
    with pytest.raises(SystemExit):
        jobs.run("fsa", seeds=1)
    manifest = SweepManifest.read(jobs.folder)
    assert manifest is not None
    JobState("detached", 1, 1, "", "", 0.0).write(jobs_folder() / manifest.cells[0].job)
    with pytest.raises(InvalidSettings, match="may still run"):
        jobs.run("fsa", seeds=1, restart=True)
    JobState("interrupted", 1, 1, "", "", 0.0).write(jobs_folder() / manifest.cells[0].job)
    assert jobs.run("fsa", seeds=1, restart=True) == {"fsa, seed 1": "done"}


def test_from_the_command_to_table_and_figure(desk: Desk, tmp_path: Path) -> None:
    data, folder = write_data(tmp_path / "data"), tmp_path / "runs"
    words = ["sweep", "--algo", "local", "--seeds", "2", "--to", str(folder), "--local", "--network", "linear"]
    words += ["--data-dir", str(data), "--batch-size", "16", "--epochs", "2", "--target", "0.3"]
    done = desk.geomx(*words)
    assert done.returncode == 0, done.stderr
    heading, row, figure = done.stdout.splitlines()
    assert "0.3" in heading and heading.split()[:2] == ["training", "n"]
    assert row.split()[:3] == ["linear", "Local", "2"], row
    assert figure == str(folder / "figures" / "accuracy.png") and Path(figure).exists()
    cells = json.loads((folder / "sweep.json").read_text())["cells"]
    metadata = [json.loads((folder / cell["records"] / "job.json").read_text()) for cell in cells]
    assert [one["options"]["seed"] for one in metadata] == [1, 2]
    assert [one["outcome"] for one in metadata] == ["done", "done"]
    again = desk.geomx(*words)
    assert again.stdout == done.stdout and again.stderr.count("done already") == 2
    assert desk.geomx("sweep", "--report", "--to", str(folder)).stdout == done.stdout
    other = desk.geomx("sweep", "--report", "--to", str(folder), "--target", "0.2")
    assert "0.2" in other.stdout.splitlines()[0], "for this report only"
    without = desk.geomx(*words[:-2])
    assert without.stdout == done.stdout, "the target is that of the sweep"
    shown = desk.geomx("sweep", "--report", "-o", str(folder), "--json")
    found = json.loads(shown.stdout)
    assert (shown.returncode, found["schema_version"], found["folder"]) == (0, 1, str(folder))
    assert [(job["seed"], job["state"]) for job in found["jobs"]] == [(1, "done"), (2, "done")]
    assert all(Path(job["records"]).is_dir() for job in found["jobs"]) and found["figure"] == figure
    assert [(group["n"], group["accuracy"]["n"]) for group in found["groups"]] == [(2, 2)]
    refused = desk.geomx(*words, "--lr", "0.5")
    assert refused.returncode == 3 and "--lr was the default and is 0.5" in refused.stderr
    assert desk.geomx("sweep", "--report", "--seeds", "3").returncode == 2
    assert desk.geomx("sweep", "--seeds", "3").returncode == 2
    (desk.folder / "file").write_text("")
    done = desk.geomx("sweep", "--algo", "fsa", "--to", "file")
    assert done.returncode == 2 and "'file' is a file" in done.stderr
