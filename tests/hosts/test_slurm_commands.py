"""Commands for Slurm's machines, where none is needed to see what they do."""

from pathlib import Path

import pytest

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.hosts.local import LocalConnector
from geomx_cli.hosts.slurm import _PUT, in_step, own_errors, slurm
from geomx_cli.inventory import values


@pytest.mark.processes
def test_the_allocation_around_a_launch_gives_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"SLURM_NTASKS": "7", "SRUN_CPUS_PER_TASK": "3", "SLURM_CONF": "/conf", "SLURMD_NODENAME": "n1"}
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    seen = slurm(LocalConnector("east"), "env").splitlines()
    assert {"SLURM_CONF=/conf", "SLURMD_NODENAME=n1"} < {*seen}
    assert not [line for line in seen if line.startswith(("SLURM_NTASKS", "SRUN_"))]


@pytest.mark.processes
@pytest.mark.parametrize(("size", "status"), [(5, 0), (6, 1)])
def test_a_file_that_a_lost_connection_has_cut_is_not_installed(tmp_path: Path, size: int, status: int) -> None:
    path = tmp_path / "new" / "file"
    words = ["sh", "-c", _PUT, "sh", str(path), "640", str(size)]
    assert LocalConnector("east").run(words, data=b"12345", limit=30.0).status == status
    assert [each.name for each in path.parent.iterdir()] == ([] if status else ["file"])
    assert status or (path.read_bytes() == b"12345" and path.stat().st_mode & 0o777 == 0o640)


@pytest.mark.processes
def test_a_container_below_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "apptainer").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "apptainer").chmod(0o755)
    words = in_step("python3", "~/geomx.sif", 7, "geomx-1-A", ["n1"], "true")
    done = LocalConnector("east").run(words[words.index("--ntasks-per-node=1") + 1 :], limit=30.0)
    assert done.output == b"exec /home/alice/geomx.sif python3 -P -m geomx_cli.agent in-step geomx-1-A true\n"


def test_lines_of_srun_are_not_those_of_the_command() -> None:
    errors = b"no such file\nsrun: error: n1: task 0: Exited with exit code 2\nslurmstepd: error: *** STEP ***\n"
    assert own_errors(errors) == b"no such file\n"


@pytest.mark.parametrize("word", ["--nodes=3", "-N3", "-N", "--array=1-2", "--output=x", "--wrap", "-J"])
def test_arguments_on_which_geomx_relies(word: str) -> None:
    with pytest.raises(InvalidSettings, match=r"geomx sets --?[a-zA-Z-]+ itself"):
        values.sbatch(["--qos=high", word], "")
    assert values.sbatch(["--no-requeue", "--exclusive"], "") == ("--no-requeue", "--exclusive")
