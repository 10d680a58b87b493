"""MXNet, prepared and imported. The only module that imports it, and it does so when asked to."""

import importlib
import os
from typing import Any

import numpy as np

from geomx_cli.core.errors import InvalidSettings

__all__ = ["load_mxnet", "prepare_import"]

_ALIASES = {"bool": bool, "int": int, "float": float, "object": object, "complex": complex, "str": str}


def prepare_import() -> None:
    """What MXNet 1.9.1 needs before it is imported: the names that numpy 1.24 removed. And its engine gets one thread
    for our operations, which have to take Python's lock, so several would only wait for one another.
    """
    os.environ.setdefault("MXNET_CPU_PRIORITY_NTHREADS", "1")
    for name, kind in _ALIASES.items():
        if name not in vars(np):
            setattr(np, name, kind)


def load_mxnet() -> Any:
    """Import MXNet; returns the module. Raises InvalidSettings if it is not installed or cannot be imported."""
    prepare_import()
    try:
        return importlib.import_module("mxnet")
    except (ImportError, OSError, AttributeError) as error:
        raise InvalidSettings(f"cannot import mxnet: {error}", "pip install 'geomx-cli[mxnet]'") from error
