"""`python -m geomx_cli.agent VERB DIRECTORY`: start, attach to, stop or inspect the agent of one host and job."""

import importlib
import os
import sys
from pathlib import Path

from geomx_cli.core.errors import GeomxError
from geomx_cli.core.files import require_private

# verb -> (module, function(directory, further arguments) -> exit status); imported on use
_VERBS = {
    "run": ("relay", "run"),
    "attach": ("relay", "attach"),
    "clean-up": ("stop", "clean_up_main"),
    "stop": ("stop", "main"),
    "step": ("job_step", "serve"),
    "in-step": ("job_step", "run_in"),
    "tail": ("tail", "main"),
    "files": ("streams", "main"),
    "prune": ("prune", "main"),
    "checkpoints": ("checkpoint", "main"),
    "checkpoint": ("relay", "checkpoint"),
    "upload": ("stored", "upload"),
    "publish": ("stored", "publish"),
    "fetch": ("stored", "fetch"),
}
# These take a name in place of a directory.
_NAMED = {"step", "in-step"}
# Threads of a store's client may hang, and Python would wait for them at its end.
_STORES = {"upload", "publish", "fetch"}


def main(argv: list[str]) -> int:
    """Run a verb and return the exit status."""
    if len(argv) < 2 or argv[0] not in _VERBS:
        print(f"usage: python -m geomx_cli.agent {'|'.join(_VERBS)} DIRECTORY [...]", file=sys.stderr)
        return 2
    module, function = _VERBS[argv[0]]
    try:
        if argv[0] not in _NAMED and Path(argv[1]).is_dir():
            require_private(Path(argv[1]))
        do = getattr(importlib.import_module(f"geomx_cli.agent.{module}"), function)
        return int(do(Path(argv[1]), argv[2:]))
    except (OSError, GeomxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    exit_status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if _STORES.intersection(sys.argv[1:2]):
        os._exit(exit_status)
    sys.exit(exit_status)
