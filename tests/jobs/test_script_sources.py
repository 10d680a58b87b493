"""Whether a script is written for the algorithm of its job."""

import json
from pathlib import Path

import pytest
from desk import Desk
from mxnet_scripts import SCRIPTS

from geomx_cli.core import starter
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Value, defaults
from geomx_cli.core.plugins import algorithms, table
from geomx_cli.jobs.store.script_sources import check_worker_loss, warning_of
from geomx_cli.plan.ports import ports_needed
from geomx_cli.plan.this_machine import this_machine

INVENTORY = this_machine(defaults(table()), list(range(9000, 9000 + ports_needed(defaults(table())))))
PLAIN = "import mxnet as mx\n\nkv = mx.kv.create('dist_sync')\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def job_of(algorithm: str, framework: str = "mxnet") -> dict[str, Value]:
    return {"algo": algorithm, "framework": framework}


HFA = job_of("hfa")


def warned(algorithm: str, text: str, *arguments: str, name: str = "mine.py") -> bool:
    Path(name).write_text(text)
    return bool(warning_of(("python", name, *arguments), job_of(algorithm), INVENTORY))


@pytest.mark.parametrize("algorithm", ["hfa", "diloco", "decoupled", "esync"])
def test_a_plain_loop_takes_no_local_steps(algorithm: str) -> None:
    assert warned(algorithm, PLAIN)
    assert warned(algorithm, f'"""Not {algorithm} at all."""\n{PLAIN}  # {algorithm}\n'), "no code says so"
    sentence = warning_of(("python", "mine.py"), job_of(algorithm), INVENTORY)
    assert sentence.startswith(f"mine.py may not be written for --algo {algorithm}: it names neither")


@pytest.mark.parametrize("algorithm", sorted(set(algorithms()) - {"hfa", "diloco", "decoupled", "esync"}))
def test_other_algorithms_are_the_servers(algorithm: str) -> None:
    assert not warned(algorithm, PLAIN)


@pytest.mark.parametrize(
    "text",
    [
        "kv.option('algo')",
        "steps % kv.option('k1')",
        "os.environ['MXNET_KVSTORE_HFA_K1']",
        "parser.add_argument('--k1')",
        "def train_hfa(): pass",
        "use_hfa = True",
        "mode = 'HFA'",
        "print 'hfa'",
    ],
)
def test_what_says_that_a_script_is_for_hfa(text: str) -> None:
    assert not warned("hfa", f"{PLAIN}{text}\n")
    assert warned("diloco", f"{PLAIN}{text}\n") == ("algo" not in text)


def test_pytorch_scripts_take_the_steps_of_any_algorithm() -> None:
    Path("mine.py").write_text("import geomx_cli.torch as geomx\n")
    assert not warning_of(("python", "mine.py"), job_of("hfa", "torch"), INVENTORY)


def test_what_is_imported_and_given_counts() -> None:
    Path("helper.py").write_text("def k1():\n    return kv.option('k1')\n")
    assert not warned("hfa", f"import helper\n{PLAIN}")
    assert not warned("hfa", PLAIN, "--k1=20") and not warned("hfa", PLAIN, "hfa")
    assert not warned("hfa", PLAIN, name="cnn_hfa.py")
    assert warned("hfa", PLAIN, "--lr", "0.1"), "options of the bundled training"


def test_nothing_is_said_of_what_cannot_be_read() -> None:
    assert warning_of((), HFA, INVENTORY) == warning_of(("./run.sh",), HFA, INVENTORY) == ""
    assert warning_of(("python", "elsewhere.py"), HFA, INVENTORY) == ""


def test_templates_are_written_for_their_algorithm() -> None:
    for name, template in (("hfa", "cnn_sweep"), ("diloco", "cnn_sweep"), ("esync", "cnn_esync")):
        path = str(starter.FOLDER / f"{template}.py")
        assert not warning_of(("python", path), job_of(name), INVENTORY)
    assert warning_of(("python", str(starter.FOLDER / "train.py")), HFA, INVENTORY)


@pytest.mark.processes
def test_launch_warns_and_records_keep_it(desk: Desk, tmp_path: Path) -> None:
    """A plain script under DiLoCo: launch warns, and so do all that show its figures."""
    command = ["python", str(SCRIPTS / "stock.py"), "out", "kv"]
    (tmp_path / "out").mkdir()
    done = desk.geomx("launch", "--local", "--algo", "diloco", "--workers", "1", "--json", "--", *command)
    assert done.returncode == 0, done.stderr
    sentence = "warning: stock.py may not be written for --algo diloco: it names neither diloco nor one of its options"
    assert done.stderr.count(sentence) == 1
    result = json.loads(done.stdout)
    job = result["job"]
    assert len(result["warnings"]) == 1 and sentence == f"warning: {result['warnings'][0]}"[: len(sentence)]
    assert desk.geomx("status", job).stdout.count(sentence) == 1
    assert desk.geomx("logs", "collect", job, "--to", "base").returncode == 0
    compared = desk.geomx("compare", "base/stock", "--json")
    assert compared.stderr.count(sentence) == 1, compared.stderr
    found = json.loads(compared.stdout)["jobs"][0]
    assert (found["outcome"], len(found["warnings"])) == ("done", 1)
    summary = desk.geomx("summarize", "-b", "base", "-n", "stock", "-m", "diloco")
    assert summary.stderr.count(sentence) == 1, summary
    assert ["outcome", "done"] in [line.split() for line in summary.stdout.splitlines()], summary


GROUP = "import torch.distributed as dist\n\ndist.init_process_group()\n"


def test_a_process_group_cannot_go_on_without_a_worker() -> None:
    Path("mine.py").write_text(GROUP)
    Path("other.py").write_text('"""No init_process_group."""\nimport geomx_cli.torch\n')
    for chosen in ("end", "restart-all"):
        check_worker_loss(("python", "mine.py"), {"on_worker_loss": chosen}, INVENTORY)
    check_worker_loss(("python", "other.py"), {"on_worker_loss": "leave"}, INVENTORY)
    with pytest.raises(InvalidSettings, match=r"mine\.py has init_process_group, and a process group needs all"):
        check_worker_loss(("python", "mine.py"), {"on_worker_loss": "leave"}, INVENTORY)
