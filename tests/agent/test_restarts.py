"""Schedulers and servers that die without a word are started again; nothing of them stays."""

import errno
import json
import os
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from cluster import until
from lone_agent import MARK, Agent

from geomx_cli.agent import processes, prune, state_folder
from geomx_cli.agent.agent_state import AgentState
from geomx_cli.agent.beginning import Beginning
from geomx_cli.agent.checkpoint import Checkpoint, Part
from geomx_cli.agent.child import Child
from geomx_cli.agent.groups import WorkerGroups
from geomx_cli.agent.host_spec import HostSpec, Task
from geomx_cli.agent.incarnation import Incarnation
from geomx_cli.agent.lifecycle import Stage
from geomx_cli.agent.restart_policy import RestartPolicy
from geomx_cli.agent.stop import clean_up, stop
from geomx_cli.agent.supervisor import Supervisor
from geomx_cli.core import state_notes
from geomx_cli.core.conventions import JobClock, number_before
from geomx_cli.core.state_notes import StateNotes

BEGIN = """
import json, os, signal, subprocess, sys, time
life, state = int(os.environ.get("GEOMX_INCARNATION", "-1")), os.environ.get("GEOMX_STATE_DIR", "")
os.makedirs("events", exist_ok=True)
log = open("events/server.jsonl", "a")
def say(end="\\n", **event): print(json.dumps(event), file=log, flush=True, end=end)
def die(): os.kill(os.getpid(), signal.SIGKILL)
print("life", life, flush=True)
"""
TELLS = "say(event='telemetry', time=time.time(), number=(life << 36) + 1, state='serving', bytes={'wan': [10, 1]});"
SERVES = BEGIN + "open(f'{state}/lives', 'a').write(f'{life} ')\n" + TELLS + "signal.pause()"
DIES = BEGIN + "die()"
WAITS = "import signal; signal.pause()"


def pid_of(agent: Agent, name: str = "server") -> int:
    state = AgentState.read(agent.directory)
    assert state is not None
    return state.processes[name].pid


def serving(agent: Agent, life: int) -> list[dict[str, Any]]:
    """What the agent has said until this life of the server has spoken."""
    said: list[dict[str, Any]] = []
    while not said or said[-1]["event"].get("number") != number_before(life) + 1:
        said += agent.until("event")
    return said


@pytest.mark.processes
def test_processes_that_die_or_are_stopped_while_suspended_have_no_checkpoint(agents: Any) -> None:
    agent = agents(lease=60, restarts=3, server=SERVES)
    agent.until("hello")
    agent.send(type="start")
    serving(agent, 0)
    agent.send(type="freeze", number=5)
    assert agent.until("frozen")[-1]["problem"] == ""
    os.kill(pid_of(agent), signal.SIGKILL)
    serving(agent, 1)
    agent.send(type="keep", number=5)
    assert agent.until("kept")[-1] == {"type": "kept", "number": 5, "problem": "server has died"}
    agent.send(type="freeze", number=6)
    assert agent.until("frozen")[-1]["problem"] == ""
    agent.send(type="stop")
    agent.send(type="keep", number=6)
    assert agent.until("kept")[-1]["problem"] == "the job ends"
    agent.until("done")
    agent.assert_clean()
    assert not (agent.directory / "checkpoints").exists()


@pytest.mark.processes
def test_a_process_whose_state_was_removed_has_no_checkpoint_and_no_next_life(agents: Any, tmp_path: Path) -> None:
    agent = agents(lease=60, restarts=3, server=SERVES)
    agent.send(type="start")
    serving(agent, 0)
    shutil.rmtree(state_folder.found(tmp_path)[0])
    (warning,) = [each for each in agent.until("warning") if each["type"] == "warning"]
    assert "was removed by another program" in warning["message"] and "enable-linger" in warning["message"]
    agent.send(type="freeze", number=5)
    assert agent.until("frozen")[-1]["problem"] == "the state of server was removed"
    os.kill(pid_of(agent), signal.SIGKILL)
    failure = agent.until("failure")[-1]
    assert "was removed by another program" in str(failure), "beside the cause"
    agent.send(type="stop")
    agent.until("done")
    agent.assert_clean()


@pytest.mark.processes
def test_killed_server_starts_again_where_it_was(agents: Any, tmp_path: Path) -> None:
    agent = agents(lease=60, restarts=3, server=SERVES)
    agent.send(type="start")
    serving(agent, 0)
    (folder,) = state_folder.found(tmp_path)
    assert folder.parent == Path("/dev/shm") and folder.name.startswith(f"geomx-{os.geteuid()}-{MARK['GEOMX_JOB']}-")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "server")] == [0o700, 0o700]
    before = pid_of(agent)
    os.kill(before, signal.SIGKILL)
    said = serving(agent, 1)
    (restarted,) = [message for message in said if message["type"] == "restarted"]
    assert {name: restarted[name] for name in ("process", "incarnation", "how", "count", "limit")} == {
        "process": "server", "incarnation": 1, "how": "was killed by SIGKILL", "count": 1, "limit": 3
    }  # fmt: skip
    events = [message["event"] for message in said if message["type"] == "event"]
    assert [event["event"] for event in events] == ["restarted", "telemetry"]
    assert events[0]["number"] == number_before(1) and events[0]["message"] == "was killed by SIGKILL; started again"
    assert pid_of(agent) != before
    assert (folder / "server" / "lives").read_text() == "0 1 "
    lines = (tmp_path / "logs" / "server.log").read_text().splitlines()
    assert lines == ["life 0", "-- restarted by geomx: incarnation 1, as it was killed by SIGKILL --", "life 1"]
    agent.send(type="hello", seen=0)
    newest = agent.until("hello")[-1]["status"]["processes"]["server"]["newest"]
    assert newest["telemetry 0"]["bytes"] == newest["telemetry"]["bytes"] == {"wan": [10, 1]}
    assert newest["restarted"]["incarnation"] == 1
    agent.send(type="stop")
    said = agent.until("done")
    assert not [message for message in said if message["type"] == "failure"]
    agent.assert_clean()


def assert_none_follows(agent: Agent) -> None:
    """Nobody starts another agent, and nothing is left after it is cleaned up."""
    agent.attach()
    agent.until("absent")
    assert clean_up(agent.directory) == []
    agent.assert_clean()


def guards(agent: Agent) -> dict[str, int]:
    """The pids of the agent and its keeper."""
    keeper, own = json.loads((agent.directory / "agent.lock").read_text())[1:]
    return {"agent": own[0], "keeper": keeper[0]}


@pytest.mark.processes
@pytest.mark.parametrize("victims", ["agent", "keeper agent", "agent server", "keeper agent server"])
def test_killed_agent_is_followed_by_another(victims: str, agents: Any, tmp_path: Path) -> None:
    agent = agents(lease=60, restarts=3, server=SERVES)
    agent.send(type="start")
    serving(agent, 0)
    before = {**guards(agent), "server": pid_of(agent)}
    for victim in victims.split():
        os.kill(before[victim], signal.SIGKILL)
    agent.attach(seen=4)
    said = serving(agent, 1)
    (hello,) = [message["status"] for message in said if message["type"] == "hello"]
    assert hello["stage"] == "running"
    (warning,) = [message["message"] for message in said if message["type"] == "warning"]
    assert warning == "its agent was killed and started again, with 1 process"
    (restarted,) = [message for message in said if message["type"] == "restarted"]
    assert restarted["incarnation"] == 1 and restarted["how"] == "ended with its agent"
    assert min(message["n"] for message in said if "n" in message) > number_before(1)
    (folder,) = state_folder.found(tmp_path)
    assert (folder / "server" / "lives").read_text() == "0 1 "
    os.kill(pid_of(agent), signal.SIGKILL)
    serving(agent, 2)
    state = AgentState.read(tmp_path)
    assert state is not None and (state.life, state.incarnations, state.ended) == (1, {"server": 2}, {})
    agent.send(type="stop")
    said = agent.until("done")
    assert not [message for message in said if message["type"] == "failure"]
    agent.assert_clean()


@pytest.mark.processes
def test_agents_that_are_killed_again_and_again_are_followed_within_limits(agents: Any) -> None:
    agent = agents(lease=60, restarts=2, server=SERVES)
    agent.send(type="start")
    serving(agent, 0)
    for life in (1, 2):
        os.kill(guards(agent)["agent"], signal.SIGKILL)
        agent.attach(seen=number_before(life - 1) + 99)
        serving(agent, life)
    os.kill(guards(agent)["agent"], signal.SIGKILL)
    assert_none_follows(agent)


@pytest.mark.processes
def test_a_later_agent_ends_too_if_nobody_connects_within_the_lease(agents: Any) -> None:
    agent = agents(lease=3, restarts=3, server=SERVES)
    agent.send(type="start")
    serving(agent, 0)
    agent.process.kill()
    os.kill(first := guards(agent)["agent"], signal.SIGKILL)
    until(lambda: agent.pid != first, 60)
    agent.assert_clean()
    log = (agent.directory / "agent.log").read_text()
    assert "the control machine disconnected and did not reconnect for 3 s" in log


DIES_AT = """
import os, signal, sys
from geomx_cli.agent import __main__, state_folder
from geomx_cli.agent.status import StatusFile
from geomx_cli.agent.supervisor import Supervisor
def before(owner, name, when=lambda *_: True):
    usual = getattr(owner, name)
    def method(*given, **named):
        if not os.path.exists("died") and when(*given):
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(*given, **named)
    setattr(owner, name, method)
os.chdir(sys.argv[3])
match sys.argv[1]:
    case "before it sweeps": before(Supervisor, "_sweep")
    case "before it says so": before(StatusFile, "write", lambda _, content: content["stage"] == "over")
    case "before it removes the states": before(state_folder, "remove", lambda _: os.path.exists("agent-end.jsonl"))
sys.exit(__main__.main(sys.argv[2:]))
"""


@pytest.mark.processes
@pytest.mark.parametrize("when", ["before it sweeps", "before it says so", "before it removes the states"])
def test_an_agent_that_is_killed_at_its_end_has_ended_well(
    when: str, agents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Agent, "program", ("-c", DIES_AT, when))
    agent = agents(lease=60, restarts=3, server=BEGIN + TELLS + "say(event='finished', time=time.time())")
    agent.send(type="start")
    said: list[dict[str, Any]] = []
    while not said or said[-1]["type"] != "done":
        assert agent.process.stdout is not None
        line = agent.process.stdout.readline()
        if line:
            said.append(json.loads(line))
        else:
            agent.attach(seen=max((message.get("n", 0) for message in said), default=0))
    assert (agent.directory / "died").exists()
    assert said[-1]["why"] == "" and said[-1]["left"] == []
    assert not [message for message in said if message["type"] in ("failure", "absent")]
    agent.assert_clean()


@pytest.mark.processes
@pytest.mark.parametrize("when", ["waiting", "stopping", "a script"])
def test_no_agent_follows(when: str, agents: Any) -> None:
    others = {"worker": BEGIN + "signal.pause()"} if when == "a script" else {}
    ignores = BEGIN + TELLS + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()"
    agent = agents(lease=60, grace=30, restarts=3, server=ignores, **others)
    agent.until("hello")
    if when != "waiting":
        agent.send(type="start")
        serving(agent, 0)
    if when == "stopping":
        agent.send(type="stop", who="somebody")
        agent.until("stopping")
    os.kill(guards(agent)["agent"], signal.SIGKILL)
    assert_none_follows(agent)


@pytest.mark.processes
def test_death_after_the_last_restart_ends_the_job(agents: Any) -> None:
    agent = agents(lease=60, restarts=3, server=DIES)
    agent.send(type="start")
    said = agent.until("done")
    assert [message["count"] for message in said if message["type"] == "restarted"] == [1, 2, 3]
    (failure,) = [message["failure"] for message in said if message["type"] == "failure"]
    assert failure["how"] == "was killed by SIGKILL after 3 restarts"
    assert failure["tail"][-1] == "life 3"
    agent.assert_clean()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "program", "restarts"),
    [
        ("server", BEGIN + "raise ValueError('there is no data')", 3),
        ("server", BEGIN + "say(event='failed', time=time.time(), message='no data'); die()", 3),
        ("server", BEGIN + TELLS + "os.kill(os.getpid(), signal.SIGTERM); signal.pause()", 3),
        ("worker", DIES, 3),
        ("server", DIES, 0),
    ],
    ids=["exception", "has said why", "asked to end", "worker", "no restarts"],
)
def test_others_end_the_job(name: str, program: str, restarts: int, agents: Any) -> None:
    agent = agents(lease=60, restarts=restarts, **{name: program})
    agent.send(type="start")
    said = agent.until("done")
    assert [message["failure"]["process"] for message in said if message["type"] == "failure"] == [name]
    assert not [message for message in said if message["type"] == "restarted"]
    agent.assert_clean()


@pytest.mark.processes
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_before_a_process_can_handle_it_asks_the_job_to_stop(name: str, agents: Any) -> None:
    agent = agents(lease=60, restarts=3, server=BEGIN + f"os.kill(os.getpid(), signal.{name})", other=WAITS)
    agent.send(type="start")
    said = agent.until("done")
    assert [message["who"] for message in said if message["type"] == "stopping"] == [f"{name} to server"]
    assert said[-1]["asked"] == f"{name} to server"
    assert not [message for message in said if message["type"] in ("failure", "restarted")]
    agent.assert_clean()


@pytest.mark.processes
def test_death_of_one_that_had_done_all_has_no_effect(agents: Any) -> None:
    agent = agents(lease=60, restarts=3, server=BEGIN + TELLS + "say(event='finished', time=time.time()); die()")
    agent.send(type="start")
    said = agent.until("done")
    assert said[-1]["why"] == ""
    assert [message["status"] for message in said if message["type"] == "ended"] == [0]
    assert not [message for message in said if message["type"] in ("failure", "restarted")]
    agent.assert_clean()


@pytest.mark.processes
def test_without_restarts_nothing_is_kept(agents: Any, tmp_path: Path) -> None:
    agent = agents(lease=60, server=BEGIN + "print(repr(state), flush=True); signal.pause()")
    agent.send(type="start")
    agent.until("started")
    while "''" not in (tmp_path / "logs" / "server.log").read_text():
        time.sleep(0.02)
    assert "life -1" in (tmp_path / "logs" / "server.log").read_text() and state_folder.found(tmp_path) == []
    agent.send(type="stop")
    agent.until("done")
    agent.assert_clean()


@pytest.mark.processes
def test_what_the_dead_has_left_is_killed_first(agents: Any) -> None:
    program = BEGIN + "if not life: subprocess.Popen(['sleep', '1000'])\n" + TELLS + "signal.pause()"
    agent = agents(lease=60, restarts=3, server=program)
    agent.send(type="start")
    serving(agent, 0)
    left = processes.session_members([pid_of(agent)])
    assert len(left) == 2
    os.kill(pid_of(agent), signal.SIGKILL)
    serving(agent, 1)
    assert not any(map(processes.exists, left))
    agent.send(type="stop")
    agent.until("done")
    agent.assert_clean()


@pytest.mark.processes
def test_half_an_event_of_the_dead_spoils_no_other(agents: Any) -> None:
    program = BEGIN + TELLS + "life or (say('', event='tele'), die()); signal.pause()"
    agent = agents(lease=60, restarts=3, server=program)
    agent.send(type="start")
    events = [message["event"]["event"] for message in serving(agent, 1) if message["type"] == "event"]
    assert events[-2:] == ["restarted", "telemetry"]
    agent.send(type="stop")
    agent.until("done")
    agent.assert_clean()


@pytest.mark.processes
@pytest.mark.parametrize("how", ["at once", "by geomx stop", "by SIGTERM"])
def test_stop_ends_what_dies_again_and_again(how: str, agents: Any, tmp_path: Path) -> None:
    agent = agents(lease=60, restarts=1000, server=DIES)
    agent.send(type="start")
    agent.until("restarted")
    if how == "by geomx stop":
        assert stop(tmp_path, grace=5)["left"] == []
    elif how == "by SIGTERM":
        os.kill(agent.pid, signal.SIGTERM)
    else:
        agent.send(type="kill")
    agent.until("done")
    agent.assert_clean()


@pytest.mark.processes
def test_all_is_gone_after_the_agent_was_killed(agents: Any, tmp_path: Path) -> None:
    agent = agents(lease=60, restarts=3, server=SERVES)
    agent.send(type="start")
    serving(agent, 0)
    os.kill(pid_of(agent), signal.SIGKILL)
    serving(agent, 1)
    for pid in reversed(guards(agent).values()):
        os.kill(pid, signal.SIGKILL)
    agent.process.wait(240)
    assert state_folder.found(tmp_path) != []
    assert clean_up(tmp_path) == []
    agent.assert_clean()


@pytest.mark.processes
def test_removing_a_job_removes_what_its_killed_agent_has_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "job" / "hosts" / "here"
    directory.mkdir(parents=True)
    agent = Agent(directory, lease=60, restarts=3, server=SERVES)
    try:
        agent.send(type="start")
        serving(agent, 0)
        for pid in reversed(guards(agent).values()):
            os.kill(pid, signal.SIGKILL)
        agent.process.wait(240)
        end = time.monotonic() + 10
        while processes.marked(MARK) and time.monotonic() < end:
            time.sleep(0.02)
        assert state_folder.found(directory) != []
        prune.main(directory, ["--dry-run"])
        assert state_folder.found(directory) != []
        prune.main(directory, [])
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["left"] == ""
        assert state_folder.found(directory) == []
    finally:
        agent.close()


NO_ROOM = (
    "import sys; from geomx_cli.agent import __main__, state_folder; state_folder._ROOM = 1 << 60;"
    "sys.exit(__main__.main(sys.argv[1:]))"
)


@pytest.mark.processes
def test_without_a_place_for_the_state_the_first_death_ends_the_job(
    agents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Agent, "program", ("-c", NO_ROOM))
    agent = agents(lease=60, restarts=3, server=DIES)
    agent.send(type="start")
    said = agent.until("done")
    (warning,) = [message["message"] for message in said if message["type"] == "warning"]
    assert warning.startswith("a killed scheduler or server ends the job, as its state cannot be kept: /dev/shm has ")
    assert "choose a --job-dir on a local disk" in warning
    assert [message["failure"]["how"] for message in said if message["type"] == "failure"] == ["was killed by SIGKILL"]
    agent.assert_clean()


def test_state_lies_in_memory_or_else_on_a_local_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, problem = state_folder.choose(tmp_path, "j")
    assert memory is not None and memory.parent == Path("/dev/shm") and not problem
    monkeypatch.setattr(state_folder, "_MEMORY", tmp_path / "none")
    assert state_folder.choose(tmp_path, "j") == (tmp_path / "state", "")
    monkeypatch.setattr(state_folder, "LOCAL", ())
    place, problem = state_folder.choose(tmp_path, "j")
    assert place is None
    assert problem.startswith(f"{tmp_path}/none is not in memory and {tmp_path} is no local disk, but ")


def test_state_of_an_earlier_agent_is_removed_and_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    folder, _ = state_folder.create(tmp_path, "j")
    assert folder is not None
    (folder / "old").touch()
    (folder / "link").symlink_to(elsewhere)
    assert state_folder.create(tmp_path, "j") == (folder, "") and not (folder / "old").exists()
    assert state_folder.continues(tmp_path) is None, "what the processes begin with is not whole yet"
    state_notes.permit(folder)
    assert state_folder.continues(tmp_path) == folder
    state_folder.forbid(tmp_path)
    assert state_folder.continues(tmp_path) is None
    state_folder.remove(tmp_path)
    folder.symlink_to(elsewhere)
    try:
        place, problem = state_folder.create(tmp_path, "j")
        assert place is None and "cannot be created: File exists" in problem
    finally:
        folder.unlink()
    state_folder.remove(tmp_path)
    assert (elsewhere / "kept").exists()


@pytest.mark.processes
def test_folders_in_memory_of_jobs_that_are_gone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of jobs that run though their directory cannot be seen, nor what has no owner."""
    (memory := tmp_path / "memory").mkdir()
    monkeypatch.setattr(state_folder, "_MEMORY", memory)
    monkeypatch.setattr(state_folder, "file_system", lambda _: "tmpfs")
    folders = {}
    for name in ("gone", "runs", "kept", "elsewhere"):
        (directory := tmp_path / name / "hosts" / "A").mkdir(parents=True)
        folders[name], _ = state_folder.create(directory, "j")
    (unknown := memory / f"geomx-{os.geteuid()}-j-A-0").mkdir(0o700)
    assert folders["elsewhere"] is not None
    (folders["elsewhere"] / "owner.json").write_text(json.dumps([str(tmp_path / "other"), "mnt:[1]"]))
    marks = {"GEOMX_JOB_DIR": str(tmp_path / "runs"), "GEOMX_HOST": "A"}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=marks) as process:
        until(lambda: bool(processes.marked(marks)))
        for name in ("gone", "runs"):
            shutil.rmtree(tmp_path / name)
        (directory := tmp_path / "new" / "hosts" / "A").mkdir(parents=True)
        new, _ = state_folder.create(directory, "j")
        process.communicate(b"\n")
    assert {*memory.iterdir()} == {folders["runs"], folders["kept"], folders["elsewhere"], unknown, new}


def spec_of(directory: Path, **given: Any) -> HostSpec:
    """A host with one server."""
    task = Task("server", (sys.executable, "-c", ""), {"DMLC_ROLE": "server"})
    return HostSpec("j", "here", str(directory), "", "", "", (), (task,), **given)


def checkpoint(directory: Path, life: int) -> str:
    """A checkpoint of such a host, taken in this life."""
    (saved := directory / "from" / "7" / "server").mkdir(parents=True)
    (saved / "slices").write_text("saved")
    Part.describe(saved.parent, {"server": life}).write(saved.parent)
    return str(saved.parent)


def beginning(directory: Path, children: Sequence[Child], warn: Any, **given: Any) -> Beginning:
    """What prepares the first lives of such a host."""
    groups, policy = WorkerGroups(children), RestartPolicy(3)
    return Beginning(directory, spec_of(directory, **given), children, groups, policy, warn, None)


def test_no_agent_follows_one_that_was_killed_while_it_restored_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would go on from half a copy."""
    seen: list[Path | None] = []
    restore = Checkpoint.restore
    monkeypatch.setattr(
        Checkpoint, "restore",
        lambda *given: (seen.append(state_folder.continues(tmp_path)), restore(*given)),
    )  # fmt: skip
    child = Child(spec_of(tmp_path).tasks[0], spec_of(tmp_path), JobClock())
    try:
        beginning(tmp_path, [child], print, resume=checkpoint(tmp_path, 2)).prepare()
        assert seen == [None] and state_folder.continues(tmp_path) is not None
        assert child.state_dir is not None and (child.state_dir / "slices").read_text() == "saved"
        state = AgentState.read(tmp_path)
        assert state is not None and state.incarnations == {"server": 3}, "recorded before another agent may follow"
    finally:
        state_folder.remove(tmp_path)


def test_a_resumed_job_that_begins_again_does_so_from_its_checkpoint_and_uses_no_life_twice(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    child, warnings = Child(spec_of(tmp_path).tasks[0], spec_of(tmp_path), JobClock()), list[str]()
    begins = beginning(tmp_path, [child], warnings.append, resume=checkpoint(tmp_path, 0))
    try:
        begins.prepare()
        assert child.incarnation == 1 and not warnings
        for count in (1, 2):
            begins.together = count
            child.begin_again("a worker has died", count)
            begins.prepare()
            assert child.incarnation == 1 + count, "whoever has seen events of the last life drops no new ones"
        assert len(warnings) == 2 and "from checkpoint 7" in warnings[0]
    finally:
        state_folder.remove(tmp_path)
        child.close()


def dead(
    directory: Path, status: int = -signal.SIGKILL, role: str = "server", runs: str = "geomx_cli.runtime"
) -> Child:
    """A process that has ended."""
    task = Task("one", (sys.executable, "-P", "-m", runs), {"DMLC_ROLE": role})
    spec = HostSpec("j", "here", str(directory), "", "", "", (), (task,))
    child = Child(task, spec, JobClock())
    child.life.status = status
    child.state_dir = directory
    StateNotes(directory).prepare()
    return child


def test_restarts_count_for_ten_minutes(tmp_path: Path) -> None:
    times = deque([0.0, 100.0, 200.0, 601.0, 602.0])
    policy, child = RestartPolicy(2, times.popleft), dead(tmp_path)
    assert [policy.decide(child, Stage.RUNNING, memory=False) for _ in range(5)] == [1, 2, 0, 2, 0]


def test_one_that_lacks_memory_twice_is_not_restarted_again(tmp_path: Path) -> None:
    policy, child, other = RestartPolicy(9), dead(tmp_path), dead(tmp_path)
    assert [policy.decide(child, Stage.RUNNING, memory=memory) for memory in (True, False, True)] == [1, 2, 0]
    assert policy.decide(other, Stage.RUNNING, memory=True) == 1


@pytest.mark.parametrize("role", ["scheduler", "server", "global_server", "global_scheduler"])
def test_every_role_that_serves_is_restarted(role: str, tmp_path: Path) -> None:
    assert RestartPolicy(1).decide(dead(tmp_path, role=role), Stage.RUNNING, memory=False) == 1


@pytest.mark.parametrize("status", [0, 1, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP])
def test_one_that_says_why_or_was_asked_is_not_restarted(status: int, tmp_path: Path) -> None:
    assert RestartPolicy(1).decide(dead(tmp_path, status), Stage.RUNNING, memory=False) == 0


def test_nothing_is_restarted_while_the_job_ends(tmp_path: Path) -> None:
    child = dead(tmp_path)
    policy = RestartPolicy(1)
    assert not any(policy.decide(child, stage, memory=False) for stage in Stage if stage is not Stage.RUNNING)
    child.asked = True
    assert policy.decide(child, Stage.RUNNING, memory=False) == 0


def test_workers_are_restarted_if_their_state_is_kept(tmp_path: Path) -> None:
    bundled, script = dead(tmp_path, role="worker"), dead(tmp_path, role="worker", runs="train.py")
    bundled.life.events.left = True  # and others may still wait for its goodbye
    assert not RestartPolicy(1).excuses(bundled)
    for child in (bundled, script):
        assert RestartPolicy(1).decide(child, Stage.RUNNING, memory=False) == 1
    (tmp_path / "ended").touch()  # there is no room, or a script has contributed and saves nothing
    for child in (bundled, script):
        assert RestartPolicy(1).decide(child, Stage.RUNNING, memory=False) == 0


def test_only_a_script_that_has_contributed_leaves_the_job(tmp_path: Path) -> None:
    bundled, script = dead(tmp_path, role="worker"), dead(tmp_path, role="worker", runs="train.py")
    policy = RestartPolicy(1, on_worker_loss="leave")
    assert not policy.lets_go(script, Stage.RUNNING), "it may not have set the job up"
    (tmp_path / "contributed").touch()
    assert not policy.lets_go(script, Stage.RUNNING), "it was killed before it had noted the round"
    (tmp_path / "contributed").write_text("   812")
    assert script.contributed == 812
    assert policy.lets_go(script, Stage.RUNNING) and not policy.lets_go(script, Stage.FAILING)
    assert not policy.lets_go(bundled, Stage.RUNNING)
    assert not RestartPolicy(1).lets_go(script, Stage.RUNNING)
    script.life.events.failure = {"message": "the others know, and end"}
    assert not policy.lets_go(script, Stage.RUNNING)


def test_one_that_serves_has_done_all_with_its_last_event(tmp_path: Path) -> None:
    """Not before: it may still have to answer others, and a server to save its optimizer."""
    child = dead(tmp_path)
    events, policy = child.life.events, RestartPolicy(9)
    events.path.parent.mkdir()
    for said, excused in (("telemetry", False), ("state", False), ("finished", True)):
        state = {"telemetry": "finished", "state": "saving"}.get(said, "")
        with events.path.open("a") as file:
            file.write(json.dumps({"event": said, "state": state}) + "\n")
        events.read()
        assert (policy.excuses(child), events.left) == (excused, True)
        assert bool(policy.decide(child, Stage.RUNNING, memory=False))


def test_one_that_cannot_be_started_again_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the signal; what it or the system said in its new log is read to the end."""

    def start(self: Incarnation, *_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(Incarnation, "start", start)
    child, said = dead(tmp_path), list[Any]()
    selector = selectors.DefaultSelector()
    agent: Any = SimpleNamespace(
        _selector=selector, _status=Mock(), _report=Mock(), _policy=RestartPolicy(3), _record=Mock(),
        _control=SimpleNamespace(send_durable=said.append), _clock=JobClock(),
        _beginning=SimpleNamespace(inherited={}, update=Mock()),
        _host_spec=SimpleNamespace(working_dir="", host="here"),
        _fail=lambda _, failure: said.append(failure.cause),
    )  # fmt: skip
    agent._begin = partial(Supervisor._begin, agent)
    Supervisor._restart(agent, child, "was killed by SIGKILL", 1)
    ended = {"type": "ended", "process": "one", "status": -signal.SIGKILL, "asked": False}
    assert said == ["could not be started: Cannot allocate memory", ended]
    assert child.life.status == -signal.SIGKILL
    for key, _ in selector.select(0):
        Supervisor._drain(agent, key.data)
    assert child.log.descriptor == -1 and not selector.get_map()
    selector.close()
    child.close()
