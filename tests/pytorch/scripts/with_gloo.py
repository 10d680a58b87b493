"""Runs a script with gloo and ends the process before the interpreter shuts down: SCRIPT [ARGUMENT ...].

A thread of gloo that drops a tensor while the interpreter shuts down aborts the process (seen in 1 of 32 runs with
PyTorch 2.13), and destroy_process_group does not end these threads.
"""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
