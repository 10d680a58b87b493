"""What a worker of the bundled job trains on."""

from typing import Any

from geomx_cli.core.errors import InvalidSettings

__all__ = ["device_context"]


def device_context(mx: Any, device: str) -> Any:
    """MXNet's context for `device`: "" is the processor, and "gpuN" the only GPU that this process is shown.

    Raises InvalidSettings when MXNet cannot use that GPU.
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
