"""Hydra: the script's settings, and a working folder of each worker, around DistributedDataParallel."""

import sys
from pathlib import Path

import common
import hydra
import native
import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch.nn.parallel import DistributedDataParallel


@hydra.main(version_base=None, config_path=None)
def main(config: DictConfig) -> None:
    """Train as the settings say."""
    dist.init_process_group("gloo")
    model = common.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=config.rate)
    losses = native.steps(DistributedDataParallel(model), optimizer, config.steps)
    sys.argv[1:] = [config.folder]
    common.keep({"weights": common.vector(model), "losses": np.array(losses)})
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.argv[1:] = [f"+folder={Path(sys.argv[1]).resolve()}", *sys.argv[2:]]
    main()
