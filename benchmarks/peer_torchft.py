"""One rank of torchft in peers.py. argv: "local-sgd" or "diloco", then LIST.

A party is a replica group whose ranks each hold a share of the parameters, as with FSDP in a party: so the model
crosses each link once in each direction. That the ranks of a party would then have to gather the whole model is not in
the time. Takes LOCAL_RANK, PARTY (a number), PARTIES, SITE_ADDRESS, STORE_PORT and LIGHTHOUSE (an URL).
"""

import os
import sys
from datetime import timedelta
from typing import Any

import torch
from peer_measure import follow
from peer_model import Payload, check_all
from tensors import LISTS
from torch.distributed import TCPStore
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

RANKS = 2
LIMIT = timedelta(seconds=120)


def share(sizes: list[int], rank: int) -> list[int]:
    """The tensors of one rank of a party: each goes to the one that has fewer elements so far."""
    shares: list[list[int]] = [[] for _ in range(RANKS)]
    for size in sorted(sizes, reverse=True):
        min(shares, key=sum).append(size)
    return shares[rank]


def main(mode: str, name: str) -> None:
    rank, party, parties = (int(os.environ[key]) for key in ("LOCAL_RANK", "PARTY", "PARTIES"))
    address, port = os.environ["SITE_ADDRESS"], int(os.environ["STORE_PORT"])
    store = TCPStore(address, port, is_master=rank == 0, wait_for_workers=False)
    payload = Payload(share(LISTS[name], rank), party + 1.0)
    optimizer = torch.optim.SGD(payload.parameters(), lr=1.0)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT), load_state_dict=payload.load_state_dict, state_dict=payload.state_dict,
        min_replica_size=parties, use_async_quorum=False, init_sync=False, rank=rank, world_size=RANKS, timeout=LIMIT,
        quorum_timeout=LIMIT, connect_timeout=LIMIT, store_addr=address, store_port=port, hostname=address,
        lighthouse_addr=os.environ["LIGHTHOUSE"], replica_id=f"party{party}",
    )  # fmt: skip
    with _algorithm(mode, manager, payload, optimizer):
        follow(
            optimizer.step,
            lambda done: check_all(list(payload.tensors), -done * (parties + 1) / 2, 1e-3),
            payload.set_gradients,
        )
    manager.shutdown(wait=False)
    del store


def _algorithm(mode: str, manager: Any, payload: Payload, optimizer: Any) -> Any:
    if mode == "local-sgd":
        return LocalSGD(manager, payload, optimizer, sync_every=1)
    outer = torch.optim.SGD(payload.parameters(), lr=1.0)
    # Not use_bucketization: with more than one bucket, torchft 0.2.0 copies back only the last one.
    return DiLoCo(manager, [payload], optimizer, outer, sync_every=1)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    main(*sys.argv[1:])
