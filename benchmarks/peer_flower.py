"""Flower in peers.py: rounds of FedAvg. argv: "server" ADDRESS CLIENTS LIST, or "client" ADDRESS RANK LIST.

A round sends the model to all clients, which train nothing and send theirs, and ends with the mean. Server and clients
speak gRPC in both directions on one connection (`start_server`), without the polling of flower-superlink.
"""

import contextlib
import logging
import socket
import sys
import time
from typing import Any

import numpy as np
from flwr.client import NumPyClient
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.client.app import start_client
from flwr.compat.server.app import start_server
from flwr.server import ServerConfig
from flwr.server.strategy import FedAvg
from peer_measure import Turn
from tensors import LISTS

ROUNDS = 1000
LIMIT = 60.0


class Rounds(FedAvg):  # type: ignore[misc, unused-ignore]
    """FedAvg with all clients, whose rounds begin when peers.py says so."""

    def __init__(self, clients: int, sizes: list[int]) -> None:
        first = ndarrays_to_parameters([np.zeros(size, np.float32) for size in sizes])
        super().__init__(
            fraction_evaluate=0.0, min_fit_clients=clients, min_available_clients=clients, initial_parameters=first
        )
        self._clients = clients
        self._turn: Turn | None = None

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        client_manager.wait_for(self._clients)
        self._turn = Turn.wait()
        if self._turn is None:
            sys.exit()
        return super().configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        found = super().aggregate_fit(server_round, results, failures)
        assert self._turn is not None
        self._turn.end()
        means = parameters_to_ndarrays(found[0])
        if failures or any((mean != (self._clients + 1) / 2).any() for mean in means):
            raise AssertionError(f"a wrong result, or failures: {failures}")
        self._turn.report()
        return found


class Client(NumPyClient):  # type: ignore[misc, unused-ignore]
    """Returns arrays of its rank + 1."""

    def __init__(self, rank: int, sizes: list[int]) -> None:
        self._arrays = [np.full(size, rank + 1, np.float32) for size in sizes]

    def fit(self, parameters: Any, config: Any) -> Any:
        return self._arrays, 1, {}


def main(role: str, address: str, number: int, name: str) -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    if role == "server":
        start_server(
            server_address=address, config=ServerConfig(num_rounds=ROUNDS), strategy=Rounds(number, LISTS[name])
        )
        return
    await_server(address)
    start_client(server_address=address, client=Client(number, LISTS[name]).to_client())


def await_server(address: str) -> None:
    """Return when the server listens: a client does not try twice."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
