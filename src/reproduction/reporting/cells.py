"""The cells of the paper's tables that were trained, as printed, and the scales to train them at.

Imports nothing heavy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml

CELLS = Path(__file__).with_name("cells.yaml")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell: the experiment that trains it here and the printed accuracy in percent (and ms).

    `baseline` is the experiment that it is compared with; None for a baseline.
    """

    experiment: str
    row: str
    column: str
    baseline: str | None
    top1: float
    top5: float | None = None
    latency_ms: float | None = None

    @property
    def table(self) -> int:
        return int(self.experiment.partition("/")[0].removeprefix("table"))


@cache
def read_cells() -> tuple[Cell, ...]:
    """All 29 cells in the paper's order."""
    return tuple(Cell(**entry) for entry in yaml.safe_load(CELLS.read_text()))


Overrides = tuple[str, ...]  # of train.py's command line

FULL = "full"
CIFAR_10, CIFAR_100, IMAGENET = "CIFAR-10", "CIFAR-100", "ImageNet-1K"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How a cell is trained at a scale; `about` tells people.

    `columns`: overrides by the column of the cell; cells of other columns do not exist.
    `stacks`: further ones where the cell's stack has an augmentation, or all of some joined by +.
    `dataset`: an option in place of the cells' own. `sweeps`: values in place of the paper's size.
    `is_apart`: each run has a process of its own. `seeds`: how many, unless told.
    """

    about: str
    columns: Mapping[str, Overrides]
    stacks: Mapping[str, Overrides] = field(default_factory=dict)
    dataset: str | None = None
    sweeps: Mapping[str, str] = field(default_factory=dict)
    seeds: int = 3
    is_apart: bool = True

    def overrides(self, column: str, stack: set[str]) -> list[str]:
        """What this scale changes in a cell."""
        fitting = (own for key, own in self.stacks.items() if set(key.split("+")) <= stack)
        return [*self.columns[column], *(override for own in fitting for override in own)]


FEW_STEPS = (
    "recipe.epochs=2",
    "recipe.batch_size=8",
    "recipe.precision=float32",
    "recipe.log_every=1",
    "dataset.limit=16",
    "dataset.workers=0",
)
# 10 classes, 2 blocks and 64 tokens: tau and rho of the cells mix here too; 20 of 64 tokens are
# the cells' 80 of 256.
DIGITS = ("model=cct_2_3x2", "recipe=quickstart", "recipe.epochs=24", "dataset.limit=150")

SCALES: Mapping[str, Scale] = {
    FULL: Scale(
        about="the paper's experiments",
        columns=dict.fromkeys((CIFAR_10, CIFAR_100, IMAGENET), ()),
    ),
    "short": Scale(
        about="a tenth of the epochs",
        columns={
            CIFAR_10: ("recipe.epochs=151",),
            CIFAR_100: ("recipe.epochs=151",),
            IMAGENET: ("recipe.epochs=3",),
        },
    ),
    # untrained models find every sample difficult and attend evenly: without `stacks` none mixes
    "smoke": Scale(
        about="4 batches of 8 images, ViT-B/16 without pretrained weights on 32 pixels, HTM with "
        "tau=inf and rho=0",
        columns={
            CIFAR_10: FEW_STEPS,
            CIFAR_100: FEW_STEPS,
            IMAGENET: (*FEW_STEPS, "model.image_size=32", "model.pretrained=null"),
        },
        stacks={"htm": ("augmentation.htm.tau=inf", "augmentation.htm.rho=0")},
        seeds=1,
        is_apart=False,
    ),
    "digits": Scale(
        about="the cells of CIFAR-100 by CCT-2/3x2 on 150 of scikit-learn's handwritten digits, "
        "tested on 360 others",
        columns={CIFAR_100: DIGITS},
        stacks={
            "manifold_mixup": ("augmentation.manifold_mixup.layers=[0,1]",),
            "htm": ("augmentation.htm.layer=1",),
            "vtm": ("augmentation.vtm.layer=1", "augmentation.vtm.kappa=20"),
            "htm+vtm": ("augmentation.vtm.kappa=3",),
        },
        dataset="digits",
        sweeps={"sweep-kappa": "1 3 5 10 20 40 64"},
        seeds=5,
        is_apart=False,
    ),
}


def about() -> str:
    """All scales in one line."""
    return "; ".join(f"{name}: {scale.about}" for name, scale in SCALES.items())
