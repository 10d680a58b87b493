"""The wheel, built from a source distribution and installed into a fresh environment, away from the checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import ROOT
from idx import write_data

from geomx_cli import __version__
from geomx_cli.core import starter
from geomx_cli.probe.facts import code_digest

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")


class Installed:
    """A fresh environment with the wheel, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        source = shutil.copytree(ROOT, folder / "source", ignore=LEFT_OUT)
        self.run(sys.executable, "-m", "build", "--outdir", folder / "dist", source)
        (self.wheel,) = folder.glob("dist/*.whl")
        self.run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
        self.bin = folder / "venv" / "bin"
        pip = (sys.executable, "-m", "pip", "--python", self.bin / "python", "install", "--quiet", "--no-compile")
        self.run(*pip, f"{self.wheel}[mxnet]")

    def run(self, *words: str | Path) -> str:
        """Run a command in the folder; return its output. Fails if it does."""
        env = {name: text for name, text in os.environ.items() if not name.startswith(("GEOMX_", "PYTHON"))}
        env["XDG_STATE_HOME"] = str(self.folder / "state")
        done = subprocess.run(
            words, cwd=self.folder, env=env, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def geomx(self, *words: str | Path) -> str:
        """Run the installed geomx."""
        return self.run(self.bin / "geomx", *words)


def check_files(installed: Installed) -> None:
    """Templates, the dashboard's page and the mark of annotations are in."""
    code = "import geomx_cli, pathlib; print(pathlib.Path(geomx_cli.__file__).parent)"
    package = Path(installed.run(installed.bin / "python", "-c", code).strip())
    assert package.is_relative_to(installed.folder / "venv")
    assert (package / "py.typed").exists()
    static = Path("observe", "dashboard", "static")
    for ours, theirs in ((ROOT / "templates", package / "templates"), (ROOT / "geomx_cli" / static, package / static)):
        wanted = {path.relative_to(ours) for path in ours.rglob("*.*") if path.suffix != ".pyc"}
        assert wanted <= {path.relative_to(theirs) for path in theirs.rglob("*.*")}


def check_digest(installed: Installed) -> None:
    """`geomx doctor` takes it for the same source code."""
    code = "from geomx_cli.probe.facts import code_digest; print(code_digest())"
    assert installed.run(installed.bin / "python", "-c", code).strip() == code_digest()


def check_commands(installed: Installed) -> None:
    """Commands that read files of the package."""
    assert installed.geomx("--version") == f"geomx {__version__}\n"
    installed.geomx("init", "here")
    for name, script in starter.templates().items():
        installed.geomx("init", "here", "--template", name)
        assert (installed.folder / "here" / script).read_bytes() == (starter.FOLDER / script).read_bytes()
    installed.geomx("hosts", "check", "--hosts", "here/hosts.toml")


def check_training(installed: Installed) -> None:
    """A job of a few steps with MXNet."""
    data = write_data(installed.folder / "data", train=64)
    small = ("--network", "cnn", "--parties", "1", "--workers", "1", "--batch-size", "16", "--epochs", "1")
    assert '"status": "done"' in installed.geomx("launch", "--local", "--json", "--data-dir", data, *small)


def test_the_wheel(tmp_path: Path) -> None:
    """One test, as pytest-xdist would build the environment again in each process that runs one of several."""
    installed = Installed(tmp_path)
    check_files(installed)
    check_digest(installed)
    check_commands(installed)
    check_training(installed)
    shutil.rmtree(tmp_path)
