"""Completion of command lines: what a shell is offered, in a terminal of bash and by each shell's protocol."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from cluster import ROOT

from geomx_cli import cli
from geomx_cli.contract import frontends
from geomx_cli.core import plugins
from geomx_cli.core.options import Option
from geomx_cli.datasets.catalog import DATA_SETS


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of jobs, with two: 20260102, the newer one, and 20260101."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "geomx" / "jobs"
    for index, name in enumerate(("20260101", "20260102")):
        (folder / name).mkdir(parents=True, mode=0o700)
        plan = folder / name / "plan.json"
        plan.write_text(json.dumps({"processes": [{"party": f"P{index}", "role": "worker", "host": f"h{index}"}]}))
        os.utime(plan, (index, index))
    return folder


def offered(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], line: str, shell: str = "bash") -> str:
    """What geomx prints when a shell completes `line`, whose words are those that bash makes of it."""
    words = line.replace("=", " = ").split(" ") if shell == "bash" else line.split(" ")
    number = words[-1] if shell == "fish" else str(len(words) - 1)
    variables = {"_GEOMX_COMPLETE": f"{shell}_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": number}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main([]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    return printed.out.strip()


OFFERED: Mapping[str, str] = {
    "geomx st": "plain,status plain,stop",
    "geomx launch --alg": "plain,--algo",
    "geomx launch --algo h": "plain,hfa",
    "geomx launch --algo=h": "plain,hfa",
    "geomx sweep --algo h": "plain,hfa",
    "geomx sweep --algo fsa,h": "plain,fsa,hfa",
    "geomx sweep --algo fsa h": "plain,hfa",
    "geomx sweep --algo fsa --seeds 2 tr": "file,tr",
    "geomx sweep --algo fsa -- python tr": "file,tr",
    "geomx compare ": "plain,20260102 plain,20260101",
    "geomx compare resu": "dir,resu",
    "geomx compare --group-by se": "plain,seed plain,seed,",
    "geomx draw --group-by lr,cod": "plain,lr,codec plain,lr,codec,",
    "geomx draw --only accuracy,tr": "plain,accuracy,traffic plain,accuracy,traffic,",
    "geomx hosts check --algo h": "plain,hfa",
    "geomx launch --compress top": "plain,topk",
    "geomx launch --network lin": "plain,linear",
    "geomx launch --topology ": "plain,auto plain,central plain,spread plain,flat",
    "geomx launch --workers ": "",
    "geomx launch --hosts h": "file,h",
    "geomx launch -- python tr": "file,tr",
    "geomx data fetch mn": "plain,mnist",
    "geomx init --template cnn-s": "plain,cnn-sweep",
    "geomx man st": "plain,status plain,stop",
    "geomx man logs ": "plain,collect",
    "geomx status ": "plain,20260102 plain,20260101",
    "geomx jobs ": "plain,prune",
    "geomx logs ": "plain,collect plain,20260102 plain,20260101",
    "geomx logs collect ": "plain,20260102 plain,20260101",
    "geomx logs --party ": "plain,P1",
    "geomx logs 20260101 --host ": "plain,h0",
    "geomx logs gone --host ": "",
    "geomx launch nonsense ": "",
}


@pytest.mark.usefixtures("jobs")
def test_what_is_offered(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    found = {line: offered(monkeypatch, capfd, line).replace("\n", " ") for line in OFFERED}
    assert found == OFFERED
    assert "geomx" not in offered(monkeypatch, capfd, "geomx --version ")
    for line in ("geomx sweep --algo ", "geomx sweep --algo fsa "):
        assert set(offered(monkeypatch, capfd, line).split()) == {f"plain,{name}" for name in plugins.algorithms()}
    grouped = offered(monkeypatch, capfd, "geomx compare --group-by ").split()
    assert grouped[:4] == ["plain,algo", "plain,seed", "plain,lr", "plain,codec"]


def test_zsh_and_fish_replace_the_whole_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert offered(monkeypatch, capfd, "geomx launch --algo=h", "zsh").split() == ["plain", "--algo=hfa", "_"]
    assert offered(monkeypatch, capfd, "geomx launch --algo=h", "fish") == "plain,--algo=hfa"


def test_networks_and_modes_in_a_folder_of_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("cnn/hfa/1", "cnn/fsa/2", "cnn/figures", "linear/esync/3", "figures"):
        (tmp_path / name).mkdir(parents=True)
    for line, wanted in {
        "summarize -b {} -n ": "plain,cnn plain,linear",
        "draw -b {} -n li": "plain,linear",
        "summarize -b {} -n cnn -m ": "plain,fsa plain,hfa",
        "summarize -b {} -m ": "plain,esync plain,fsa plain,hfa",
        "summarize -n ": "",
    }.items():
        assert offered(monkeypatch, capfd, f"geomx {line.format(tmp_path)}").split() == wanted.split()


@pytest.mark.parametrize("content", ["{", "[]", '{"processes": [{}]}'])
def test_a_damaged_plan_offers_nothing(
    jobs: Path, content: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (jobs / "20260102" / "plan.json").write_text(content)
    assert offered(monkeypatch, capfd, "geomx logs 20260102 --party ") == ""


def test_every_suggestion_is_valid_and_none_is_missing() -> None:
    table: dict[str, Option] = {option.name: option for option in plugins.table()}
    networks = frontends.networks()
    assert sorted(table["network"].suggestions) == sorted(networks)
    assert set(table["data"].suggestions) == set(DATA_SETS)


@pytest.mark.processes
def test_an_answer_imports_nothing_slow() -> None:
    code = "import sys; from geomx_cli.cli import main; main([]); print('MODULES', *sys.modules)"
    asked = {"_GEOMX_COMPLETE": "bash_complete", "COMP_WORDS": "geomx launch --delivery ", "COMP_CWORD": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240, env=os.environ | asked
    )
    text, _, modules = done.stdout.partition("MODULES")
    assert "plain,direct" in text
    assert set(modules.split()).isdisjoint({"numpy", "mxnet", "zmq", "msgspec", "rich", "paramiko"})


@pytest.mark.processes
@pytest.mark.usefixtures("jobs")
def test_a_terminal_of_bash(tmp_path: Path) -> None:
    wrapper = tmp_path / "bin" / "geomx"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -m geomx_cli "$@"\n')
    wrapper.chmod(0o755)
    env = {**os.environ, "PATH": f"{wrapper.parent}:{os.environ['PATH']}", "TERM": "dumb", "PYTHONPATH": str(ROOT)}
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], env)
    try:
        os.write(terminal, b'eval "$(geomx completion bash)"; echo "re""ady"\n')
        _read_until(terminal, "ready\r\n")
        os.write(terminal, b"geomx launch --algo=hf\t")
        _read_until(terminal, "--algo=hfa")
        os.write(terminal, b"\x15geomx stop 20260102\t\x15geomx logs 20260101 --party \t")
        _read_until(terminal, "--party P0")
    finally:
        os.kill(pid, 9)
        os.close(terminal)
        os.waitpid(pid, 0)


def _read_until(terminal: int, text: str) -> None:
    """Read from a terminal until it shows `text`; fails after a minute."""
    seen, end = "", time.monotonic() + 60
    while text not in seen:
        assert select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0], seen
        seen += os.read(terminal, 4096).decode(errors="replace")
