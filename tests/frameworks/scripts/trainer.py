"""HF Trainer: accumulation, a schedule, clipping, evaluation with a metric, checkpoints. With `line` its callback."""

import sys
from pathlib import Path
from typing import Any

import common
import numpy as np
from transformers import Trainer, TrainingArguments


def accuracy(found: Any) -> dict[str, float]:
    """Of the next token."""
    predicted, labels = found.predictions[:, :-1].argmax(-1), found.label_ids[:, 1:]
    return {"accuracy": float((predicted == labels).mean())}


def train(folder: Path, model: Any, callbacks: list[Any], resume: str = "", **changes: Any) -> dict[str, Any]:
    """Return the weights, the log values and what the evaluation after training says."""
    options = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2, "optim": "sgd",
        "learning_rate": 0.5, "lr_scheduler_type": "linear", "warmup_steps": 2, "logging_steps": 2,
        "eval_strategy": "steps", "eval_steps": 4, "save_steps": 4, "max_grad_norm": 1.0, "use_cpu": True,
        "report_to": [], "seed": 7, "disable_tqdm": True, "per_device_eval_batch_size": 4,
    }  # fmt: skip
    common.slow(model)
    trainer = Trainer(
        model=model, args=TrainingArguments(output_dir=str(folder), **{**options, **changes}),
        train_dataset=common.texts(34), eval_dataset=common.texts(14, 2), compute_metrics=accuracy, callbacks=callbacks,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume or None)
    last = trainer.evaluate()
    logs = [[entry["step"], entry.get("loss", entry.get("eval_loss", np.nan))] for entry in trainer.state.log_history]
    trainer.save_model(str(folder / "last"))
    return {
        "weights": common.vector(model), "logs": np.array(logs), "accuracy": np.array(last["eval_accuracy"]),
        "steps": np.array(trainer.state.global_step),
    }  # fmt: skip


def callbacks() -> list[Any]:
    """The line."""
    if "line" not in sys.argv:
        return []
    import geomx_cli.torch as geomx

    return [geomx.hf.Callback()]


def changes() -> dict[str, Any]:
    """Of TrainingArguments, and `resume`, by NAME=VALUE."""
    named = dict(word.split("=", 1) for word in sys.argv[2:] if "=" in word)
    return {name: text if text[:1].isalpha() or "/" in text else float(text) for name, text in named.items()}


if __name__ == "__main__":
    common.keep(train(Path(sys.argv[1]) / "trainer", common.language_model(), callbacks(), **changes()))
