"""Found by PYTHONPATH before a worker's script starts: prepares MXNet for it, and reports how it fails.

Runs in every Python process of the worker, also in those that have nothing to do with training. So it imports only
what is cheap, and hands on to the `sitecustomize` that would have run without it.
"""

import importlib.machinery
import os
import sys
from types import TracebackType


def _chain() -> None:
    """Run the next sitecustomize on the path, in the place of this one."""
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
    from geomx_cli.runtime import finder

    finder.install()
    # Only the worker's own process speaks for it; its children inherit the variable.
    if os.environ.setdefault("GEOMX_SCRIPT_PROCESS", str(os.getpid())) == str(os.getpid()):
        sys.excepthook = _excepthook


_chain()
if os.environ.get("DMLC_ROLE") == "worker" and (os.environ.get("GEOMX_JOB") or os.environ.get("DMLC_PS_ROOT_URI")):
    _prepare()
