"""The trained cells of the paper's tables with their printed values, and the scales of a study."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path

import yaml

CELLS = Path(__file__).with_name("cells.yaml")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell: the experiment that trains it and the printed accuracies in percent.

    `baseline` is the experiment that the cell is compared with, None if it is a baseline itself.
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

    @property
    def dataset(self) -> str:
        """The data set of the column, an option of the config group."""
        return self.column.lower().replace("-", "")


@cache
def read_cells() -> tuple[Cell, ...]:
    """Returns all 29 cells in the paper's order."""
    return tuple(Cell(**entry) for entry in yaml.safe_load(CELLS.read_text()))


Overrides = tuple[str, ...]  # of the command line of train.py

FULL = "full"
CIFAR_10, CIFAR_100, IMAGENET = "CIFAR-10", "CIFAR-100", "ImageNet-1K"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How the cells are trained at one scale; `about` describes it to users.

    `columns`: overrides by column; cells of other columns are left out.
    `stacks`: further overrides by augmentation; `a+b` applies to stacks with both.
    `dataset`: replaces the data set of the cells. `sweeps`: replaces the values of a sweep.
    `seeds`: the default number. `is_apart`: whether each run gets its own process.
    """

    about: str
    columns: Mapping[str, Overrides]
    stacks: Mapping[str, Overrides] = field(default_factory=dict)
    dataset: str | None = None
    sweeps: Mapping[str, str] = field(default_factory=dict)
    seeds: int = 3
    is_apart: bool = True

    def overrides(self, column: str, stack: Iterable[str]) -> list[str]:
        """Returns the overrides of a cell in `column` with the augmentations `stack`."""
        return [*self.columns[column], *self.stack_overrides(stack)]

    def stack_overrides(self, stack: Iterable[str]) -> list[str]:
        """Returns the entries of `stacks` that apply to the augmentations `stack`."""
        chosen = (more for key, more in self.stacks.items() if {*key.split("+")} <= {*stack})
        return [*chain.from_iterable(chosen)]


FEW_STEPS = (
    "recipe.epochs=1",
    "recipe.batch_size=8",
    "recipe.precision=float32",
    "recipe.log_every=1",
    "recipe.max_steps=4",
    "dataset.workers=0",
)
# 10 classes, 2 blocks and 64 tokens: the tau and rho of the cells mix here too, and a kappa of 20
# of 64 tokens corresponds to their 80 of 256.
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
    # Untrained models find every sample difficult and attend evenly: without `stacks` none mixes.
    "smoke": Scale(
        about="4 batches of 8 images, ViT-B/16 without pretrained weights at 32 pixels, HTM with "
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
        about="the CIFAR-100 cells with CCT-2/3x2, trained on 150 of scikit-learn's handwritten "
        "digits and tested on 360 others",
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
    """Describes all scales in one line."""
    return "; ".join(f"{name}: {scale.about}" for name, scale in SCALES.items())
