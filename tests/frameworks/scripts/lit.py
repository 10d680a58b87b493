"""Lightning: validation, a checkpoint, accumulation, clipping; or two optimizers. With `line` its strategy."""

import os
import sys
from pathlib import Path
from typing import Any

import common
import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


class Module(lightning.LightningModule):
    """A classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.model = common.mlp()
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.log("train_loss", loss)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Adversaries(Module):
    """A classifier of which a part learns to deceive the rest: manual optimization, with two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.noise = torch.nn.Linear(8, 8)

    def training_step(self, batch: Any, index: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            loss = torch.nn.functional.cross_entropy(self.model(batch[0] + 0.1 * self.noise(batch[0])), batch[1])
            self.losses.append(float(loss.detach()))
            optimizer.zero_grad()
            self.manual_backward(-loss if number else loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("train_loss", loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.model, self.noise)]


def train(
    folder: Path, *, line: bool, resume: str = "", strategy: str = "ddp", **changes: Any
) -> dict[str, Any]:
    """Return the weights, this worker's losses and the last validation loss."""
    adversaries = "adversaries" in sys.argv
    if adversaries:
        strategy += "_find_unused_parameters_true"
        changes = {"accumulate_grad_batches": 1, "gradient_clip_val": None, **changes}
    if line:
        import geomx_cli.torch as geomx

        where: dict[str, Any] = {"strategy": geomx.lightning.Strategy()}
    else:
        sizes = {"devices": int(os.environ["LOCAL_WORLD_SIZE"]), "num_nodes": int(os.environ["GROUP_WORLD_SIZE"])}
        where = {"strategy": strategy, **sizes}
    lightning.seed_everything(9, verbose=False)
    checkpoint = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "log_every_n_steps": 2}
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[checkpoint],
        **where, **{**options, **changes},
    )  # fmt: skip
    module = Adversaries() if adversaries else Module()
    common.slow(module.model)
    loader = torch.utils.data.DataLoader(common.points(36), batch_size=4, shuffle=True)
    trainer.fit(module, loader, torch.utils.data.DataLoader(common.points(16), batch_size=4), ckpt_path=resume or None)
    return {
        "weights": common.vector(module), "losses": np.array(module.losses), "steps": np.array(trainer.global_step),
        "validation": np.array(float(trainer.callback_metrics["val_loss"])),
    }  # fmt: skip


if __name__ == "__main__":
    clip = {"gradient_clip_val": 0.0} if "noclip" in sys.argv else {}
    resume = next((word.removeprefix("resume=") for word in sys.argv if word.startswith("resume=")), "")
    epochs = {"max_epochs": -1} if "endless" in sys.argv else {}
    common.keep(train(Path(sys.argv[1]) / "lit", line="line" in sys.argv, resume=resume, **clip, **epochs))
