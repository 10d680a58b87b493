"""Prepares and imports MXNet, lazily. The only module that imports it."""

import importlib
import os
from typing import Any

import numpy as np

from geomx_cli.core.errors import InvalidSettings

__all__ = ["device_context", "load_mxnet", "prepare_import"]

# The training device of a bundled worker.


def device_context(mx: Any, device: str) -> Any:
    """Return MXNet's context for `device`: "" is the CPU, "gpuN" the only GPU visible to this process.

    Raises InvalidSettings if MXNet cannot use that GPU.
    """
    if not device:
        return mx.cpu()
    try:
        count = mx.context.num_gpus()
    except mx.base.MXNetError as error:
        raise InvalidSettings(
            f"this worker is to train on {device}, and MXNet cannot ask for it: {str(error).splitlines()[-1]}",
            "mend the driver of that machine, or write devices = [\"cpu\"] in the inventory",
        ) from None
    if not count:
        raise InvalidSettings(
            f"this worker is to train on {device}, and MXNet sees no GPU here",
            'install an MXNet that is built with CUDA there, or write devices = ["cpu"] in the inventory',
        )
    return mx.gpu(0)


_ALIASES = {"bool": bool, "int": int, "float": float, "object": object, "complex": complex, "str": str}


def prepare_import() -> None:
    """Prepare for importing MXNet 1.9.1. Restore the names that numpy 1.24 removed. Give MXNet's engine a single thread
    for geomx's operations: they hold the GIL, so several threads would only contend.
    """
    os.environ.setdefault("MXNET_CPU_PRIORITY_NTHREADS", "1")
    for name, kind in _ALIASES.items():
        if name not in vars(np):
            setattr(np, name, kind)


def load_mxnet() -> Any:
    """Import and return MXNet. Raises InvalidSettings if it is not installed or cannot be imported."""
    prepare_import()
    try:
        return importlib.import_module("mxnet")
    except (ImportError, AttributeError) as error:
        raise InvalidSettings(f"cannot import mxnet: {error}", "pip install 'geomx-cli[mxnet]'") from error
    except OSError as error:  # a system library to which it is linked
        hint = "install that library (Debian: apt install libgomp1 libquadmath0; CUDA's: see docs/how-to/sites.md)"
        raise InvalidSettings(f"cannot import mxnet: {error}", hint) from error
