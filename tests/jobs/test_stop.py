"""`geomx stop`: in any state of a job, whatever was killed before, it leaves nothing behind and affects nothing else.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from desk import Desk
from sshd import Person, Sshd

from geomx_cli.agent import processes
from geomx_cli.agent.processes import ProcessId
from geomx_cli.jobs.actions import stop
from geomx_cli.jobs.store.job_state import JobState

TRIALS = 10
AT_ONCE = 6
FATES = {"stopped", "killed", "had ended", "was not running"}
VICTIMS = ("launch", "agent central", "agent A", "central/worker:0", "A/worker:1")
FAMILIES = {"*": "family"}


def fates(report: dict[str, Any]) -> dict[str, str]:
    """The outcome for each process and agent."""
    found = {f"agent {host['host']}": host["agent"] for host in report["hosts"]}
    for host in report["hosts"]:
        found |= host["processes"]
    return found


def trial(folder: Path, seed: int) -> str:
    """Start a job, kill one part of it at a random moment, stop the job; returns the resulting problem, or ""."""
    chance = random.Random(seed)
    desk = Desk(folder)
    launch = desk.launch(story=FAMILIES)
    victim, moment = VICTIMS[seed % len(VICTIMS)], chance.uniform(0, 1.5)
    try:
        launch.wait_for(lambda: launch.started(victim))
        with pytest.raises(subprocess.TimeoutExpired):
            launch.process.wait(moment)
        os.kill(launch.pid(victim), signal.SIGKILL)
        done = desk.geomx("stop", "--json")
        # launch was killed before it had started anything
        if not (launch.directory / "plan.json").exists() and victim == "launch":
            assert (done.returncode, json.loads(done.stdout)["error"]["exit_code"]) == (3, 3), done.stderr
            launch.wait_for(lambda: not launch.pids())  # what checked the hosts ends by itself once it reads its input
        else:
            assert done.returncode == 0, done.stderr
            report = json.loads(done.stdout)
            assert report["complete"] and set(fates(report).values()) <= FATES
        launch.finish()
        launch.assert_clean()
    except AssertionError as error:
        return f"trial {seed}, {victim} killed after {moment:.2f} s: {error}\n{launch.end()}"
    finally:
        desk.close()
    return ""


def test_random_kills_then_stop(tmp_path: Path, desk: Desk) -> None:
    neighbour = desk.launch(story=FAMILIES).wait_until_running()
    unrelated = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", "geomx_cli.agent"])
    before = neighbour.pids()
    assert len(before) >= 8 + 8 + 2 + 1
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            problems = list(pool.map(lambda seed: trial(tmp_path / str(seed), seed), range(TRIALS)))
        assert not any(problems), "\n".join(filter(None, problems))
        assert neighbour.pids() == before
        assert unrelated.poll() is None
    finally:
        unrelated.kill()
        unrelated.wait()


def test_launch_that_follows_sees_that_the_job_was_stopped(desk: Desk) -> None:
    desk.forks = False
    launch = desk.launch("--json", story=FAMILIES).wait_until_running()
    done = desk.geomx("stop", launch.id[:-3])
    assert (done.returncode, done.stderr) == (0, "")
    assert "A/worker:1     stopped" in done.stdout and "had ended" not in done.stdout
    assert launch.finish() == 130
    assert f"error: job {launch.id} was stopped by geomx stop\n" in launch.errors
    assert json.loads(launch.output)["status"] == "interrupted"
    launch.assert_clean()
    again = desk.json("stop")
    assert (again["ended"], again["hosts"], again["complete"]) == ("interrupted", [], True)
    again = desk.geomx("stop", launch.id)
    assert again.returncode == 0
    assert again.stdout == f"job {launch.id} has ended already (interrupted); nothing of it runs\n"
    assert desk.json("jobs")["jobs"][0]["state"] == "interrupted"


def test_launch_that_has_only_begun_is_stopped_as_well(desk: Desk) -> None:
    launch = desk.launch(story=FAMILIES)
    launch.wait_for(lambda: launch.found or launch.directory.exists())
    who = processes.identify(launch.process.pid)
    done = desk.geomx("stop")
    assert done.returncode == 0, done.stderr
    assert who and not processes.exists(who)
    launch.finish()
    launch.assert_clean()


@pytest.fixture
def silent_site(desk: Desk) -> Iterator[Path]:
    """An inventory with a machine that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        path = desk.folder / "silent.toml"
        path.write_text(
            'central = "hub"\n[[host]]\nname = "h1"\nparty = "hub"\nssh = "127.0.0.1"\n'
            f'ssh_port = {listener.getsockname()[1]}\n[[host]]\nname = "a1"\nparty = "a"\ndevices = ["cpu"]\n'
        )
        yield path


def test_launch_that_is_still_checking_is_ended(desk: Desk, silent_site: Path) -> None:
    folder = desk.state / "geomx" / "jobs"
    launch = desk.start("launch", "--hosts", str(silent_site))
    deadline = time.monotonic() + 20
    while len(list(folder.glob("*/state.json"))) < 1:
        assert time.monotonic() < deadline and launch.poll() is None, launch.communicate()
        time.sleep(0.02)
    done = desk.geomx("stop")
    assert done.returncode == 0 and "is still being prepared; ending its launch" in done.stderr, done.stderr
    assert launch.wait(240) == 130
    assert list(folder.iterdir()) == []


def test_checking_launch_in_the_background_is_ended_by_the_first_signal(
    desk: Desk, silent_site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = desk.state / "geomx" / "jobs"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for `geomx launch &`
    try:
        launch = desk.start("launch", "--hosts", str(silent_site))
    finally:
        signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 20
    while not (claims := [state for path in folder.glob("*") if (state := JobState.read(path)) is not None]):
        assert time.monotonic() < deadline and launch.poll() is None, launch.communicate()
        time.sleep(0.02)
    monkeypatch.setattr(stop, "_LAUNCH", 600.0)  # no second signal within this test's time limit
    assert stop.end_launch("job", ProcessId(claims[0].pid, claims[0].pid_started)).error() is None
    assert launch.wait(240) == 130
    assert list(folder.iterdir()) == []


def test_used_directory_is_refused_before_the_checks(desk: Desk, silent_site: Path) -> None:
    used = desk.folder / "used"
    used.mkdir()
    (used / "plan.json").touch()
    done = desk.geomx("launch", "--hosts", str(silent_site), "--job-dir", str(used))
    assert done.returncode == 3 and "has a job already" in done.stderr, done.stderr


@pytest.mark.parametrize("how", ["Ctrl-C", "stop of a detached job behind ssh"])
def test_scripts_save_before_they_end_and_who_is_cut_off_is_told(
    desk: Desk, machines: Callable[..., Sshd], how: str
) -> None:
    story = {"*": "forever", "A/worker:0": "traps", "A/worker:1": "deaf"}
    if how == "Ctrl-C":
        launch = desk.launch("--grace", "4s", story=story).wait_until_running()
        launch.process.send_signal(signal.SIGINT)
        assert launch.finish() == 130
        assert "A/worker:1 did not end within 4 s (--grace) and had to be killed" in launch.errors
    else:
        launch = desk.launch(
            "--grace", "4s", "--detach", story=story, sites=[machines("alpha"), machines("beta")]
        )
        assert launch.finish() == 0, launch.errors
        launch.wait_until_running()
        found = fates(desk.json("stop"))
        assert found.pop("A/worker:1") == "killed" and set(found.values()) == {"stopped"}
    fetched = desk.geomx("fetch", "--to", "here")
    assert "A-worker-0/notes/a b.txt" in fetched.stdout and "A-worker-0/model.bin" in fetched.stdout
    launch.assert_clean()


def test_a_second_interrupt_kills_and_tells_whom(desk: Desk) -> None:
    launch = desk.launch("--grace", "60s", story={"*": "forever", "A/worker:1": "deaf"}).wait_until_running()
    other = processes.identify(launch.pid("A/worker:0"))
    launch.process.send_signal(signal.SIGINT)
    launch.wait_for(lambda: other and not processes.exists(other))
    launch.process.send_signal(signal.SIGINT)
    assert launch.finish() == 130
    assert "A/worker:1 ran when all was to be killed at once; its last file may be incomplete" in launch.errors
    launch.assert_clean()


def test_deaf_process_is_killed_after_the_grace(desk: Desk) -> None:
    launch = desk.launch("--detach", story={"*": "forever", "A/worker:1": "deaf"})
    assert launch.finish() == 0
    launch.wait_until_running()
    found = fates(desk.json("stop", "--grace", "300ms"))
    assert found.pop("A/worker:1") == "killed"
    assert set(found.values()) == {"stopped"}
    launch.assert_clean()
    assert desk.json("jobs")["jobs"][0]["state"] == "interrupted"


def test_a_job_whose_agent_was_killed_has_failed_whatever_is_stopped_afterwards(desk: Desk) -> None:
    launch = desk.launch("--detach", "--restarts", "0", story=FAMILIES)
    assert launch.finish() == 0
    launch.wait_until_running()
    os.kill(launch.pid("agent A"), signal.SIGKILL)
    launch.wait_for(lambda: desk.json("status")["failure"])
    before = desk.json("status")["failure"]
    assert before["host"] == "A" and "its agent was killed" in before["cause"]
    assert "geomx stop ends what is left" in before["hint"]
    assert set(fates(desk.json("stop")).values()) <= {"stopped", "had ended", "was not running"}
    launch.assert_clean()
    (job,) = desk.json("jobs")["jobs"]
    assert (job["state"], job["exit_code"]) == ("failed", 1)
    after = desk.json("status")
    assert after["state"] == "failed" and after["failure"]["host"] == "A"
    assert "its agent was killed" in after["failure"]["cause"] and "launch again" in after["failure"]["hint"]


def test_one_party(desk: Desk) -> None:
    launch = desk.launch("--restarts", "0", story=FAMILIES).wait_until_running()
    assert "central, A" in desk.geomx("stop", "--party", "C").stderr
    report = desk.json("stop", "--party", "A")
    assert set(fates(report)) == {"agent A", "A/scheduler:0", "A/server:0", "A/worker:0", "A/worker:1"}
    assert set(fates(report).values()) == {"stopped"}
    status = {process["name"]: process["state"] for process in desk.json("status")["processes"]}
    assert (status["A/worker:0"], status["central/worker:0"]) == ("stopped", "training")
    # Launch, agents and their relays, processes and their children; the relay of A's agent ends right after that.
    launch.wait_for(lambda: len(launch.pids()) == 1 + 2 + 4 + 4, limit=5)
    os.kill(launch.pid("central/worker:0"), signal.SIGKILL)  # like a process that misses the party
    assert launch.finish() == 1
    assert "central/worker:0 (worker 0 of party central, on host central) failed first" in launch.errors
    launch.assert_clean()


def test_others_that_miss_a_stopped_party_do_not_make_it_a_failure(desk: Desk) -> None:
    launch = desk.launch(story={"*": "forever", "central/worker:0": "misses A/server:0"}).wait_until_running()
    desk.json("stop", "--party", "A")
    (launch.directory / "go").touch()
    assert launch.finish() == 130
    assert "was stopped by geomx stop --party A" in launch.errors
    launch.assert_clean()


@pytest.mark.parametrize("damage", ["agent.json", "agent-state.json", "directory", "hung agent", "socket"])
def test_damaged_part_of_a_job(desk: Desk, damage: str) -> None:
    launch = desk.launch("--detach", story=FAMILIES)
    assert launch.finish() == 0
    launch.wait_until_running()
    folder = launch.directory / "hosts" / "A"
    match damage:
        case "directory":
            shutil.rmtree(folder)
        case "hung agent":
            os.kill(launch.pid("agent A"), signal.SIGSTOP)
        case "socket":
            Path(json.loads((folder / "agent.json").read_bytes())["socket"]).unlink()
        case name:
            (folder / name).write_bytes((folder / name).read_bytes()[:-20])
    report = desk.json("stop", "--grace", "1s")
    assert not launch.pids()
    assert set(fates(report).values()) <= FATES
    host = report["hosts"][1]
    assert host["note"] or damage in ("agent-state.json", "hung agent", "socket")  # an agent writes its state again
    again = desk.json("stop")
    assert set(fates(again).values()) <= {"had ended", "was not running"}


def test_hosts_behind_ssh_of_which_one_cannot_be_reached(
    desk: Desk, machines: Callable[..., Sshd], person: Person
) -> None:
    sites = [machines("alpha"), machines("beta")]
    launch = desk.launch("--detach", story=FAMILIES, sites=sites)
    assert launch.finish() == 0, launch.errors
    launch.wait_until_running()
    sites[1].stop()
    done = desk.geomx("stop", "--json")
    assert done.returncode == 7 and "host A: " in done.stderr
    report = json.loads(done.stdout)
    assert set(report["hosts"][0]["processes"].values()) == {"stopped"}
    assert report["hosts"][1]["problem"] and not report["complete"]
    assert desk.json("jobs")["jobs"][0]["state"] == "detached"
    sites[1].start()
    report = desk.json("stop")
    assert set(report["hosts"][0]["processes"].values()) == {"had ended"}
    assert set(report["hosts"][1]["processes"].values()) == {"stopped"}
    launch.assert_clean()
    assert desk.json("jobs")["jobs"][0]["state"] == "interrupted"
