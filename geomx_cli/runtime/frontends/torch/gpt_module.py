"""The module of the network `gpt`. Its parameters have the order of training/gpt.py."""

from typing import Any

from torch import nn
from torch.nn import functional

from geomx_cli.runtime.training.architecture import HEAD

__all__ = ["Gpt"]


class Gpt(nn.Module):  # type: ignore[misc, unused-ignore]
    """Maps characters of shape (b, 1, 1, context), as numbers of any dtype, to scores of shape (b, classes, context)
    for the next ones.
    """

    def __init__(self, classes: int, context: int, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, characters: Any) -> Any:
        """See the class."""
        state = self.embedding(characters.flatten(1).long()) + self.positions.weight
        for block in self.blocks:
            state = block(state)
        return functional.linear(self.norm(state), self.embedding.weight).transpose(1, 2)


class _Block(nn.Module):  # type: ignore[misc, unused-ignore]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.dense1, self.dense2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, state: Any) -> Any:
        batch, context, width = state.shape
        heads = self.attention(self.norm1(state)).view(batch, context, 3, width // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        state = state + self.projection(mixed.transpose(1, 2).reshape(batch, context, width))
        return state + self.dense2(functional.gelu(self.dense1(self.norm2(state)), approximate="tanh"))
