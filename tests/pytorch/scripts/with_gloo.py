"""Runs a script with gloo and ends the process before the interpreter shuts down: SCRIPT [ARGUMENT ...].

A thread of gloo that drops a tensor while the interpreter shuts down aborts the process (seen in 1 of 32 runs with
PyTorch 2.13), and destroy_process_group does not end these threads.

The destructor of a wrapped model joins such a thread while it holds the interpreter's lock, for which the thread may
wait (8 of 300 runs). So wrapped models are kept until the process ends.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    kept: list[DistributedDataParallel] = []
    usual = DistributedDataParallel.__init__

    def keep(self: DistributedDataParallel, *arguments: Any, **options: Any) -> None:
        kept.append(self)
        usual(self, *arguments, **options)

    DistributedDataParallel.__init__ = keep  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
