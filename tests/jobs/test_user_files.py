"""The user's files sent to hosts behind SSH, and the script's command there."""

import os
import tempfile
from pathlib import Path

import pytest
from msgspec import structs

from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.inventory import Host, Inventory, Local, Party, Ssh
from geomx_cli.jobs.store import user_files
from geomx_cli.jobs.store.script import check_script, ignored_interpreter, with_interpreter
from geomx_cli.plan import JobSpec


def inventory_of(*hosts: Host) -> Inventory:
    """An inventory of one party."""
    return Inventory((Party("A", 1),), Party("hub", 0), (*hosts, Host("hub", ("hub",))))


def test_the_interpreter_of_the_command_is_that_of_hosts_without_one() -> None:
    far = Host(name="far", parties=("A",), access=Ssh(address="192.0.2.1"), devices=("cpu",))
    near, named = structs.replace(far, name="near", access=Local()), structs.replace(far, name="named", python="/p")
    inventory = inventory_of(far, near, named)

    def pythons(*script: str) -> list[str]:
        return [host.python for host in with_interpreter(script, inventory).hosts_of("A")]

    assert pythons("/opt/g/bin/python3", "train.py") == ["/opt/g/bin/python3", "", "/p"]
    assert pythons("python", "train.py") == pythons(".venv/bin/python", "x.py") == pythons() == ["", "", "/p"]

    assert "runs in /p on named, the python of the inventory, not in /q/python of" in ignored_interpreter(
        ("/q/python", "train.py"), inventory
    )
    assert not ignored_interpreter(("python", "train.py"), inventory) and not ignored_interpreter((), inventory)
    same = inventory_of(far, structs.replace(named, name="other", python="~/g/bin/python"))
    assert not ignored_interpreter((str(Path("~/g/bin/python").expanduser()), "train.py"), same)


@pytest.mark.parametrize(
    "command",
    [
        "python3 -u -m torch.distributed.run x.py", "env A=1 torchrun x.py", "uv run -- torchrun x.py",
        "uv run --with torch torchrun x.py", "python -W ignore -X dev -m torch.distributed.run x.py",
        "deepspeed x.py", "python -m accelerate.commands.launch x.py", "lightning run model x.py",
    ],
)  # fmt: skip
def test_commands_that_start_workers_are_refused(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By themselves, in a shell's -c, and in a shell script."""
    monkeypatch.chdir(tmp_path)
    Path("own.sh").write_text(f"set -e\nif true; then CUDA_VISIBLE_DEVICES=0 {command} --lr 1; fi\n")
    inventory = inventory_of(Host("near", ("A",), devices=("cpu",)))
    for script in (command.split(), ["bash", "-c", f"cd . && {command}"], ["bash", "own.sh"]):
        with pytest.raises(InvalidSettings, match=r"starts workers, and so does .* \(write.*python x\.py;"):
            check_script(script, inventory)


def test_links_are_followed_and_circles_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "other" / "deep").mkdir(parents=True)
    (tmp_path / "other" / "deep" / "one").write_text("1")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "data" / "again").symlink_to(tmp_path / "other")
    assert sorted(user_files.pack((), [Path("data")]).files) == ["data/again/deep/one", "data/link/deep/one"]
    (tmp_path / "other" / "deep" / "back").symlink_to(tmp_path / "data")
    with pytest.raises(InvalidSettings, match="deep/back is a link to a folder that it lies in"):
        user_files.pack((), [Path("data")])


def test_folder_that_cannot_be_read_is_named() -> None:
    with tempfile.TemporaryDirectory() as place:
        closed = Path(place, "closed")
        closed.mkdir(mode=0)
        Path(place).chmod(0o755)
        me = os.geteuid()
        if me == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(CheckFailed, match=r"cannot read .*/closed: Permission denied"):
                user_files.pack((), [Path(place)])
        finally:
            os.seteuid(me)


@pytest.mark.parametrize("program", ["python", "python3.12", ".venv/bin/python", "/opt/x/bin/python3"])
def test_each_machine_has_its_own_python(program: str) -> None:
    spec = JobSpec("job", script=(program, "train.py", "x"), carried={"train.py": "train.py"}, job_dir="/jobs/job")
    far = Host(name="far", parties=("A",), access=Ssh(address="far"), address="far", python="/there/python")
    near = Host(name="near", parties=("A",), address="127.0.0.1")
    assert spec.command_on(far) == ["/there/python", "/jobs/job/files/train.py", "x"]
    assert spec.command_on(near)[0] == program


def test_the_package_of_a_module_is_taken_along_as_a_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("own/__init__.py", "own/deep/train.py", "single.py", "other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass")

    def taken(*script: str) -> list[str]:
        return list(user_files.pack(script, ()).files)

    assert taken("python", "-u", "-m", "own.deep.train", "--epochs", "2") == ["own/__init__.py", "own/deep/train.py"]
    assert taken("python3", "-m", "single") == ["single.py"]
    assert taken("python", "-m", "not.here") == [] == taken("run", "-m", "own")
    assert taken("python", "other.py", "-m", "own") == ["other.py"]
