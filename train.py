"""Trains a run, or a sweep of runs: an application of Hydra. --help shows how."""

import hydra
from omegaconf import DictConfig

from reproduction.application import application, train
from reproduction.config import CONF_DIR


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="train")
def main(tree: DictConfig) -> float | None:
    """Trains one run."""
    return train(tree)


if __name__ == "__main__":
    with application():
        main()
