"""A small language model trained by HF's Trainer or by Lightning's, whole or as a worker; see frameworks.py.

frameworks_script.py hf|lightning STEPS BATCH RATE RESULT [line]: BATCH of a worker. The worker of rank 0 writes the
validation loss and the seconds of training to the file RESULT. `line`: with geomx.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY, LENGTH, HELD_OUT = 64, 32, 256


def texts(count: int) -> list[dict[str, Any]]:
    """Sequences of a Markov chain, whose entropy no model can go below."""
    draw = np.random.default_rng(3)
    table = np.cumsum(draw.dirichlet(np.full(VOCABULARY, 0.1), VOCABULARY), 1)
    state, rows = draw.integers(0, VOCABULARY, count), []
    for _ in range(LENGTH):
        rows.append(state)
        state = (draw.random(count)[:, None] > table[state]).sum(1).clip(max=VOCABULARY - 1)
    tokens = torch.from_numpy(np.stack(rows, 1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def model() -> Any:
    """The same in all workers."""
    torch.manual_seed(1)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0, use_cache=False))


def hf(steps: int, batch: int, rate: float, line: bool) -> float:
    """The validation loss after training with HF's Trainer."""
    from transformers import Trainer, TrainingArguments

    callbacks = []
    if line:
        import geomx_cli.torch as geomx

        callbacks = [geomx.hf.Callback()]
    args = TrainingArguments(
        output_dir="trainer", per_device_train_batch_size=batch, max_steps=steps, learning_rate=rate,
        lr_scheduler_type="cosine", warmup_steps=steps // 20, logging_steps=steps // 4, save_strategy="no",
        use_cpu=True, report_to=[], disable_tqdm=True, per_device_eval_batch_size=HELD_OUT, max_grad_norm=1.0,
        average_tokens_across_devices=False,
    )  # fmt: skip
    data = texts(steps * batch * args.world_size + HELD_OUT)
    trainer = Trainer(model(), args, train_dataset=data[HELD_OUT:], eval_dataset=data[:HELD_OUT], callbacks=callbacks)
    trainer.train()
    return float(trainer.evaluate()["eval_loss"])


def lightning(steps: int, batch: int, rate: float, line: bool) -> float:
    """The validation loss after training with Lightning."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = model()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.model(**batch).loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=rate, weight_decay=0.0)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, 0.05)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    options: dict[str, Any] = {}
    if line:
        import geomx_cli.torch as geomx

        options = {"strategy": geomx.lightning.Strategy()}
    data = texts(steps * batch * int(os.environ.get("WORLD_SIZE", "1")) + HELD_OUT)
    trainer = Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        gradient_clip_val=1.0, log_every_n_steps=steps // 4, num_sanity_val_steps=0, **options,
    )  # fmt: skip
    loaders = [torch.utils.data.DataLoader(part, batch_size=size, shuffle=shuffles) for part, size, shuffles in
               ((data[HELD_OUT:], batch, True), (data[:HELD_OUT], HELD_OUT, False))]  # fmt: skip
    trainer.fit(Module(), *loaders)
    return float(trainer.callback_metrics["val_loss"])


def main() -> None:
    """Train, and write the result."""
    torch.set_num_threads(1)
    name, steps, batch, rate, result, *words = sys.argv[1:]
    began = time.monotonic()
    loss = {"hf": hf, "lightning": lightning}[name](int(steps), int(batch), float(rate), "line" in words)
    if os.environ.get("RANK", "0") == "0":
        Path(result).write_text(json.dumps({"loss": loss, "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    main()
