"""Loaded through PYTHONPATH before a worker's script: prepares its framework and reports its failure.

Runs in every Python process of the worker, including those unrelated to training. So its imports are cheap, and it
runs the `sitecustomize` that it shadows.
"""

import importlib.machinery
import os
import sys
from types import TracebackType


def _chain() -> None:
    """Run the next sitecustomize on the path, which this one shadows."""
    own = os.path.realpath(os.path.dirname(__file__))  # noqa: PTH120
    others = [path for path in sys.path if os.path.realpath(path) != own]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        spec.loader.exec_module(module_from_spec(spec))


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    from geomx_cli.runtime import script

    script.session().abort(error)


def _prepare() -> None:
    from geomx_cli.runtime.frontends import finder

    finder.install()
    # Only the worker's own process reports; its children inherit the variable.
    if os.environ.setdefault("GEOMX_SCRIPT_PROCESS", str(os.getpid())) == str(os.getpid()):
        sys.excepthook = _excepthook


_chain()
if os.environ.get("DMLC_ROLE") == "worker" and (os.environ.get("GEOMX_JOB") or os.environ.get("DMLC_PS_ROOT_URI")):
    _prepare()
