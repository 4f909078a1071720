"""Trains a run, or a sweep of runs: an application of Hydra.

  python train.py [group=option ...] [key=value ...] [resume=auto]
  python train.py -m key=value1,value2 ... [jobs=N] [task=N]

--help shows what is allowed, --hydra-help what Hydra adds to it.
"""

import hydra
from omegaconf import DictConfig

from reproduction.application import application, train
from reproduction.config import CONF_DIR


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="train")
def main(tree: DictConfig) -> float | None:
    """Trains the run of a composed tree; returns what a sweeper may choose settings by."""
    return train(tree)


if __name__ == "__main__":
    with application():
        main()
