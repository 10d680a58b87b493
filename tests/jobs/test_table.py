"""The displayed state of a job: the table at several terminal sizes, and the final messages."""

import io
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import plans
import pytest
from rich.console import Console

from geomx_cli.core.errors import Interrupted
from geomx_cli.core.events import Telemetry, Traffic, parse
from geomx_cli.core.options import defaults
from geomx_cli.core.root_cause import Failure, describe_status, ending_of
from geomx_cli.jobs.view.failure_report import explain
from geomx_cli.jobs.view.outputs import log_paths
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.jobs.view.result import Conclusion, Outcome, in_words, result
from geomx_cli.jobs.view.table import PartyTable, ProcessTable, party_totals, sentence
from geomx_cli.plan import JobSpec, Plan, plan
from geomx_cli.plan.ports import ports_needed
from geomx_cli.plan.this_machine import this_machine


@pytest.fixture
def planned(tmp_path: Path) -> Plan:
    options = defaults()
    spec = JobSpec(options=options, job="j", job_dir=str(tmp_path), socket_dir="/tmp/s", python="python")
    return plan(this_machine(options, range(20_000, 20_000 + ports_needed(options))), spec)


@pytest.fixture
def progress(planned: Plan) -> Progress:
    """During a training with large numbers; one worker has failed."""
    progress = Progress.of(planned, time.monotonic())
    for row in progress.rows.values():
        row.traffic = Traffic(lan=(715_000, 1_234_567_890), wan=(715_000, 1_234_567_890))
        if row.trains:
            row.apply(Telemetry(time=0.0, samples_per_s=1234.0), math.inf)
            row.state, row.round, row.loss = "evaluating", 12345, 0.4321
            row.accuracy, row.progress, row.left_s = 0.8888, 0.5, 123.0
    for name in ("A/server:0", "B/worker:1"):
        progress.rows[name].status, progress.rows[name].state = 1, "ended"
    progress.mark_first_failure(Failure("B/worker:1", "B", "exited with status 1", 0.0))
    return progress


def shown(progress: Progress, width: int, height: int, *, crop: bool = True) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, color_system=None)
    console.print(ProcessTable(progress, crop=crop))
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


WIDE = ["process", "state", "round", "samples/s", "loss", "accuracy", "LAN", "up/down", "WAN", "up/down"]
COLUMNS = {
    160: WIDE,
    100: [*WIDE[:5], "accuracy", "WAN", "up/down"],
    80: [*WIDE[:5], "WAN", "up/down"],
    60: ["process", "state", "round", "WAN", "up/down"],
    40: ["process", "state"],
}


@pytest.mark.parametrize("width", COLUMNS)
def test_the_table_fits_the_width(progress: Progress, width: int) -> None:
    lines = shown(progress, width, 40)
    assert max(map(len, lines)) <= width
    assert lines[0].split() == COLUMNS[width]
    assert [line.split()[0] for line in lines[1:13]] == list(progress.rows)
    assert not any("…" in line for line in lines)
    words = " ".join(lines[14:])
    assert words.startswith("stopping 50%, round 12345, loss 0.432, accuracy 0.8888, ")
    assert not words.endswith("left"), "it is being stopped"


def test_restarts_are_shown_once_there_are_any(progress: Progress) -> None:
    progress.rows["A/server:0"].restarts = 2
    lines = shown(progress, 160, 40)
    assert lines[0].split() == ["process", "state", "restarts", *WIDE[2:]]
    assert next(line for line in lines if line.startswith("A/server:0")).split()[:3] == ["A/server:0", "ended", "2"]


def test_the_time_that_is_left(progress: Progress) -> None:
    for row in progress.rows.values():
        row.status = None
    assert sentence(progress).endswith("2 min 03 s left")


def test_only_the_process_that_failed_first_is_marked(progress: Progress) -> None:
    lines = {line.split()[0]: line.split()[1] for line in shown(progress, 160, 40)[1:13]}
    assert (lines["B/worker:1"], lines["A/server:0"]) == ("failed", "ended")


def test_an_interrupted_job_does_not_start_any_more(planned: Plan) -> None:
    interrupted = replace(Progress.of(planned, 0.0), interrupted=True)
    text = sentence(interrupted)
    assert text.startswith("stopping") and "waiting" not in text


def test_no_time_is_left_to_a_job_that_has_ended(progress: Progress) -> None:
    for row in progress.rows.values():
        row.status = row.status or 0
    line = " ".join(shown(progress, 160, 40)[14:])
    assert line.startswith("stopped 50%") and "left" not in line


def test_a_job_that_has_ended_keeps_the_progress_of_the_hosts_that_answer(progress: Progress) -> None:
    progress.ended = "stopped"
    next(row for row in progress.training_rows if row.status is None).state = "? unreachable"
    for row in progress.training_rows:
        row.progress = None if row.state == "? unreachable" else 0.75
    assert progress.done == 0.75
    assert " ".join(shown(progress, 160, 40)[14:]).startswith("stopped 75%")


@pytest.mark.parametrize("height", [24, 12, 8, 4])
def test_the_table_fits_the_height(progress: Progress, height: int) -> None:
    lines = shown(progress, 80, height)
    assert len(lines) < height
    assert any(line.startswith("stopping 50%") for line in lines)
    if height == 8:
        assert [line.split()[0] for line in lines[1:4]] == ["A/worker:0", "B/worker:1", "and"]
    assert len(shown(progress, 80, height, crop=False)) == 16


def told(planned: Plan, fields: Mapping[str, object]) -> list[str]:
    """The lines of an explanation and its hint."""
    defaults = {"process": "A/worker:1", "host": "A", "how": "exited with status 1", "when": 0.0, "ending": "exited"}
    error = explain(Failure(**{**defaults, **fields}), planned)  # type: ignore[arg-type]
    return [*error.message.splitlines(), error.hint]


def test_an_explanation_shows_the_end_of_the_log(planned: Plan) -> None:
    lines = told(planned, {"tail": ["Traceback", "ValueError: no"]})
    assert lines[0] == "A/worker:1 (worker 1 of party A, on host A) failed first: it exited with status 1"
    assert lines[1] == f"  the end of its log, {planned.spec.job_dir}/logs/A-worker-1.log:"
    assert lines[2:] == ["    Traceback", "    ValueError: no", "correct what the log shows and launch again"]


def test_an_explanation_says_nothing_twice(planned: Plan) -> None:
    tail = ["error: the data is bad", "  fetch it again"]
    fields = {"message": "the data is bad", "hint": "fetch it again", "tail": tail}
    lines = told(planned, fields)
    assert lines[1:] == [f"  its log is {planned.spec.job_dir}/logs/A-worker-1.log", "fetch it again"]
    tail = ["Traceback", "geomx_cli.core.errors.InvalidSettings: the data is bad (fetch it again)"]
    lines = told(planned, {**fields, "tail": tail})
    assert lines[2:] == ["    Traceback", "fetch it again"]


def test_an_explanation_of_a_cut_does_not_say_that_an_agent_or_a_process_failed(planned: Plan) -> None:
    lines = told(planned, {"process": "", "how": "cannot be reached", "fault": "host"})
    assert lines[0] == "host A cannot be reached" and "agent.log" in lines[1]
    lines = told(planned, {"how": "was not heard", "fault": "link"})
    assert lines[0] == "A/worker:1 (worker 1 of party A, on host A) was not heard"


def test_a_module_that_a_host_lacks_is_named(
    planned: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = "exited with status 1: the script raised ModuleNotFoundError: No module named 'pandas.io'"
    assert told(planned, {"message": cause})[-1] == "install pandas on host A (python -m pip install pandas)"
    argv = ("env", "X=1", "python", "train.py")
    by_launcher = replace(planned, processes=tuple(replace(one, argv=argv) for one in planned.processes))
    assert told(by_launcher, {"message": cause})[-1] == "install pandas on host A"
    shared = {"message": cause, "also": ["central/worker:0"]}
    assert told(planned, shared)[-1].startswith("install pandas on hosts A, central (")
    far = replace(planned, job_dirs=dict.fromkeys(planned.job_dirs, "/elsewhere"))
    assert told(far, {"message": cause})[-1].endswith("or if it is your own, send it: --sync pandas.py")
    (tmp_path / "pandas").mkdir()
    (tmp_path / "pandas" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)  # as pip install -e does
    assert told(far, {"message": cause})[-1] == f"send it to the hosts: --sync {tmp_path}/pandas"


def test_a_file_that_only_this_machine_has_is_to_be_sent(
    planned: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").touch()
    far = replace(planned, job_dirs=dict.fromkeys(planned.job_dirs, "/elsewhere"))

    def hint(path: object, where: Plan = far) -> str:
        cause = "exited with status 1: the script raised FileNotFoundError: [Errno 2] No such file or directory: "
        return told(where, {"message": f"{cause}'{path}'", "hint": "correct it", "tail": ["other"]})[-1]

    assert hint("data/train.csv").startswith("data/train.csv is on this machine only: send it to the hosts with --sync")
    assert hint(tmp_path / "data") == f"{tmp_path}/data is on this machine only: put it on the hosts"
    assert hint("data/test.csv") == hint("data/train.csv", planned) == "correct it"


def test_a_stop_that_did_not_reach_a_host_says_so(planned: Plan, progress: Progress) -> None:
    outcome = Outcome(interrupted=True, stopped_by="Ctrl-C", problems=["host B: no route"])
    end = Conclusion.of(planned, outcome, progress.totals(), 1.0)
    assert end.result["exit_code"] == 130 and end.result["problems"] == ["host B: no route"]
    assert isinstance(end.error, Interrupted)
    assert end.error.message == "job j was stopped by Ctrl-C, but: host B: no route"
    assert "lease" in end.error.hint and "geomx stop j" in end.error.hint
    end = Conclusion.of(planned, replace(outcome, problems=[]), progress.totals(), 1.0)
    assert str(end.error) == "job j was stopped by Ctrl-C"


def test_an_empty_log_is_not_to_be_corrected(planned: Plan) -> None:
    assert told(planned, {})[-1].startswith("its log is empty")
    assert "may be executed" in told(planned, {"how": "could not be started: No such file", "ending": "unstarted"})[-1]


def test_want_of_memory_is_not_somebodys_signal(planned: Plan) -> None:
    for memory, hint in ((True, "fewer workers"), (False, "find out who killed it")):
        how, ending = describe_status(-9, memory=memory), ending_of(-9, memory=memory)
        assert hint in told(planned, {"how": how, "ending": ending})[-1]


def test_logs_on_other_hosts_have_no_folder_here(planned: Plan, progress: Progress) -> None:
    found = result(planned, Outcome(), None, progress.totals(), 1.0)
    assert found["logs"] == f"{planned.spec.job_dir}/logs"
    planned.job_dirs["B"] = "/data/geomx/jobs/j"  # type: ignore[index]
    found = result(planned, Outcome(), None, progress.totals(), 1.0)
    assert found["logs"] is None
    last = in_words(found).splitlines()[-1]
    assert last.split(maxsplit=1) == ["logs", "on the hosts: geomx logs j, or geomx logs collect j --to DIR"]
    assert log_paths(planned) == f"logs lie {last.split(maxsplit=1)[1]}"


def test_the_accuracy_at_the_end_is_the_last_word(planned: Plan) -> None:
    """Telemetry, and even the latest round and evaluation, may be written after it."""
    progress = Progress.of(planned, time.monotonic())
    for event in (
        {"event": "telemetry", "accuracy": 0.25}, {"event": "finished", "accuracy": 0.5, "samples": 1},
        {"event": "telemetry", "accuracy": 0.25}, {"event": "evaluation", "accuracy": 0.25, "round": 2},
        {"event": "round", "accuracy": 0.25, "num_iters": 2, "num_samples": 1, "total_time": 1.0},
    ):  # fmt: skip
        taken = parse({"time": time.time(), **event})
        assert taken is not None
        progress.apply("A/worker:0", taken, time.monotonic())
    assert (progress.accuracy, progress.rows["A/worker:0"].accuracy) == (0.5, 0.5)


def test_the_subtotals_of_a_party(progress: Progress) -> None:
    """Of two workers with the same rate, the one that waits less computes slower; one that has failed is not up."""
    first, second = progress.rows["A/worker:0"], progress.rows["A/worker:1"]
    first.waiting, second.waiting = 0.5, 0.2
    progress.rows["B/worker:0"].state = "? gone"
    central, a, b = party_totals(progress)
    assert (central.party, central.workers, central.slowest) == ("central", 0, "")
    assert (a.up, a.workers, a.samples_per_s) == (2, 2, 2468.0)
    assert (a.slowest, a.slowest_samples_per_s) == ("A/worker:1", 1542.5)
    assert a.wan == (4 * 715_000, 4 * 1_234_567_890)
    assert (b.up, b.workers, b.to_json()["workers"]) == (0, 2, {"total": 2, "up": 0})
    for row in progress.rows.values():
        row.status, row.samples, row.training_s = 0, 100, 4.0
    assert [(one.samples_per_s, one.slowest) for one in party_totals(progress)] == [(0.0, "")] * 3, "as in `status`"


@pytest.mark.parametrize(("width", "height"), [(160, 24), (40, 8)])
def test_the_table_of_parties(progress: Progress, width: int, height: int) -> None:
    out = io.StringIO()
    Console(file=out, width=width, height=height, color_system=None).print(PartyTable(progress, crop=True))
    assert "A" in out.getvalue() and "2/2" in out.getvalue() and "stopping 50%" in out.getvalue()
    out = io.StringIO()
    many = Progress.of(plans.planned(parties=30), time.monotonic())
    Console(file=out, width=width, height=height, color_system=None).print(PartyTable(many, crop=True))
    lines = out.getvalue().splitlines()
    left_out = next(number for number, line in enumerate(lines) if line.startswith("and "))
    assert len(lines) < height, "the cursor has a line too"
    assert max(map(len, lines)) <= width and lines[left_out].split()[1] == str(31 - (left_out - 1))


def test_who_is_waited_for_is_told_by_the_workers_names(planned: Plan) -> None:
    """A root knows the parties' servers; one that waits for nobody itself waits for all of its workers."""
    progress = Progress.of(planned, time.monotonic())
    for row in progress.rows.values():
        row.apply(Telemetry(time=1.0, number=1, state="training", round=3), time.monotonic())
    root, server = progress.rows["central/global_server:0"], progress.rows["A/server:0"]
    assert "waiting" not in sentence(progress)
    root.apply(Telemetry(time=2.0, number=2, awaited="A/server:0"), time.monotonic())
    assert "waiting for A/worker:0, A/worker:1" in sentence(progress)
    server.apply(Telemetry(time=2.0, number=2, awaited="A/worker:1"), time.monotonic())
    assert "waiting for A/worker:1," in f"{sentence(progress)}," and "A/worker:0" not in sentence(progress)
    root.apply(Telemetry(time=3.0, number=3), time.monotonic())
    server.apply(Telemetry(time=3.0, number=3), time.monotonic())
    assert "waiting" not in sentence(progress)


def test_parties_that_are_left_out_are_told_and_do_not_count_as_progress(planned: Plan) -> None:
    progress = Progress.of(planned, time.monotonic())
    for name, row in progress.rows.items():
        done = 0.1 if name.startswith("B/") else 0.5
        row.apply(Telemetry(time=1.0, number=1, state="training", round=3, progress=done), time.monotonic())
    assert progress.done == 0.1
    root = progress.rows["central/global_server:0"]
    root.apply(Telemetry(time=2.0, number=2, left_out={"B": "since 12:03:10 (34 rounds)"}), time.monotonic())
    assert progress.done == 0.5 and "without party B since 12:03:10 (34 rounds)" in sentence(progress)
    root.apply(Telemetry(time=3.0, number=3), time.monotonic())
    assert progress.done == 0.1 and "without" not in sentence(progress)


def test_a_script_that_awaits_its_local_rank_is_told_where_that_is(planned: Plan) -> None:
    tail = ["usage: train.py [-h] --local_rank N", "t.py: error: the following arguments are required: --local_rank"]
    error = explain(Failure("B/worker:1", "B", "exited with status 2", 0.0, tail=tail), planned)
    assert "--local_rank {local_rank}, or read LOCAL_RANK instead" in error.hint
