"""A model of which some tensors are divided unevenly, and one has fewer rows than a party has workers."""

from typing import Any

import torch
from common import CLASSES, FEATURES


class Deep(torch.nn.Module):
    """Two dense layers of 9 and CLASSES outputs, with a scale between them and a buffer that is not trained."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(FEATURES, 9)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.last = torch.nn.Linear(9, CLASSES)
        self.register_buffer("shift", torch.rand(3))

    def forward(self, images: Any) -> Any:
        return self.last(torch.tanh(self.first(images)) * self.scale)
