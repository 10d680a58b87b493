"""The training device of a bundled worker."""

from typing import Any

from geomx_cli.core.errors import InvalidSettings

__all__ = ["device_context"]


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
