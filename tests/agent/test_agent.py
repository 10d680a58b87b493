"""The agent and the local host: environment of processes, reports, and complete clean-up."""

import hashlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from lone_agent import MARK, Agent

from geomx_cli import hosts
from geomx_cli.agent import processes, relay
from geomx_cli.agent.agent_state import AgentState
from geomx_cli.agent.host_spec import FileDigest, HostSpec
from geomx_cli.agent.processes import ProcessId
from geomx_cli.agent.stop import clean_up
from geomx_cli.core.errors import TimedOut
from geomx_cli.hosts import everywhere
from geomx_cli.hosts.local import LocalConnector

pytestmark = pytest.mark.processes

SLEEP = "import signal; signal.pause()"
# Like a daemon: a grandchild in its own session whose parent ends at once.
DAEMON = (
    "import subprocess, sys;"
    "subprocess.run([sys.executable, '-c', 'import subprocess;"
    ' subprocess.Popen(["sleep", "1000"], start_new_session=True)\'])'
)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_process_gets_its_own_session_environment_and_log(agents: Any) -> None:
    program = (
        "import os, json, sys; print(json.dumps([os.getsid(0) == os.getpid(), sys.stdin.read(), os.getcwd(),"
        " dict(os.environ)])); print('to stderr', file=sys.stderr)"
    )
    agent = agents(one=program)
    agent.send(type="start")
    said = agent.until("done")
    assert [message["type"] for message in said] == ["hello", "started", "ended", "done"]
    first, second = (agent.directory / "logs" / "one.log").read_text().splitlines()
    leads, standard_input, directory, environment = json.loads(first)
    assert (leads, standard_input, directory, second) == (True, "", str(agent.directory), "to stderr")
    assert environment["GEOMX_PROCESS"] == "one" and environment["KEPT"] == "1"
    assert "DMLC_ROLE" not in environment and "PORT" not in environment
    agent.assert_clean()
    assert agent.process.returncode == 0


def test_failure_carries_cause_and_end_of_log(agents: Any) -> None:
    agent = agents(one="for i in range(40): print(i)\nprint('x' * 5000)\nraise KeyError('batch')", two=SLEEP)
    agent.send(type="start")
    said = agent.until("done")
    failure = next(message["failure"] for message in said if message["type"] == "failure")
    assert (failure["process"], failure["peer"]) == ("one", "")
    assert (failure["how"], failure["message"]) == ("exited with status 1", "KeyError: 'batch'")
    assert len(failure["tail"]) == 15 and failure["tail"][-1] == "KeyError: 'batch'"
    assert max(map(len, failure["tail"])) < 500, "of long lines the beginning"
    assert {(m["process"], m["status"]) for m in said if m["type"] == "ended"} == {("one", 1), ("two", -15)}
    assert "one exited" in said[-1]["why"]
    agent.assert_clean()


def test_one_that_failed_and_does_not_end_still_says_why(agents: Any) -> None:
    said = "{'time': time.time(), 'event': 'failed', 'message': 'no such label', 'hint': 'look', 'peer': PEER}"
    write = f"import json, os, time; os.makedirs('events', exist_ok=True); MARK = {said}; PATH = 'events/NAME.jsonl'\n"
    write += "open(PATH, 'a').write(json.dumps(MARK) + chr(10))\n"
    slow = write.replace("PEER", "''").replace("NAME", "slow") + "time.sleep(100)"
    blames = write.replace("PEER", "'slow'").replace("NAME", "blames") + "time.sleep(1); exit(1)"
    agent = agents(slow=slow, blames=blames)
    agent.send(type="start")
    failures = {m["failure"]["process"]: m["failure"] for m in agent.until("done") if m["type"] == "failure"}
    assert failures["blames"]["peer"] == "slow" and failures["slow"]["peer"] == ""
    slow = failures["slow"]
    assert (slow["how"], slow["message"], slow["hint"]) == ("failed", "no such label", "look")


def test_program_that_is_not_there_is_reported(agents: Any) -> None:
    agent = agents(one="/no/such/python", two=SLEEP)
    agent.send(type="start")
    said = agent.until("done")
    failure = next(message["failure"] for message in said if message["type"] == "failure")
    assert failure["how"] == "could not be started: No such file or directory: /no/such/python"
    agent.assert_clean()


def test_events_are_forwarded_of_rounds_the_first_and_the_newest(agents: Any) -> None:
    program = (
        "import json, os, time; os.mkdir('events'); file = open('events/one.jsonl', 'w')\n"
        "then = time.time() - 5\n"
        "for n in range(50): print(json.dumps({'time': then, 'event': 'round', 'n': n}), file=file)\n"
        "print(json.dumps({'time': time.time(), 'event': 'evaluation', 'accuracy': 0.5}), file=file)"
    )
    agent = agents(one=program)
    agent.send(type="start")
    events = [message for message in agent.until("done") if message["type"] == "event"]
    rounds = [message["event"]["n"] for message in events if message["event"]["event"] == "round"]
    assert (rounds[0], rounds[-1]) == (0, 49) and len(rounds) < 50
    assert 5 <= events[0]["age"] < 30
    assert [m["event"]["accuracy"] for m in events if m["event"]["event"] == "evaluation"] == [0.5]


def test_events_that_are_very_long_are_cut_short(agents: Any) -> None:
    program = (
        "import json, os, time; os.mkdir('events'); file = open('events/one.jsonl', 'w')\n"
        "event = {'time': time.time(), 'event': 'warning', 'message': 'x' * 3_000_000, 'other': ['y' * 9] * 300_000}\n"
        "print(json.dumps(event), file=file)"
    )
    agent = agents(one=program)
    agent.send(type="start")
    (event,) = [message["event"] for message in agent.until("done") if message["type"] == "event"]
    assert event["message"].startswith("xxx") and "(3000000 characters; the event log has them)" in event["message"]
    assert len(json.dumps(event)) < 20_000


def test_a_log_that_is_flooded_keeps_its_end(agents: Any, tmp_path: Path) -> None:
    program = (
        "import os, time; line = b'%010d' + b'.' * 1013 + b'\\n'; number = 0\n"
        "while number < 100 * 1024:\n"
        "    os.write(1, b''.join(line % n for n in range(number, number + 1024))); number += 1024\n"
        "time.sleep(1); print('the end', flush=True)"
    )
    agent = agents(lease=60, one=program)
    agent.send(type="start")
    agent.until("done")
    log, older = tmp_path / "logs/one.log", tmp_path / "logs/one.log.1"
    assert log.stat().st_size + older.stat().st_size <= 64 << 20, "of 100 MiB"
    assert log.read_text().endswith("the end\n")
    kept = older.read_bytes()
    assert len(kept) == 32 << 20 and kept.endswith(b"\n")
    listing, _, _ = agent.command("files", "records").communicate(timeout=240)[0].partition(b"\n")
    sizes = {file["name"]: file["size"] for file in json.loads(listing)["files"]}
    assert sizes["logs/one.log.1"] == 32 << 20 and sizes["logs/one.log"] == log.stat().st_size


def test_survivors_handle_a_failure_before_any_signal_and_who_is_cut_off_is_told(agents: Any, tmp_path: Path) -> None:
    handles = (
        "import json, os, time; os.makedirs('events', exist_ok=True); name = os.environ['GEOMX_PROCESS']\n"
        "event = {'time': time.time(), 'event': 'state', 'state': 'failing'}\n"
        "print(json.dumps(event), file=open(f'events/{name}.jsonl', 'w'), flush=True)\n"
        "time.sleep(SECONDS); open(name, 'w').close()"
    )
    agent = agents(
        lease=60, grace=6, one="import time; time.sleep(0.5); raise ValueError('no data')", waits=SLEEP,
        saves=handles.replace("SECONDS", "3.5"), hangs=handles.replace("SECONDS", "1000"),
    )  # fmt: skip
    agent.send(type="start")
    said = agent.until("done")
    ended = [message for message in said if message["type"] == "ended"]
    ends = {message["process"]: message["status"] for message in ended}
    assert ends == {"one": 1, "waits": -signal.SIGKILL, "saves": 0, "hangs": -signal.SIGKILL}
    assert (tmp_path / "saves").exists() and not (tmp_path / "hangs").exists()
    (warning,) = [message["message"] for message in said if message["type"] == "warning"]
    assert warning.startswith("waits, hangs did not end within 6 s (--grace) and had to be killed")
    agent.assert_clean()


def test_sigterm_waits_while_a_worker_of_another_host_handles_the_failure(agents: Any, tmp_path: Path) -> None:
    """As this one may meet it only by torch.distributed, when that worker ends."""
    agent = agents(lease=60, grace=60, worker=SLEEP)
    agent.send(type="start")
    agent.until("started")
    agent.send(type="stop", delay=2.0)
    for _ in range(12):
        agent.send(type="failing")
        time.sleep(0.25)
    assert agent.runs() and processes.marked(MARK)
    (ended,) = [message for message in agent.until("done") if message["type"] == "ended"]
    assert ended["status"] == -signal.SIGTERM
    agent.assert_clean()


SAVES = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), open('saved', 'w').close(), sys.exit()))\n"
    "print('ready', flush=True); signal.pause()"
)


def test_what_a_script_runs_may_save_though_the_script_ends_at_once(agents: Any, tmp_path: Path) -> None:
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SAVES!r}])"
    agent = agents(lease=60, grace=20, worker=program)
    agent.send(type="start")
    while "ready" not in _text(tmp_path / "logs/worker.log"):
        time.sleep(0.05)
    agent.send(type="stop")
    assert [message["status"] for message in agent.until("ended") if message["type"] == "ended"] == [-signal.SIGTERM]
    agent.until("done")
    assert (tmp_path / "saved").exists()
    agent.assert_clean()


def test_servers_get_sigterm_after_all_workers(agents: Any, tmp_path: Path) -> None:
    agent = agents(lease=60, worker=SAVES, server=SLEEP)
    agent.send(type="start")
    while "ready" not in _text(tmp_path / "logs/worker.log"):
        time.sleep(0.05)
    agent.send(type="stop", hold=True)
    assert [message["status"] for message in agent.until("ended") if message["type"] == "ended"] == [0]
    assert (tmp_path / "saved").exists()
    agent.send(type="heartbeat")
    agent.until("alive")
    assert agent.runs(), "workers of other hosts may need the server"
    agent.send(type="release")
    said = agent.until("done")
    assert [message["status"] for message in said if message["type"] == "ended"] == [-signal.SIGTERM]


AWAITS = (
    "import json, os, time; os.makedirs('events', exist_ok=True); name = os.environ['GEOMX_PROCESS']\n"
    "log = open(f'events/{name}.jsonl', 'w')\n"
    "print(json.dumps({'time': time.time(), 'event': 'stop_awaited'}), file=log, flush=True)\n"
    "while not os.path.exists(os.environ['GEOMX_STOP_FILE']): time.sleep(0.05)\n"
)


def test_who_awaits_a_stop_has_the_grace_to_end_by_itself(agents: Any, tmp_path: Path) -> None:
    saves, never = AWAITS + "time.sleep(1); open('saved', 'w').close()", AWAITS + "time.sleep(1000)"
    others = "while not all(os.path.exists(f'events/{n}.jsonl') for n in ('saves', 'never')): time.sleep(0.05)\n"
    tells = AWAITS.replace("stop_awaited'", "signalled', 'signal': 'SIGUSR1'").replace("log =", f"{others}log =")
    agent = agents(lease=60, grace=3, saves=saves, never=never, other=SLEEP, tells=tells)
    agent.send(type="start")
    said = agent.until("done")
    (stopping,) = [message for message in said if message["type"] == "stopping"]
    assert (stopping["who"], stopping["grace"]) == ("SIGUSR1 to tells", 3)
    ends = {message["process"]: message["status"] for message in said if message["type"] == "ended"}
    assert ends == {"saves": 0, "tells": 0, "never": -signal.SIGTERM, "other": -signal.SIGTERM}
    assert (tmp_path / "saved").exists()
    agent.assert_clean()


def test_a_failure_ends_who_awaits_a_stop_as_any_other(agents: Any, tmp_path: Path) -> None:
    agent = agents(lease=60, grace=60, never=AWAITS, one="import time; time.sleep(1.5); raise ValueError('no data')")
    agent.send(type="start")
    ends = {message["process"]: message["status"] for message in agent.until("done") if message["type"] == "ended"}
    assert ends == {"never": -signal.SIGTERM, "one": 1}
    agent.assert_clean()


def test_end_is_told_where_nothing_can_be_written_any_more(agents: Any, tmp_path: Path) -> None:
    (tmp_path / "agent-end.jsonl").mkdir()
    agent = agents(one="pass")
    agent.send(type="start")
    assert agent.until("done")[-1]["left"] == []
    agent.assert_clean()


def test_status_that_cannot_be_written_is_told_once(agents: Any, tmp_path: Path) -> None:
    (tmp_path / "status.json").mkdir()
    agent = agents(one="pass")
    agent.send(type="start")
    warnings = [message for message in agent.until("done") if message["type"] == "warning"]
    assert len(warnings) == 1
    assert "status.json cannot be written" in warnings[0]["message"]
    assert "progress and geomx status may be outdated" in warnings[0]["message"]


def test_what_a_finished_process_leaves_behind_is_ended(agents: Any) -> None:
    agent = agents(one=DAEMON)
    agent.send(type="start")
    assert agent.until("done")[-1]["left"] == []
    agent.assert_clean()


@pytest.mark.parametrize("goodbye", [b"", b"this is no JSON\n", b"[1]\n"])
def test_control_machine_that_leaves_or_talks_nonsense_ends_the_job(
    agents: Any, goodbye: bytes, tmp_path: Path
) -> None:
    agent = agents(lease=0.5, one=SLEEP, two=DAEMON + ";" + SLEEP)
    agent.send(type="start")
    agent.until("started")
    if goodbye:
        agent.process.stdin.write(goodbye)
    else:
        agent.process.stdin.close()
    agent.assert_clean()
    told = (tmp_path / "agent.log").read_text()  # a busy machine takes longer than the lease to send what it is to send
    assert re.search(r"control machine (disconnected and did not reconnect|has been silent) for 0\.5 s", told)


def test_agent_that_fails_ends_its_processes_and_says_why(agents: Any, tmp_path: Path) -> None:
    agent = agents(one=SLEEP)
    agent.until("hello")
    (tmp_path / "agent-state.json").unlink()
    (tmp_path / "agent-state.json" / "in the way").mkdir(parents=True)
    agent.send(type="start")
    done = agent.until("done")[-1]
    assert "its agent failed: " in done["why"] and "agent-state.json" in done["why"] and done["left"] == []
    agent.process.wait(240)
    assert processes.marked(MARK) == []


HURRIED = (
    "import sys; from geomx_cli.agent import __main__, lifecycle; lifecycle._CONNECT = 1.5;"
    "sys.exit(__main__.main(sys.argv[1:]))"
)


def test_control_machine_that_is_there_may_take_its_time_to_say_start(agents: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Agent, "program", ("-c", HURRIED))
    agent = agents(one=SLEEP)
    agent.until("hello")
    for _ in range(9):
        agent.send(type="heartbeat", seen=0)
        agent.until("alive")
        time.sleep(0.25)
    agent.send(type="start")
    agent.until("started")


# Writes an event whenever its input, a file, has grown.
TELLS = (
    "import json, os, time; os.mkdir('events'); file = open('events/one.jsonl', 'a', buffering=1)\n"
    "for n in range(3):\n"
    "    while not os.path.exists(f'go-{n}'): time.sleep(0.01)\n"
    "    print(json.dumps({'time': time.time(), 'event': 'warning', 'message': str(n)}), file=file)"
)


def test_control_machine_that_comes_again_misses_nothing(agents: Any, tmp_path: Path) -> None:
    agent = agents(one=TELLS)
    agent.send(type="start")
    agent.until("started")
    (tmp_path / "go-0").touch()
    first = agent.until("event")[-1]
    agent.process.kill()
    (tmp_path / "go-1").touch()
    agent.attach(seen=first["n"])
    said = agent.until("event")
    assert [message["type"] for message in said] == ["hello", "event"]
    assert (said[-1]["n"], said[-1]["event"]["message"]) == (first["n"] + 1, "1")
    agent.attach()  # with nothing seen, it receives everything unacknowledged
    numbers = [message["n"] for message in agent.until("event") if "n" in message]
    assert numbers == [first["n"] + 1]
    (tmp_path / "go-2").touch()
    agent.process.kill()
    pid = agent.pid
    while processes.identify(pid) is not None:
        time.sleep(0.02)
    agent.attach()  # the agent has ended and left what was not acknowledged
    said = agent.until("done")
    assert [message["type"] for message in said] == ["event", "event", "ended", "done"]
    assert [message["n"] for message in said] == [first["n"] + 1 + number for number in range(4)]
    agent.assert_clean()


def test_newest_control_machine_wins(agents: Any) -> None:
    agent = agents(one=SLEEP)
    agent.until("hello")
    older, agent.process = agent.process, agent.command("attach")
    agent.send(type="hello")
    agent.until("hello")
    assert json.loads(older.communicate(timeout=240)[0])["type"] == "replaced"
    agent.send(type="stop")
    agent.until("done")
    agent.assert_clean()


@pytest.mark.parametrize("how", ["ends without an answer", "has removed its socket"])
def test_attaching_to_an_agent_that_is_about_to_end_gets_its_report(agents: Any, tmp_path: Path, how: str) -> None:
    """A socket that nobody serves any more, or none, comes before the report of the end."""
    agent = agents(one=SLEEP)
    agent.until("hello")
    pid = agent.pid
    path, report = agent.sockets / "agent.sock", agent.directory / "agent-end.jsonl"
    os.kill(pid, signal.SIGSTOP)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        if how == "ends without an answer":
            listener.bind(str(path))
            listener.listen(1)
        agent.attach()
        if how == "ends without an answer":
            listener.accept()[0].close()
            path.unlink()
        part = tmp_path / "part"
        part.write_text('{"type": "done", "n": 1}\n')
        part.rename(report)
        assert [message["type"] for message in agent.until("done")] == ["done"]
    assert agent.process.wait(240) == 0
    os.kill(pid, signal.SIGKILL)


def test_half_a_report_of_the_end_is_none(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Who reads it would wait for the rest, and attach again and again."""
    report, whole = tmp_path / "agent-end.jsonl", b'{"type": "ended", "n": 1}\n{"type": "done", "n": 2}\n'
    for half in (b"", whole[:26], whole[:40], whole[:-1]):
        report.write_bytes(half)
        assert not relay._report_end(tmp_path) and capfdbinary.readouterr().out == b""
    report.write_bytes(whole)
    assert relay._report_end(tmp_path) and capfdbinary.readouterr().out == whole


def test_an_agent_outlives_a_full_disk_that_has_its_log(agents: Any, tmp_path: Path) -> None:
    (tmp_path / "agent.log").symlink_to("/dev/full")
    agent = agents(one=SLEEP)
    agent.send(type="start")
    agent.until("started")
    agent.send(type="stop")
    said = agent.until("done")
    assert said[-1]["why"] == "was asked to stop" and "ended" in {message["type"] for message in said}
    agent.assert_clean()


def test_last_messages_arrive_though_the_agent_is_gone_when_the_control_machine_speaks(agents: Any) -> None:
    """The relay finds both at once: a heartbeat that it can no longer send, and unread messages with the end."""
    agent = agents(one=SLEEP)
    agent.until("hello")
    pid = agent.pid
    os.kill(pid, signal.SIGSTOP)
    (agent.sockets / "agent.sock").unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(agent.sockets / "agent.sock"))
        listener.listen(1)
        agent.attach()
        with listener.accept()[0] as stream:
            stream.sendall(b'{"type": "hello"}\n')
            agent.until("hello")
            relay = processes.identify(agent.process.pid)
            assert relay is not None
            agent.process.send_signal(signal.SIGSTOP)
            while processes.state(relay) != "T":
                time.sleep(0.01)
            stream.sendall(b'{"type": "done", "n": 1}\n')
        agent.send(type="heartbeat")
        agent.process.send_signal(signal.SIGCONT)
        agent.until("done")
    assert agent.process.wait(240) == 0
    os.kill(pid, signal.SIGKILL)


def test_attaching_to_no_agent_says_so(agents: Any) -> None:
    agent = agents(one=SLEEP)
    agent.until("hello")
    os.kill(agent.pid, signal.SIGKILL)
    agent.process.wait(240)
    agent.attach()
    agent.until("absent")
    assert agent.process.wait(240) == 1
    assert b"no agent runs for" in agent.process.stderr.read()


def test_file_that_is_not_what_was_put_is_refused(agents: Any, tmp_path: Path) -> None:
    key = tmp_path / "keys" / "one.key"
    digest = hashlib.sha256(b"secret").hexdigest()
    cases = ((0o600, "other", "differs from what was copied"), (0o644, "", "has mode 600, not 644"))
    for mode, content, words in cases:
        agent = Agent.__new__(Agent)
        agent.directory, agent.sockets, agent.lease = tmp_path, tmp_path / "s", 6
        expected = FileDigest(mode, hashlib.sha256(content.encode()).hexdigest() if content else digest)
        agent.begin([agent.task("one", SLEEP)], {str(key): expected})
        assert agent.process.wait(240) == 1
        assert words in agent.process.stderr.read().decode()
        agent.close()


@pytest.mark.parametrize("content", [b"{}", b"[]", b'{"tasks": 3}', b'{"half', b"[" * 100_000])
def test_assignment_that_no_launch_has_written_is_refused_in_words(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "agent.json").write_bytes(content)
    host = LocalConnector()
    done = host.run([host.python, "-m", "geomx_cli.agent", "run", str(tmp_path)], limit=60)
    assert done.status == 1
    assert done.errors.decode().startswith(f"error: {tmp_path}/agent.json is damaged")


def test_socket_is_private(agents: Any) -> None:
    agent = agents(one=SLEEP)
    agent.until("hello")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (agent.sockets, agent.sockets / "agent.sock")]
    assert modes == [0o700, 0o600]


def test_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o755)
    sockets = str(tmp_path / "s")
    host_spec = HostSpec("job", "here", str(tmp_path), sockets, f"{sockets}/a", "", (), ())
    (tmp_path / "agent.json").write_bytes(host_spec.encode())
    host = LocalConnector()
    done = host.run([host.python, "-m", "geomx_cli.agent", "run", str(tmp_path)], limit=60)
    assert done.status == 1
    assert b"only you can enter" in done.errors


def test_reaping_after_the_agent_was_killed(agents: Any) -> None:
    agent = agents(one=DAEMON + ";" + SLEEP, two=SLEEP)
    agent.send(type="start")
    agent.until("started")
    end = time.monotonic() + 10
    while not any("sleep" in _command(who) for who in processes.marked(MARK)):
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(agent.pid, signal.SIGKILL)
    agent.process.wait(240)
    assert clean_up(agent.directory) == []
    agent.assert_clean()


def test_reaping_an_agent_that_has_written_nothing(agents: Any) -> None:
    agent = agents(one=SLEEP)
    agent.until("hello")
    os.kill(agent.pid, signal.SIGSTOP)
    (agent.directory / "agent-state.json").unlink()
    assert clean_up(agent.directory) == []
    agent.assert_clean()


def test_reaping_spares_a_process_that_has_the_pid_of_one_of_ours(agents: Any) -> None:
    agent = agents(one=SLEEP)
    agent.until("hello")
    bystander = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    known = AgentState.read(agent.directory)
    assert known is not None
    who = processes.identify(bystander.pid)
    assert who is not None and processes.state(who) in "SRD"
    stale = ProcessId(who.pid, who.started - 1)
    AgentState(known.agent, {"one": stale}, known.boot).write(agent.directory)
    try:
        assert clean_up(agent.directory) == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    agent.assert_clean()


def test_local_host_puts_files_at_once_and_with_their_mode(tmp_path: Path) -> None:
    host, path = LocalConnector(), tmp_path / "deep" / "er" / "file"
    host.put(str(path), b"one", 0o640)
    host.put(str(path), b"two")
    assert host.get(str(path)) == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]
    with pytest.raises(FileNotFoundError):
        host.get(str(tmp_path / "none"))


def test_local_host_runs_commands_with_a_limit() -> None:
    host = LocalConnector()
    program = "import sys; print(sys.stdin.read()); sys.exit(3)"
    done = host.run([sys.executable, "-c", program], data=b"in", limit=60)
    assert (done.status, done.output, done.errors) == (3, b"in\n", b"")
    program = "import os; os.kill(os.getpid(), 9)"
    assert host.run([sys.executable, "-c", program], limit=60).status == -signal.SIGKILL
    with pytest.raises(TimedOut):
        host.run(["sleep", "1000"], limit=0.1)


def test_local_host_opens_a_command_and_streams() -> None:
    host = LocalConnector()
    program = "import sys; sys.stderr.write('x' * 100_000 + 'end'); sys.stdout.write(sys.stdin.read()[::-1])"
    channel = host.open([sys.executable, "-c", program])
    text = b"one two " * 100_000
    sender = threading.Thread(target=lambda: (channel.send(text), channel.close()))
    sender.start()
    got = b""
    while data := channel.receive():
        got += data
    sender.join()
    assert got == text[::-1]
    assert len(channel.errors()) == 4096 and channel.errors().endswith("xend")
    with pytest.raises(OSError):
        channel.send(b"more")
    host.close()


def test_local_host_ends_what_does_not_end_by_itself() -> None:
    host = LocalConnector()
    channel = host.open([sys.executable, "-c", SLEEP])
    host.close()
    assert channel.receive() == b""


def test_errors_of_several_hosts_are_all_told() -> None:
    def fail(name: str) -> str:
        if name == "c":
            return name
        raise TimedOut(f"{name} is slow", "wait")

    with pytest.raises(TimedOut) as caught:
        everywhere(fail, "abc")
    assert caught.value.message == "2 errors:\n  a is slow\n    wait\n  b is slow\n    wait"
    with pytest.raises(TimedOut, match=r"^a is slow"):
        everywhere(fail, "ac")
    assert everywhere(fail, "cc") == ["c", "c"]


def test_an_interrupt_does_not_wait_for_calls_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hosts, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        everywhere(lambda _: closed.wait(240), "ab")
    closed.set()


def _command(who: ProcessId) -> str:
    try:
        return Path(f"/proc/{who.pid}/cmdline").read_text()
    except OSError:
        return ""
