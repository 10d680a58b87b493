"""Several of these scripts in one process: importing the frameworks takes most of the time.

all.py FOLDER gradients|weights [line]: with `gradients` clipping is by the mean gradient, which only algorithms that
exchange gradients have.
"""

import sys
from pathlib import Path

import accelerated
import adapters
import common
import lit
import trainer
from accelerate.state import AcceleratorState


def main() -> None:
    """Keep everything."""
    folder, mode, line = Path(sys.argv[1]), sys.argv[2], "line" in sys.argv
    clip = 1.0 if mode == "gradients" else 0.0
    own = common.language_model()
    found = {"trainer": trainer.train(folder / "trainer", own, trainer.callbacks(), max_grad_norm=clip)}
    if mode == "gradients":
        found["adapters"] = adapters.train(folder / "adapters", trainer.callbacks())
    AcceleratorState._reset_state()  # another precision than the Trainer's
    found["accelerated"] = accelerated.train(line=line, clip=clip)
    found["lit"] = lit.train(folder / "lit", line=False, gradient_clip_val=clip)
    kept = {f"{name}/{key}": value for name, each in found.items() for key, value in each.items()}
    common.keep(kept)


if __name__ == "__main__":
    main()
