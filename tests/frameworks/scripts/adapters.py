"""PEFT: LoRA in a Trainer; frozen weights are not exchanged."""

import sys
from pathlib import Path
from typing import Any

import common
import trainer
from peft import LoraConfig, get_peft_model


def train(folder: Path, callbacks: list[Any]) -> dict[str, Any]:
    """See trainer.train; of the adapters, whose initial values are drawn."""
    config = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["c_attn"], fan_in_fan_out=True)
    return trainer.train(folder, get_peft_model(common.language_model(), config), callbacks)


if __name__ == "__main__":
    common.keep(train(Path(sys.argv[1]) / "run", trainer.callbacks()))
