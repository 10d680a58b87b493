"""A Trainer of HF or Lightning whose workers kill themselves: RANK:LIFE:BATCH for each, of that life."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import common
import lightning
import numpy as np
import torch
from transformers import Trainer, TrainingArguments

import geomx_cli.torch as geomx


class Noisy(torch.utils.data.Dataset):
    """Points with noise of their own each time, and their indices."""

    def __init__(self, count: int) -> None:
        self._points = common.points(count)

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs, label = self._points[index]
        return {"inputs": inputs + 0.1 * torch.randn(8), "labels": label, "index": torch.tensor(index)}


class Model(torch.nn.Module):
    """A classifier with dropout and running statistics, that writes down each batch, in a file that it survives."""

    def __init__(self) -> None:
        super().__init__()
        layers = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 4)
        self.layers = torch.nn.Sequential(*layers)
        self._batches = 0

    def forward(self, inputs: Any, labels: Any, index: Any) -> dict[str, Any]:
        loss = torch.nn.functional.cross_entropy(self.layers(inputs), labels)
        if self.training:
            self._batches += 1
            with written().open("a") as file:
                file.write(f"{index.tolist()} {loss.item().hex()}\n")
            life = os.environ.get("GEOMX_INCARNATION", "0")
            if f"{os.environ['RANK']}:{life}:{self._batches}" in sys.argv:
                os.kill(os.getpid(), signal.SIGKILL)
        return {"loss": loss}


def written() -> Path:
    """The file of this worker's batches."""
    return Path(sys.argv[1]) / f"{os.environ['RANK']}.txt"


def trainer(folder: Path, model: Model) -> dict[str, Any]:
    """HF's, with accumulation, a schedule, evaluation and checkpoints."""
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=2,
        learning_rate=0.05, warmup_steps=2, logging_steps=3, eval_strategy="steps", eval_steps=4, save_steps=4,
        use_cpu=True, report_to=[], seed=7, disable_tqdm=True, remove_unused_columns=False, logging_first_step=True,
    )  # fmt: skip
    made = Trainer(
        model=model, args=arguments, train_dataset=Noisy(34), eval_dataset=Noisy(8), callbacks=[geomx.hf.Callback()]
    )
    loss = made.train().training_loss
    names = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    logs = [[entry.get(name, -1.0) for name in names] for entry in made.state.log_history]
    return {"logs": np.array(logs), "losses": np.array([loss, made.evaluate()["eval_loss"]])}


class Module(lightning.LightningModule):
    """The model in Lightning."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.model(**batch)["loss"]
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.model(**batch)["loss"], sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = {"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 8), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def lit(folder: Path, model: Model) -> dict[str, Any]:
    """Lightning's, with accumulation, a schedule, validation within epochs and checkpoints."""
    lightning.seed_everything(9, verbose=False)
    checkpoint = lightning.pytorch.callbacks.ModelCheckpoint(folder, monitor="val_loss")
    made = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[checkpoint],
        strategy=geomx.lightning.Strategy(), max_epochs=2, accumulate_grad_batches=2, val_check_interval=0.5,
    )  # fmt: skip
    # An odd number of samples, of which one is drawn twice: each worker has 18. BatchNorm refuses a batch of one.
    loaders = [torch.utils.data.DataLoader(Noisy(count), batch_size=2, shuffle=count > 8) for count in (35, 8)]
    made.fit(Module(model), *loaders)
    found = [float(made.callback_metrics[name]) for name in ("loss_epoch", "val_loss")]
    rate = made.optimizers[0].param_groups[0]["lr"]
    return {"losses": np.array([*found, float(checkpoint.best_model_score)]), "rate": np.array(rate)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(1)
    written().parent.mkdir(parents=True, exist_ok=True)
    own = Model()
    ways = {"trainer": trainer, "lit": lit}
    results = ways[sys.argv[2]](Path(sys.argv[1]) / "saved", own)
    state = torch.cat([tensor.float().reshape(-1) for tensor in own.state_dict().values()]).numpy()
    common.keep({**results, "state": state, "batches": np.unique(written().read_text().splitlines())})
