"""Train one model over several data centres joined by slow, unreliable wide-area links."""

import sys
from pathlib import Path

__version__ = "0.1.0"


def _drop_working_directory() -> None:
    """Remove the working directory from sys.path under `python -m geomx_cli...`, so that files in it cannot shadow
    standard modules. It stays if geomx itself is imported from there.
    """
    runs_geomx = sys.argv[:1] == ["-m"] and any(
        (option, name.partition(".")[0]) == ("-m", "geomx_cli")
        for option, name in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    )
    if runs_geomx and not sys.flags.safe_path and sys.path[0] != str(Path(__file__).parents[1]):
        del sys.path[0]


_drop_working_directory()  # must run before any other import
