"""The command line as a process: exit statuses, help, and the plan that a dry run prints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from geomx_cli import cli, errors
from geomx_cli.plugins import table


def geomx(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import sys; from geomx_cli.cli import main; sys.exit(main())", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={name: text for name, text in os.environ.items() if not name.startswith("GEOMX_")} | env,
    )


def test_help_lists_the_commands_without_importing_them() -> None:
    code = (
        "import sys; from geomx_cli.cli import main; status = main(['--help']);"
        "print('MODULES', *sys.modules); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    text, _, modules = done.stdout.partition("MODULES")
    for name, (_, line) in cli.COMMANDS.items():
        assert name in text
        assert line.split()[0] in text
    loaded = set(modules.split())
    assert loaded.isdisjoint({"numpy", "zmq", "pydantic", "rich", "msgspec", "mxnet", "paramiko"})
    assert not any(name.startswith("geomx_cli.commands.") for name in loaded)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name: str) -> None:
    done = geomx(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"geomx {name}" in done.stdout


def test_version() -> None:
    done = geomx("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("geomx ")


def test_launch_help_shows_every_option_with_its_variable() -> None:
    text = geomx("launch", "--help").stdout
    words = "".join(text.split())
    for option in table():
        assert option.flag in text
        assert option.env in words
    for heading in ("Cluster:", "Synchronisation:", "Transport:", "Training:"):
        assert heading in text


@pytest.mark.parametrize("arguments", [["fly"], ["launch", "--fly"], ["launch", "--parties"]])
def test_usage_errors(arguments: list[str]) -> None:
    done = geomx(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Error: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (["--algo", "none-such"], {}, "error: --algo (GEOMX_ALGO): there is no 'none-such'\n  choose "),
        ([], {"GEOMX_WORKERS": "many"}, "error: --workers (GEOMX_WORKERS): 'many'"),
        (["--topology=flat", "--central-workers=1"], {}, "error: --topology flat has no central workers\n  "),
    ],
)
def test_invalid_settings(arguments: list[str], env: dict[str, str], message: str) -> None:
    done = geomx("launch", "--dry-run", *arguments, **env)
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr


def test_dry_run_prints_one_object(tmp_path: Path) -> None:
    done = geomx(
        "launch", "--dry-run", "--json", "--job-dir", str(tmp_path / "job"), "--workers", "1",
        "--", "python", "train.py", "--lr", "0.1", "--json",
        GEOMX_WORKERS="4", GEOMX_PARTIES="3",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["schema_version"] == 1
    assert found["script"] == ["python", "train.py", "--lr", "0.1", "--json"]
    names = [process["name"] for process in found["processes"]]
    assert len(names) == 4 + 3 * 3
    worker = found["processes"][names.index("C/worker:0")]
    assert worker["argv"] == [sys.executable, "train.py", "--lr", "0.1", "--json"]
    assert worker["env"]["GEOMX_JOB_DIR"] == str(tmp_path / "job")
    assert not (tmp_path / "job").exists()


def test_dry_run_prints_every_process_for_people() -> None:
    done = geomx("launch", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "12 processes on 3 hosts" in done.stdout
    for name in ("central/global_scheduler:0", "A/worker:1", "DMLC_PS_ROOT_URI=127.0.0.1", "host B"):
        assert name in done.stdout


ERRORS = [getattr(errors, name) for name in errors.__all__ if name != "GeomxError"]


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    """The exit status of a command that raises `error`."""

    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli.geomx, "invoke", run)
    return cli.main(["launch"])


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_becomes_text_and_a_status(
    kind: type[errors.GeomxError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert raising(monkeypatch, kind("it broke", "mend it")) == kind.exit_code
    assert capsys.readouterr() == ("", "error: it broke\n  mend it\n")


def test_an_error_without_a_hint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(monkeypatch, errors.CheckFailed("it broke")) == 5
    assert capsys.readouterr().err == "error: it broke\n"


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err.endswith("error: interrupted\n")


def test_a_defect_shows_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert raising(monkeypatch, ZeroDivisionError("odd")) == 1
    text = capsys.readouterr().err
    assert "ZeroDivisionError: odd" in text
    assert "please report it" in text
