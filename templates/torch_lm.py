"""Train a language model: geomx launch --algo diloco --inner-steps 30 --compress sparseloco -- python torch_lm.py

A small GPT over the characters of Jane Austen's novels, with PyTorch. Every worker runs this file with its own AdamW.
Three lines make it distributed: geomx.init, geomx.shard and geomx.wrap. A fourth one, geomx.state, saves training: a
killed worker goes on at the same batch. After --inner-steps of its steps geomx exchanges how far the weights have
moved. Without --algo and --compress it exchanges the gradients of every step.
"""

import argparse
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import geomx_cli.torch as geomx

CHARACTERS = 256  # a text is bytes
HEAD = 64


class Windows(Dataset):  # type: ignore[misc, type-arg, unused-ignore]
    """Pieces of a text: `context` characters, and for each the one that follows it."""

    def __init__(self, text: Any, context: int) -> None:
        self.text, self.context = text.long(), context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> Any:
        start = index * self.context
        piece = self.text[start : start + self.context + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):  # type: ignore[misc, unused-ignore]
    """Causal self-attention and an MLP, each added to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, state: Any) -> Any:
        batch, context, width = state.shape
        heads = self.attention(self.norm1(state)).view(batch, context, 3, width // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        state = state + self.projection(mixed.transpose(1, 2).reshape(batch, context, width))
        return state + self.mlp(self.norm2(state))


class Gpt(nn.Module):  # type: ignore[misc, unused-ignore]
    """Maps characters of shape (b, context) to scores of shape (b, context, CHARACTERS) for the next ones."""

    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(CHARACTERS, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, tensor in self.named_parameters():
            if tensor.ndim > 1:
                adds_up = name.endswith(("projection.weight", "mlp.2.weight"))
                nn.init.normal_(tensor, std=0.02 / (math.sqrt(2 * layers) if adds_up else 1))

    def forward(self, characters: Any) -> Any:
        state = self.embedding(characters) + self.positions.weight[: characters.shape[1]]
        return self.norm(self.blocks(state)) @ self.embedding.weight.T


def loss_of(model: Any, batch: Any, device: Any) -> Any:
    """The mean loss of the batch's characters, in nats."""
    characters, following = (tensor.to(device) for tensor in batch)
    return functional.cross_entropy(model(characters).flatten(0, 1), following.flatten())


def validation_loss(model: Any, loader: Any, device: Any) -> float:
    """The mean loss on text that the model was not trained on."""
    model.eval()
    with torch.no_grad():
        losses = [float(loss_of(model, batch, device)) for batch in loader]
    model.train()
    return sum(losses) / len(losses)


def sample(model: Any, context: int, length: int, device: Any) -> str:
    """Text that the model makes, character by character."""
    text = torch.tensor([[ord("\n")]], device=device)
    with torch.no_grad():
        for _ in range(length):
            scores = model(text[:, -context:])[:, -1]
            text = torch.cat([text, torch.multinomial(scores.softmax(1), 1)], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16, help="samples in the batch of each worker")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192, help=f"a multiple of {HEAD}")
    parser.add_argument("--context", type=int, default=128, help="characters that the model sees")
    parser.add_argument("--data-dir", default="", help="where the text lies, if not where geomx looks for it")
    given = parser.parse_args()

    geomx.init()
    torch.manual_seed(int(os.environ.get("GEOMX_SEED", "1")) + geomx.global_rank())  # another order in each worker
    # With devices = ["gpu0"] in the inventory each worker sees only its own GPU.
    device = torch.device("cuda" if os.environ.get("GEOMX_DEVICE") else "cpu")
    text, rest = (geomx.load_text("austen", split, given.data_dir) for split in ("train", "test"))
    data = geomx.shard(Windows(text, given.context))  # each worker's own part
    loader = DataLoader(data, batch_size=given.batch_size, shuffle=True, drop_last=True)
    test = DataLoader(Windows(rest[:20_000], given.context), batch_size=given.batch_size)
    model = Gpt(given.layers, given.width, given.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = geomx.wrap(model, optimizer)
    steps = given.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, given.lr, total_steps=steps + 1, pct_start=0.05)
    state = geomx.state(model=model, optimizer=optimizer, schedule=schedule, steps=0)  # saves them between batches
    for _ in state.epochs(given.epochs):
        for batch in state.batches(loader):
            optimizer.zero_grad()
            loss = loss_of(model, batch, device)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()  # exchanges the weights when a round is due
            schedule.step()
            geomx.report(samples=len(batch[0]), loss=loss)  # shown by geomx launch, status, dashboard and draw
            if state.steps % 100 == 0 and geomx.global_rank() == 0:
                geomx.report(validation_loss=validation_loss(model, test, device))
            state.steps += 1
    geomx.finish()  # exchanges the last steps; all workers have one model now
    if geomx.global_rank() == 0:
        geomx.report(validation_loss=validation_loss(model, test, device))
        torch.save(model.state_dict(), Path(os.environ.get("GEOMX_OUTPUT_DIR", "."), "model.pt"))  # geomx fetch
        print(sample(model, given.context, 500, device))


if __name__ == "__main__":
    main()
