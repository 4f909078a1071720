"""The check of points before any of them starts, the same for a dry run and for training.

Models are built on the meta device, without memory. What only this machine lacks, a GPU, images
or a module, ends training in a line; a dry run goes on without it and says so.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hydra.core.utils import env_override

from reproduction.compose import Point
from reproduction.config import SOURCES, Config, Dataset, ViT, check_new
from reproduction.folder import find
from reproduction.identity import row_hash
from reproduction.system import UserError, is_first_rank, warn

CLASSES = 10  # of a model whose images are not here
PLACES = {  # of data sets that are downloaded, in their root
    f"{SOURCES}:cifar10": "cifar-10-batches-py",
    f"{SOURCES}:cifar100": "cifar-100-python",
}


def check(points: Sequence[Point], is_dry: bool = False) -> list[str]:
    """Checks all that runs do before their first step; UserError for what cannot run.

    Returns what this machine lacks, if the run is dry.
    """
    checks = Checks(is_dry)
    names = Counter(str(point.folder.path) for point in points)
    path, number = names.most_common(1)[0]
    if number > 1:
        raise UserError(f"name={path}: {number} points share it; name='x-${{KEY}}' names each")
    for point in points:
        with env_override({**point.environment}):  # which the code that opens data may read
            checks.check_folder(point)
            if not point.folder.is_finished():
                checks.check_run(point.config)
    return [*checks.lacks]


@dataclass
class Checks:
    """Checks run after run; those that differ in their seed alone are checked once."""

    is_dry: bool
    lacks: dict[str, None] = field(default_factory=dict)  # in their order, each once
    checked: set[str] = field(default_factory=set)

    def check_folder(self, point: Point) -> None:
        """Checks that the folder can be used, and that its run is of the same data."""
        from reproduction.data.sources import opened, record  # imports torch

        config, folder = point.config, point.folder
        folder.check(config)
        if not folder.is_taken():  # what has begun may go on
            check_new(config)
        if config.resume == "auto":
            for other in find(config):
                if other.path != folder.path:
                    warn(f"{folder.path}: {other.path} holds the same run, and is left as it is")
        if folder.read_summary().get("data") and self.has_images(config.dataset):
            folder.check_data(record(opened(config.dataset), config.model.weights))

    def check_run(self, config: Config) -> None:
        """Checks the device, the images and the model."""
        from reproduction.models.build import try_pass, without_weights  # imports torch
        from reproduction.training.run import check_start

        setting = f"{row_hash(config)} {config.device} {config.compile}"
        if setting in self.checked or not is_first_rank():
            return
        self.checked.add(setting)
        self.check_device(config)
        if self.is_dry and isinstance(config.model, ViT):  # its first weights are a download
            config = replace(config, model=replace(config.model, pretrained=None))
        if self.has_images(config.dataset):
            check_start(config)
        else:
            try_pass(without_weights(config.model), config.augmentation, CLASSES)

    def check_device(self, config: Config) -> None:
        from reproduction.training.ranks import resolve_device  # imports torch

        try:
            resolve_device(config.device, config.devices, config.recipe.precision, config.compile)
        except UserError as error:
            if not self.is_dry or config.device == "cpu":
                raise
            self.lacks[str(error)] = None

    def has_images(self, dataset: Dataset) -> bool:
        """Whether images can be opened; training fails for their lack, or downloads them."""
        if not self.is_dry:
            return True
        lack = lack_of(dataset)
        if lack is not None:
            self.lacks[lack] = None
        return lack is None


def lack_of(dataset: Dataset) -> str | None:
    """What this machine lacks of a data set: the folder of its images, or a module."""
    from reproduction.data.sources import opened  # imports torch

    if dataset.root is not None:
        place = Path(dataset.root, PLACES.get(dataset.source, ""))
        if not place.exists():
            return f"dataset.root={dataset.root}: {dataset.name} is not here"
    try:
        opened(dataset)
    except UserError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            return str(error)
        raise
    return None
