"""How the workers of a party's process group find each other: a store, gloo, and the party's own network."""

import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
from torch import distributed
from torch._C._distributed_c10d import TCPStore

from geomx_cli.contract import addresses

if TYPE_CHECKING:
    from geomx_cli.contract.settings import Settings

__all__ = ["FOREVER", "gloo_of", "interface_of", "own_address", "store_of"]

FOREVER = timedelta(days=30)
"""Limit on waits for the leader. The leader's own waits for servers have limits."""


def store_of(settings: "Settings", limit: timedelta, *, leads: bool) -> Any:
    """The store in which the workers find each other's addresses. Rank 0 listens, only at the planned address."""
    if settings.group_size == 1:
        return distributed.HashStore()
    host, port = _place(settings.rendezvous[0])
    listener = None
    if leads:
        own = _place(settings.rendezvous[-1])
        family = socket.AF_INET6 if ":" in own[0] else socket.AF_INET
        listener = socket.create_server(own, family=family, backlog=1024, dualstack_ipv6=own[0] == "::").detach()
    return TCPStore(  # PyTorch's own: geomx replaces torch.distributed.TCPStore in scripts for torchrun
        host, port, settings.group_size, is_master=leads, timeout=limit, wait_for_workers=False,
        master_listen_fd=listener,
    )  # fmt: skip


def gloo_of(store: Any, settings: "Settings", rank: int, size: int) -> Any:
    """The group for CPUs. It listens at this host's address in the party's network, on ports that the kernel chooses.
    """
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = FOREVER
    options._devices = [gloo.create_device(hostname=own_address(settings))]
    return gloo(distributed.PrefixStore("gloo", store), rank, size, options)


def own_address(settings: "Settings") -> str:
    """This host's IP address in the network over which it reaches the first worker of the party."""
    if settings.group_size == 1:
        return "127.0.0.1"
    return addresses.facing(*_place(settings.rendezvous[0]))


def interface_of(address: str) -> str:
    """The name of the network interface that has this address; "" if none has it."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return ""


def _place(endpoint: str) -> tuple[str, int]:
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return address.strip("[]"), int(port)
