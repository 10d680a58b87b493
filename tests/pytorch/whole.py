"""The model of scripts/deep.py, trained in one process."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

sys.path.insert(1, str(Path(__file__).parent / "scripts"))

from common import batches
from deep import Deep

__all__ = ["Alone", "Deep"]


class Alone:
    """The same model in one process, on the batches of these workers together."""

    def __init__(self, steps: int) -> None:
        self.model = Deep(seed=0)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self._batches = [batches(rank, steps) for rank in range(4)]

    def step(self, ranks: tuple[int, ...], step: int, clip: float = 1e9) -> None:
        images, labels = (torch.cat([self._batches[rank][step][part] for rank in ranks]) for part in (0, 1))
        self._optimizer.zero_grad()
        torch.nn.CrossEntropyLoss()(self.model(images), labels).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self._optimizer.step()

    @property
    def checkpoint(self) -> Any:
        """The states of model and optimizer, as torch.distributed.checkpoint makes them."""
        return get_state_dict(self.model, self._optimizer)

    @property
    def vector(self) -> Any:
        """All weights."""
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().double().numpy()

    @vector.setter
    def vector(self, values: Any) -> None:
        torch.nn.utils.vector_to_parameters(torch.from_numpy(values).float(), self.model.parameters())
