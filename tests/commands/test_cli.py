"""The command line: exit statuses, help, and the plan printed by a dry run."""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import ROOT
from desk import in_this_process, without_progress
from msgspec import structs

from geomx_cli import cli
from geomx_cli.commands._command import print_json
from geomx_cli.core import env_names, errors
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import defaults
from geomx_cli.core.plugins import table
from geomx_cli.jobs.store.script import check_user_modules
from geomx_cli.plan.this_machine import this_machine

STAND_IN = ROOT.joinpath("tests", "stand_in.py")


def geomx(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command; stderr as `without_progress`."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("GEOMX_")} | env
    done = in_this_process(arguments, environment, Path.cwd())
    done.stderr = without_progress(done.stderr)
    return done


@pytest.mark.processes
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
    assert loaded.isdisjoint({"numpy", "zmq", "rich", "msgspec", "mxnet", "paramiko"})
    assert not any(name.startswith("geomx_cli.commands.") and "._" not in name for name in loaded)


@pytest.mark.processes
def test_commands_that_read_a_job_load_neither_sockets_nor_arrays() -> None:
    code = "import sys, geomx_cli.jobs.store.registry; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()).isdisjoint({"numpy", "zmq", "rich", "mxnet", "torch", "paramiko"})


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert cli.main([name, "--help"]) == 0
    printed = capsys.readouterr()
    assert f"geomx {name}" in printed.out and not printed.err


def test_a_script_with_a_syntax_error_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nfor x in\n")
    done = geomx("launch", "--local", "--", "python", str(tmp_path / "train.py"))
    assert done.returncode == 3
    assert f"error: {tmp_path}/train.py cannot be run: line 2: invalid syntax" in done.stderr


def test_tee_of_the_bundled_training_says_that_it_prints_nothing(tmp_path: Path) -> None:
    done = geomx("launch", "--local", "--tee", "--dry-run", "--network", "linear")
    assert "warning: --tee shows what a script prints" in done.stderr


def test_a_group_without_a_command_prints_its_help() -> None:
    done = geomx("hosts")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: geomx hosts ") and "check" in done.stderr


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
    assert "a number alone is seconds" in text and "a number alone is bytes" in text


@pytest.mark.parametrize("arguments", [["fly"], ["launch", "--fly"], ["launch", "--parties"]])
def test_usage_errors(arguments: list[str]) -> None:
    done = geomx(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (["--algo", "none-such"], {}, "error: --algo (GEOMX_ALGO): there is no 'none-such'\n  choose "),
        ([], {"GEOMX_WORKERS": "many"}, "error: --workers (GEOMX_WORKERS): 'many'"),
        (["--topology=flat", "--central-workers=1"], {}, "error: --topology flat has no central workers\n  "),
        (["--compress=mpq:0.1", "--central-workers=1"], {}, "error: --compress mpq:0.1 corrects the momentum"),
        (["--tsengine=inter", "--parties=1"], {}, "error: --tsengine inter: there is one party only, and no other "),
    ],
)
def test_invalid_settings(arguments: list[str], env: dict[str, str], message: str) -> None:
    done = geomx("launch", "--dry-run", *arguments, **env)
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["launch", "doctor"])
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--compress=int9", "error: --compress (GEOMX_COMPRESS): there is no codec 'int9'"),
        ("--compress-lan=topk:2", "error: --compress-lan (GEOMX_COMPRESS_LAN): topk:2"),
        ("--wan=100mbit", "error: --wan emulates links on one machine, and host hub is another"),
    ],
)
def test_what_needs_no_host_is_refused_before_one_is_dialled(
    tmp_path: Path, command: str, argument: str, message: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        access = f'ssh = "127.0.0.1"\nssh_port = {listener.getsockname()[1]}'
        tables = (f'[[host]]\nname = "{name}"\nparty = "{name}"\n{access}' for name in ("hub", "a"))
        path = tmp_path / "hosts.toml"
        path.write_text("\n".join(tables) + '\ndevices = ["cpu"]\n')
        done = geomx(command, argument, "--network=linear", "--hosts", str(path), XDG_STATE_HOME=str(tmp_path))
        assert (done.returncode, done.stdout) == (3, "")
        assert message in done.stderr
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_dry_run_prints_one_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("print(kv.global_rank)")
    monkeypatch.chdir(tmp_path)
    done = geomx(
        "launch", "--dry-run", "--json", "--job-dir", str(tmp_path / "job"), "--workers", "1",
        "--", "python", "train.py", "--lr", "0.1", "--json",
        GEOMX_WORKERS="4", GEOMX_PARTIES="3", PYTHONPATH=str(ROOT),
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr.startswith("rank scope: party (train.py uses global_rank") and done.stderr.count("\n") == 1
    found = json.loads(done.stdout)
    assert found["schema_version"] == 1
    assert found["script"] == ["python", "train.py", "--lr", "0.1", "--json"]
    names = [process["name"] for process in found["processes"]]
    assert len(names) == 3 + 3 * 4
    assert (found["topology"], found["topology_reason"]) == ("spread", "3 parties train, all on this machine")
    worker = found["processes"][names.index("C/worker:0")]
    assert worker["argv"] == [sys.executable, "train.py", "--lr", "0.1", "--json"]
    assert worker["env"]["GEOMX_JOB_DIR"] == str(tmp_path / "job")
    assert not (tmp_path / "job").exists()


def test_flat_in_an_inventory_is_warned_of_as_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    hosts = ('name = "hub"\nparty = "hub"', *(f'name = "{one}"\nparty = "{one}"\ndevices = ["cpu"]' for one in "ab"))
    tables = "\n".join(f"[[host]]\n{host}" for host in hosts)
    path.write_text(f'central = "hub"\ntopology = "flat"\n{tables}\n')
    done = geomx("launch", "--dry-run", "--hosts", str(path), "--algo", "hfa")
    assert done.returncode == 0, done.stderr
    assert "all workers are one party in hfa" in done.stderr and "--k2 has no effect" in done.stderr


def test_a_name_that_is_neither_a_job_nor_a_folder() -> None:
    done = geomx("compare", "no-such-folder")
    assert done.returncode == 3 and "there is no job and no folder 'no-such-folder'" in done.stderr


def test_dry_run_prints_every_process_for_people() -> None:
    done = geomx("launch", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "13 processes on this machine, topology spread: 2 parties train, all on this machine\n" in done.stdout
    for name in ("central/global_scheduler:0", "A/worker:1", "DMLC_PS_ROOT_URI=127.0.0.1", "host B"):
        assert name in done.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["launch", "train.py"], "geomx launch -- python train.py"),
        (["launch", "python", "train.py", "--my-flag"], "geomx launch -- python train.py --my-flag"),
        (["launch", "--epochs", "3", "train.py", "--lr", "2"], "geomx launch --epochs 3 -- python train.py --lr 2"),
        (["doctor", "--quick", "./run", "--", "a b"], "geomx doctor --quick -- ./run 'a b'"),
    ],
)
def test_a_script_stands_behind_two_hyphens(arguments: list[str], line: str) -> None:
    done = geomx(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"\n  write: {line}\n")


@pytest.mark.parametrize(
    ("script", "said", "hint"),
    [
        ("python trian.py", "there is no trian.py in ", "did you mean train.py?"),
        ("python -u gone.py", "there is no gone.py in ", "correct its path"),
        ("train.py", "there is no program train.py", "write: -- python train.py"),
        ("./train.py", "./train.py is not executable", "write: -- python ./train.py"),
        ("run", "there is no program run", "write: -- ./run, and make it executable"),
        ("./gone", "there is no ", "correct the path"),
        ("no-such-program", "there is no program no-such-program", "correct its name"),
        ("torchrun --nproc-per-node 2 train.py", "torchrun starts workers", "write: -- python train.py;"),
        ("python -m torch.distributed.run train.py", "torch.distributed.run starts", "write: -- python train.py;"),
        ("accelerate launch --num_processes 2 train.py", "accelerate launch starts", "write: -- python train.py;"),
        ("bash own.sh", "torchrun starts workers", "write in own.sh: python train.py;"),
    ],
)
def test_a_script_that_cannot_be_started_is_refused_before_anything_is(
    script: str, said: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "run").touch()
    (tmp_path / "own.sh").write_text("# torchrun x.py\necho torchrun; A=1 exec torchrun --nnodes 2 \\\n  train.py\n")
    monkeypatch.chdir(tmp_path)
    for dry in ([], ["--dry-run"]):
        done = geomx("launch", "--job-dir", "job", *dry, "--", *script.split(), PYTHONPATH=str(ROOT))
        assert (done.returncode, done.stdout) == (3, "")
        assert done.stderr.startswith(f"error: {said}")
        assert f"\n  {hint}" in done.stderr
        assert not (tmp_path / "job").exists()


def test_doctor_refuses_a_script_that_is_not_there() -> None:
    done = geomx("doctor", "--local", "--quick", "--", "python", "nope.py")
    assert (done.returncode, done.stdout) == (3, "") and "error: there is no nope.py in " in done.stderr


def test_a_job_directory_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    done = geomx("launch", "--job-dir", str(tmp_path), "--", "true")
    assert done.returncode == 3
    assert "is not empty: it has thesis.tex" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.processes
def test_a_data_directory_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    done = geomx("launch", "--job-dir", str(tmp_path / "job"), "--data-dir", str(tmp_path / "daat"))
    assert done.returncode == 3
    assert "there is no such directory" in done.stderr
    assert "geomx data fetch fashion-mnist --data-dir" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_mistyped_variable_is_told() -> None:
    done = geomx("launch", "--dry-run", GEOMX_TOPOLOGIE="flat", GEOMX_INSECURE="1", GEOMX_WORKERS="1")
    assert done.returncode == 0
    assert done.stderr == "warning: GEOMX_TOPOLOGIE means nothing to geomx; did you mean GEOMX_TOPOLOGY?\n"


@pytest.mark.parametrize(
    ("arguments", "warning"),
    [
        (["--k1", "40"], "--k1 is for --algo hfa, and this job runs fsa"),
        (
            ["--compress", "topk:0.01"],
            "--compress topk with --algo fsa trains better with --optimizer-on worker: see docs/how-to/choose-codec.md",
        ),
        (["--compress", "topk:0.01", "--optimizer-on", "worker"], ""),
        (["--compress", "sparseloco", "--algo", "hfa"], ""),
        (["--algo", "diloco", "--weight", "samples", "--k2=4"], "--k2 is for --algo hfa, and this job runs diloco"),
        (["--algo", "async", "--max-staleness", "3"], ""),
        (["--dgt-k", "0.3"], "--dgt-k has no effect without --dgt"),
        (["--dgt-k", "0.3", "--dgt", "2"], ""),
        (["--dgt-k", "0.3", "--dgt", "2", "--tsengine", "inter"], ""),
        (["--dgt-loss", "0.3", "--dgt", "2"], "--dgt-loss has no effect without --dgt 1"),
        (["--dgt-loss", "0.3", "--dgt", "1"], ""),
        (["--dgt-loss", "0.3"], "--dgt-loss has no effect without --dgt"),
        (["--p3", "--algo", "hfa"],
         "--p3 with --algo hfa makes slices shorter and nothing else: it is for fsa and sync"),
        (["--no-p3", "--algo", "hfa"], ""),
        (["--p3", "--algo", "sync"], ""),
        (["--tsengine", "inter", "--parties", "1", "--topology", "spread", "--central-workers", "1"], ""),
        (["--tsengine", "both", "--parties", "1"], ""),
        (["--ts-greed", "0.3", "--dgt", "2"], "--ts-greed has no effect without --tsengine"),
        (["--epochs=9", "--lr=1", "--", "python3", str(STAND_IN)],
         "--epochs, --lr: no effect on a script, only on the bundled job; write a script's own options behind its"
         " name (MXNet scripts may read these with kv.option)"),
        (["--k1", "40", "--algo", "hfa", "--", "python3", str(STAND_IN), "--k1"], ""),
    ],
)  # fmt: skip
def test_an_option_that_the_job_has_no_use_for_is_told(arguments: list[str], warning: str) -> None:
    done = geomx("launch", "--dry-run", *arguments)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if not line.startswith("rank scope: ")]
    assert told == ([f"warning: {warning}"] if warning else [])


@pytest.mark.parametrize("command", [["launch", "--job-dir", "job"], ["sweep", "--algo", "fsa", "--to", "job"]])
@pytest.mark.parametrize(
    ("option", "said", "hint"),
    [
        ("--network=mine:net", "there is no module 'mine' in ", "did you mean mime?"),
        ("--data=pictures.small:data", "there is no module 'pictures.small' in ", "correct its name, or start from"),
        ("--network=mime:resnett", "mime has no function 'resnett'", "did you mean resnet?"),
        ("--network=wrong:net", "", "correct it"),
    ],
)
def test_a_module_that_is_not_there_is_refused_before_anything_starts(
    command: list[str], option: str, said: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mime.py").write_text("if True:\n    def resnet(): ...\n")
    (tmp_path / "wrong.py").write_text("def net(:")
    monkeypatch.chdir(tmp_path)
    done = geomx(*command, option, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"error: {option.replace('=', ' ')}: {said}") and f"\n  {hint}" in done.stderr
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize("json_wanted", [False, True])
def test_a_bug_is_told_as_such(
    json_wanted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(_: str) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr("geomx_cli.jobs.store.registry.find", find)
    assert cli.main(["fetch", "x", *["--json"] * json_wanted]) == 1
    told = capsys.readouterr()
    assert "RuntimeError: out of order" in told.err and "error: this is a bug in geomx" in told.err
    if json_wanted:
        error = json.loads(told.out)["error"]
        assert error["exit_code"] == 1 and error["message"] == "this is a bug in geomx, not in your settings"
    else:
        assert not told.out


def test_modules_are_looked_for_where_processes_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("here", "path/there"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "here" / "mine.py").write_text("from other import *")
    (tmp_path / "path" / "there" / "own.py").touch()
    monkeypatch.chdir(tmp_path / "here")
    inventory, wanted = this_machine(defaults(), range(5000, 5012)), defaults()
    check_user_modules({**wanted, "network": "mine:net"}, inventory)
    check_user_modules({**wanted, "network": "__main__:net", "data": "numpy.own:data"}, inventory)
    with pytest.raises(InvalidSettings, match="no module 'own'"):
        check_user_modules({**wanted, "data": "own:data"}, inventory)
    for change in ({"env": {"PYTHONPATH": str(tmp_path / "path/there")}}, {"python": "/opt/other/bin/python"}):
        hosts = [structs.replace(host, **change) for host in inventory.hosts]
        check_user_modules({**wanted, "data": "own:data"}, inventory.with_hosts(hosts))


@pytest.mark.parametrize(
    ("words", "outer"), [([], (0.7, 0.9)), (["--compress", "sparseloco:1"], (1.0, 0.0)),
                         (["--compress", "sparseloco", "--outer-momentum", "0.5"], (1.0, 0.5))]
)  # fmt: skip
def test_a_codec_whose_residual_takes_the_role_of_momentum(words: list[str], outer: tuple[float, float]) -> None:
    done = geomx("launch", "--dry-run", "--json", "--algo", "diloco", *words)
    options = json.loads(done.stdout)["options"]
    assert (options["outer_lr"], options["outer_momentum"]) == outer


@pytest.mark.parametrize("words", [["stop", "--grace", "99999999d"], ["launch", "--lease", "1s"]])
def test_a_duration_out_of_range(words: list[str]) -> None:
    done = geomx(*words)
    assert done.returncode == 2 and " is not from " in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data", "fetch", "fashion"], "error: there is no 'fashion'\n  did you mean fashion-mnist?\n"),
        (["draw", "--format", "gif"], "error: --format: there is no 'gif'\n  choose one of png, svg, pdf\n"),
        (
            ["draw", "job", "--size", "72,44"],
            "error: invalid value for '--size': '72,44' is not from 1 to 50 inches\n"
            "  geomx draw --help explains its usage\n",
        ),
        (
            ["launch", "-epochs", "1"],
            "error: there is no option -epochs\n  did you mean --epochs? geomx launch --help explains its usage\n",
        ),
        (["completion"], "error: SHELL is missing\n  choose one of bash, zsh, fish\n"),
        (["launch", "--"], "error: nothing follows --\n  write the script's command after it, or leave it out\n"),
        (
            ["data", "list"],
            "error: there is no command 'list'\n  choose one of fetch, push; geomx data --help explains the commands\n",
        ),
        (["-help"], "error: there is no option -help\n  did you mean --help? geomx --help explains its usage\n"),
        (
            ["logs", "collect"],
            "error: missing option '-o' / '--to'\n  geomx logs collect --help explains its usage\n",
        ),
        (
            ["logs", "collect", "-to", "x"],
            "error: there is no option -to\n  did you mean --to? geomx logs collect --help explains its usage\n",
        ),
        (
            ["draw", "-b", "x", "-network=cnn"],
            "error: there is no option -network\n  did you mean --network? geomx draw --help explains its usage\n",
        ),
        (
            ["jobs", "prun"],
            "error: there is no command 'prun'\n  did you mean prune? geomx jobs --help explains its usage\n",
        ),
        (
            ["jobs", "42"],
            "error: there is no command '42'\n  choose one of prune; geomx jobs --help explains its usage\n",
        ),
        (["jobs", "-x"], "error: there is no option -x\n  geomx jobs --help explains its usage\n"),
    ],
)
def test_a_wrong_choice(words: list[str], said: str) -> None:
    done = geomx(*words)
    assert (done.returncode, done.stderr) == (2, said)


def test_json_is_what_every_parser_reads(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"loss": math.nan, "left": [math.inf, 1.5], "name": "NaN"})
    assert capsys.readouterr().out == '{"loss": null, "left": [null, 1.5], "name": "NaN"}\n'


def test_every_variable_of_a_process_is_known() -> None:
    found = json.loads(geomx("launch", "--dry-run", "--json", "--topology", "spread", "--wan", "1gbit").stdout)
    names = {name for process in found["processes"] for name in process["env"] if name.startswith("GEOMX_")}
    assert names <= env_names.OWN | {option.env for option in table()}


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["launch", "--fly", "--json"], 2, "there is no option --fly"),
        (["launch", "--json", "train.py"], 2, "the command of the script"),
        (["launch", "--json", "--workers", "two"], 3, "--workers (GEOMX_WORKERS): 'two'"),
        (["status", "--json", "--watch"], 2, "--watch shows a table"),
        (["stop", "no-such-job", "--json"], 3, "no job"),
    ],
)
def test_json_has_the_error(arguments: list[str], exit_code: int, message: str, tmp_path: Path) -> None:
    done = geomx(*arguments, XDG_STATE_HOME=str(tmp_path))
    found = json.loads(done.stdout)
    assert (done.returncode, found["schema_version"], found["error"]["exit_code"]) == (exit_code, 1, exit_code)
    assert message in found["error"]["message"] or message in found["error"]["hint"]
    assert "rror: " in done.stderr


def test_the_json_of_a_script_is_its_own_affair() -> None:
    assert geomx("launch", "--workers", "two", "--", "python", "train.py", "--json").stdout == ""


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [["--help"], ["launch", "--dry-run"], ["launch", "--dry-run", "--json"]])
def test_stdout_that_cannot_be_written(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "geomx_cli", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    error, hint = without_progress(done.stderr).splitlines()
    assert (done.returncode, error) == (5, "error: stdout cannot be written: No space left on device")
    assert hint.startswith("  ")
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    os.close(theirs)
    assert (done.returncode, without_progress(done.stderr)) == (0, "")


ERRORS = [getattr(errors, name) for name in errors.__all__ if name not in ("Blame", "GeomxError", "Missed")]


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


def test_an_error_behind_a_result_adds_no_second_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object, **__: object) -> None:
        print('{"status": "failed"}')
        raise errors.TrainingFailed("it broke")

    monkeypatch.setattr(cli.geomx, "invoke", run)
    assert cli.main(["launch", "--json"]) == 1
    assert capsys.readouterr().out == '{"status": "failed"}\n'


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err.endswith("error: interrupted\n")


INTERRUPTED = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from geomx_cli.__main__ import main
sys.exit(main())
"""


@pytest.mark.processes
@pytest.mark.parametrize("module", ["geomx_cli.cli", "click", "geomx_cli.core.errors"])
def test_an_interrupt_while_modules_are_imported(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, module], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_a_defect_shows_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert raising(monkeypatch, ZeroDivisionError("odd")) == 1
    text = capsys.readouterr().err
    assert "ZeroDivisionError: odd" in text
    assert "please report it" in text
