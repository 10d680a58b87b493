"""Flower in recovery_peers.py: rounds of FedAvg. argv: "server" or the client's RANK, and the server's address.

Clients keep nothing between rounds. The server sends the number of the round, from which they compute their learning
rate and their place in the data.
"""

import logging
import sys
from typing import Any

import torch
from flwr.client import NumPyClient
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.client.app import start_client
from flwr.compat.server.app import start_server
from flwr.server import ServerConfig
from flwr.server.strategy import FedAvg
from peer_flower import await_server
from recovery_task import MOMENTUM, RATE, ROUND, WORKERS, Worker, decay, network
from torch.nn import functional


class Rounds(FedAvg):  # type: ignore[misc, unused-ignore]
    """FedAvg that remembers the newest model. Each round waits until all clients are there, which is the default."""

    def __init__(self) -> None:
        self.newest = [item.detach().numpy() for item in network().parameters()]
        super().__init__(
            fraction_evaluate=0.0, min_fit_clients=WORKERS, min_available_clients=WORKERS,
            initial_parameters=ndarrays_to_parameters(self.newest),
            on_fit_config_fn=lambda number: {"round": number - 1},  # recovery
        )  # fmt: skip

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        found = super().aggregate_fit(server_round, results, failures)
        if found[0] is not None:
            self.newest = parameters_to_ndarrays(found[0])
        return found


class Client(NumPyClient):  # type: ignore[misc, unused-ignore]
    """Trains ROUND steps in a round."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._model, self._sent = worker, network(), False

    def fit(self, parameters: Any, config: Any) -> Any:
        self.keep()
        for mine, array in zip(self._model.parameters(), parameters, strict=True):
            mine.data = torch.tensor(array)
        optimizer = torch.optim.SGD(self._model.parameters(), lr=RATE, momentum=MOMENTUM)
        # recovery: begin
        first = config["round"] * ROUND
        for step in range(first, first + ROUND):
            rate = RATE * decay(step)
            # recovery: end
            optimizer.param_groups[0]["lr"] = rate
            chosen, images, labels = self._worker.batch(step)
            optimizer.zero_grad()
            functional.cross_entropy(self._model(torch.from_numpy(images)), torch.from_numpy(labels)).backward()
            optimizer.step()
            self._worker.done(step, rate, chosen)
        self._sent = True
        return [item.detach().numpy() for item in self._model.parameters()], 1, {}

    def keep(self) -> None:
        """The server has what was sent before."""
        if self._sent:
            self._worker.keep()


def main(role: str, address: str) -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    if role != "server":
        client = Client(Worker(int(role)))
        await_server(address)
        start_client(server_address=address, client=client.to_client())
        client.keep()
        return
    strategy, worker = Rounds(), Worker(WORKERS)
    config = ServerConfig(num_rounds=worker.steps // ROUND)
    start_server(server_address=address, config=config, strategy=strategy)
    for worker.rank in range(WORKERS):
        worker.end(strategy.newest)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
