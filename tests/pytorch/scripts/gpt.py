"""A character-level GPT, in the way of public examples: one process, or several under torchrun."""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TEXT = "the quick brown fox jumps over the lazy dog. " * 60
block_size, n_embd, n_head, n_layer = 16, 32, 2, 2


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.register_buffer("mask", torch.tril(torch.ones(block_size, block_size)).bool(), persistent=False)

    def forward(self, x):
        batch, time, channels = x.shape
        heads = (part.view(batch, time, n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(n_embd, dim=2))
        q, k, v = heads
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = att.masked_fill(~self.mask[:time, :time], float("-inf")).softmax(-1)
        return self.c_proj((att @ v).transpose(1, 2).reshape(batch, time, channels))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd), CausalSelfAttention()
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks, self.ln_f = nn.Sequential(*(Block() for _ in range(n_layer))), nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight  # weight tying

    def forward(self, idx, targets):
        x = self.ln_f(self.blocks(self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))))
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-iters", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--output", default="ckpt.pt")
    args = parser.parse_args()
    ddp = int(os.environ.get("RANK", "-1")) != -1
    seed_offset = 0
    if ddp:
        dist.init_process_group("gloo")
        seed_offset = dist.get_rank()
    torch.manual_seed(1337)
    chars = sorted(set(TEXT))
    data = torch.tensor([chars.index(each) for each in TEXT])
    model = raw_model = GPT(len(chars))
    decay = [each for each in model.parameters() if each.dim() >= 2]
    others = [each for each in model.parameters() if each.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95))
    if ddp:
        model = DistributedDataParallel(model)
    torch.manual_seed(1337 + seed_offset)

    def get_batch():
        ix = torch.randint(len(data) - block_size, (8,))
        pairs = [(data[i : i + block_size], data[i + 1 : i + 1 + block_size]) for i in ix]
        return (torch.stack(each) for each in zip(*pairs, strict=True))

    loss = torch.zeros(())
    for it in range(args.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * 0.5 * (1 + math.cos(math.pi * it / args.max_iters))
        for micro_step in range(args.gradient_accumulation_steps):
            if ddp:
                model.require_backward_grad_sync = micro_step == args.gradient_accumulation_steps - 1
            x, y = get_batch()
            with torch.autocast("cpu", torch.bfloat16, enabled=args.amp):
                _, loss = model(x, y)
                loss = loss / args.gradient_accumulation_steps
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if seed_offset == 0:
        print(f"loss {loss.item() * args.gradient_accumulation_steps:.4f}")
        torch.save({"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}, args.output)
    if ddp:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
