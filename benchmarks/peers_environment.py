"""The Python environments of peers.py and recovery_peers.py: one for each project with which they compare, made once
under the user's cache.

PyTorch is that of the interpreter that runs the benchmark, in all of them: so all rows measure one build, and no
environment downloads one of its own (which might be gigabytes, for CUDA). Versions are exact; `pip` uses the configured
index.
"""

import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import platformdirs

from geomx_cli.core.errors import CheckFailed

__all__ = ["HERE", "MXNET", "interpreter"]

HERE = ""
"""The environment of the interpreter that runs this."""
MXNET = "mxnet"

REQUIREMENTS = {
    "torchft": ("torchft==0.2.0",),
    "hivemind": ("hivemind==1.1.12", "setuptools<81"),
    "flower": ("flwr==1.41.0",),
    MXNET: ("mxnet==1.9.1", "numpy==1.23.5"),
}
_NEED_TORCH = ("torchft", "hivemind", "flower")


def interpreter(name: str) -> str:
    """The Python interpreter of an environment, which is made if it is not there. Raises CheckFailed, with pip's last
    line, if that fails.
    """
    if name == HERE:
        return sys.executable
    folder = platformdirs.user_cache_path("geomx") / "peers" / f"{name}-{sys.version_info[0]}.{sys.version_info[1]}"
    python, done = folder / "bin" / "python", folder / "installed.txt"
    wanted = "\n".join([*REQUIREMENTS[name], *_shared(name)])
    if not done.exists() or done.read_text() != wanted:
        print(f"installing {', '.join(REQUIREMENTS[name])} into {folder}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        _call(sys.executable, "-m", "venv", str(folder))
        _share_torch(folder, name)
        _call(str(python), "-m", "pip", "install", "--quiet", *_constraints(folder, name), *REQUIREMENTS[name])
        done.write_text(wanted)
    return str(python)


def _shared(name: str) -> list[str]:
    """What the environment takes from the interpreter that runs this."""
    return [f"torch=={version('torch')}", sysconfig.get_path("purelib")] if name in _NEED_TORCH else []


def _share_torch(folder: Path, name: str) -> None:
    """Have the environment find this interpreter's packages, after its own."""
    if name in _NEED_TORCH:
        lib = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        (lib / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")


def _constraints(folder: Path, name: str) -> list[str]:
    """Have pip fail rather than install another PyTorch."""
    if name not in _NEED_TORCH:
        return []
    file = folder / "constraints.txt"
    file.write_text(f"torch=={version('torch')}\n")
    return ["--constraint", str(file)]


def _call(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise CheckFailed(f"{' '.join(argv[1:4])} failed: {lines[-1] if lines else done.returncode}")
