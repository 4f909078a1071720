"""Inputs of a step: the order of images, augmentation, mixing and erasing, by seed, as timm's."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_loader, create_transform
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from reproduction.data.halves import Half
from reproduction.data.inputs import Mixed, TrainingInputs
from reproduction.data.loaders import TrainingBatches, build_training_images
from reproduction.data.seeding import Purpose, seeded
from tests.images import OWN, reads, recorded
from tests.programs import (
    SHORT,
    Overrides,
    Run,
    assert_succeeded,
    build_trainer,
    config_of,
    overrides_of,
    step,
    train,
    trained,
)

CPU = torch.device("cpu")
UNSCALED = ("dataset.mean=[0,0,0]", "dataset.std=[1,1,1]")
NO_ERASING = "recipe.transforms.erasing_prob=0"
IMAGES = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8)
RUN = (OWN, SHORT, "augmentation=[]")


class Key(NamedTuple):
    """What the inputs of a step are drawn by."""

    seed: int = 0
    step: int = 0
    rank: int = 0


def inputs_of(*overrides: Overrides) -> TrainingInputs:
    return build_trainer("model.embed_dim=16", overrides).inputs


def erasing(prob: float, mode: str, *more: str) -> TrainingInputs:
    prefix = "recipe.transforms.erasing"
    overrides = (f"{prefix}_prob={prob}", f"{prefix}_mode={mode}", more)
    return inputs_of("augmentation=[]", UNSCALED, overrides)


def prepared(inputs: TrainingInputs, images: Tensor, key: Key) -> Mixed:
    torch.rand(3)  # anything may draw between two steps
    return inputs(images, torch.arange(len(images)) % 10, *key)


def random_images(count: int, size: int = 32, low: int = 0) -> Tensor:
    return torch.randint(low, 256, (count, 3, size, size), dtype=torch.uint8)


def distinct(tensors: list[Tensor]) -> int:
    """How many different ones there are."""
    return len({tuple(tensor.flatten().tolist()) for tensor in tensors})


# The order of images


def epochs_of(log: Path) -> tuple[list[int], list[int]]:
    """The training images of the two epochs; before the run, it tries the first image."""
    _, *later = reads(log)
    order = [read.index for read in later if read.half == "train"]
    half = len(order) // 2
    return order[:half], order[half:]


def test_each_epoch_reads_every_image_once_in_an_order_by_seed_and_epoch(here: Path):
    orders = []
    for seed, workers in ((0, 0), (0, 1), (1, 0)):
        log = here / f"log-{seed}-{workers}"
        with recorded(log):
            trained(RUN, f"seed={seed}", f"dataset.workers={workers}", name=log.name)
        orders.append(epochs_of(log))
    for first, second in orders:
        assert sorted(first) == list(range(60))
        assert sorted(second) == list(range(60))
    whole, with_worker, of_other_seed = orders
    assert whole == with_worker
    different = {tuple(order) for order in (*whole, of_other_seed[0], range(60))}
    assert len(different) == 4


@pytest.mark.parametrize(("drop_last", "sizes"), [("false", [20, 20, 19]), ("true", [22, 22])])
def test_two_ranks_share_the_batches_of_one_process(drop_last: str, sizes: list[int]):
    """Of 59 images batches of 20, or two of 22, and not 22, 22 and 15."""
    config = config_of("recipe.batch_size=22", f"recipe.drop_last={drop_last}")
    shares = []
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        of_rank = TrainingBatches(config, 59, rank, ranks)
        of_rank.start_at(epoch=1, first=0)
        shares.append([list(batch) for batch in of_rank])
    alone, first, second = shares
    assert [len(batch) for batch in alone] == sizes
    assert list(map(of_rank.global_size, range(2 * len(sizes)))) == 2 * sizes
    assert alone == [[*one, *other] for one, other in zip(first, second, strict=True)]


def test_an_epoch_leaves_out_images_that_fill_no_batch_other_ones_each_time(here: Path):
    """The run counts those that it has seen."""
    overrides = (RUN, "name=mine", "recipe.batch_size=25", "recipe.grad_accum_steps=2")
    with recorded(here / "log"):
        assert_succeeded(train(overrides))
    run = Run("outputs/mine")
    assert len(run.steps) == run.summary["steps"] == 4
    assert run.summary["images"] == 100
    first, second = [set(order) for order in epochs_of(here / "log")]
    assert len(first) == len(second) == 50
    assert first != second


@pytest.mark.parametrize(("images", "size"), [(50_000, 128), (50_048, 128), (64, 64)])
def test_an_epoch_has_the_batches_of_timms_loader(images: int, size: int):
    """As the published one, which has 390 of CIFAR's images."""
    data = TensorDataset(torch.zeros(images, 1), torch.zeros(images))
    theirs = create_loader(
        data, (1,), size, is_training=True, no_aug=True, use_prefetcher=False, num_workers=0
    )
    config = config_of(f"recipe.batch_size={size}")
    ours = [len(batch) for batch in TrainingBatches(config, images, rank=0, ranks=1)]
    assert ours == [size] * len(theirs)


# Augmentation


WIDE = (0.75, 1.3333)  # ratios of the crop


@pytest.mark.parametrize(
    ("seed", "settings", "ratio"),
    [
        (0, "{scale:[0.08,1]}", WIDE),
        (1, "{auto_augment:null,color_jitter:0.3}", WIDE),
        (2, "{scale:[1,1]}", (1.0, 1.0)),
    ],
)
def test_augmentation_and_normalisation_equal_timm(
    seed: int, settings: str, ratio: tuple[float, float]
):
    """Compares values after the recipe's complete augmentation, of images that are oblong."""
    config = config_of("recipe=cifar_cct", f"seed={seed}", f"recipe.transforms={settings}")
    pixels = np.random.default_rng(seed).integers(0, 256, (12, 32, 48, 3), np.uint8)
    pictures = [(Image.fromarray(image), i) for i, image in enumerate(pixels)]
    ours = build_training_images(config, Half.of(pictures, range(12)))
    transforms = config.recipe.transforms
    data = config.dataset
    timms = create_transform(
        (3, 32, 32),
        is_training=True,
        scale=tuple(transforms.scale),
        ratio=ratio,
        interpolation=transforms.interpolation,
        hflip=transforms.hflip,
        color_jitter=transforms.color_jitter,
        auto_augment=transforms.auto_augment,
        re_prob=0.0,
        mean=data.mean,
        std=data.std,
    )
    normalize = inputs_of("recipe=cifar_cct", "augmentation=[]").normalize
    batch = ours.__getitems__([(1, index) for index in range(12)])
    for index, example in enumerate(batch):
        assert example.image.dtype == torch.uint8
        assert example.target == index
        with seeded(Purpose.AUGMENT, seed, 1, index):
            expected = timms(pictures[index][0])
        assert_close(normalize(example.image[None])[0], expected, atol=2e-6, rtol=0)
        assert torch.equal(ours[(1, index)].image, example.image)  # whatever batch it is in
    later = ours.__getitems__([(2, index) for index in range(12)])
    pairs = zip(batch, later, strict=True)
    alike = [torch.equal(one.image, other.image) for one, other in pairs]
    assert sum(alike) < 6  # by chance


# Erasing


def test_erased_boxes_equal_timms_image_by_image():
    images = random_images(64, size=16, low=1)  # some are as wide as the image
    erased = prepared(erasing(0.5, "const"), images, Key(step=3)).images
    timms = RandomErasing(0.5, mode="const", max_count=1, device="cpu")
    with seeded(Purpose.ERASE_BOXES, 0, 3, 0):
        expected = torch.stack([timms(image.clone()) for image in images / 255])
    assert_close(erased, expected)
    assert (expected == 0).any()


def test_a_quarter_of_the_images_is_erased_after_mixing():
    """1,000 images with the recipe's probability; erasing before would touch 44 %."""
    overrides = ("recipe=cifar_cct", "augmentation=[mixup,cutmix]")
    ours = inputs_of(overrides)
    plain = inputs_of(overrides, NO_ERASING)
    touched = 0
    for number in range(10):
        images = random_images(100)
        erased = prepared(ours, images, Key(step=number))
        mixed = prepared(plain, images, Key(step=number))
        differs = (erased.images != mixed.images).flatten(1).any(dim=1)
        touched += int(differs.sum())
        assert torch.equal(erased.targets(10, 0.1), mixed.targets(10, 0.1))
    assert 200 <= touched <= 300


# Draws by seed, step and rank


KEYS = [Key(), Key(seed=1), Key(step=1), Key(rank=1)]


@pytest.mark.parametrize("stack", ["mixup", "cutmix", "mixup,cutmix", ""])
def test_inputs_are_a_function_of_seed_step_and_rank(stack: str):
    erase = ("recipe.transforms.erasing_prob=1", "recipe.transforms.erasing_mode=pixel")
    inputs = inputs_of(f"augmentation=[{stack}]", erase)
    before = IMAGES.clone()
    state = torch.get_rng_state()
    results = {key: inputs(IMAGES, torch.arange(8), *key) for key in KEYS}
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(IMAGES, before)
    for key, mixed in results.items():
        again = prepared(inputs, IMAGES, key)
        assert torch.equal(again.images, mixed.images)
        assert torch.equal(again.targets(10, 0.1), mixed.targets(10, 0.1))
    labels = [mixed.targets(10, 0.1) for mixed in results.values()]
    assert distinct([mixed.images for mixed in results.values()]) == 4
    if stack:
        assert distinct(labels) == 4
    else:
        assert distinct(labels) == 1


# Mixing


CERTAIN = overrides_of("""
    augmentation.mixup.alpha=0.8 augmentation.mixup.prob=1
    augmentation.cutmix.alpha=0.8 augmentation.cutmix.prob=1
""")


@pytest.mark.parametrize("n", [6, 7, 1])
@pytest.mark.parametrize(
    ("stack", "mixup", "cutmix"),
    [("mixup", 0.8, 0), ("cutmix", 0, 0.8), ("mixup,cutmix", 0.8, 0.8)],
)
def test_input_mixing_equals_timm_and_accepts_odd_batches(
    n: int, stack: str, mixup: float, cutmix: float
):
    overrides = [override for override in CERTAIN if override.split(".")[1] in stack]
    ours = inputs_of(f"augmentation=[{stack}]", overrides, NO_ERASING, UNSCALED)
    theirs = Mixup(mixup, cutmix, label_smoothing=0.1, num_classes=10)
    for number in range(8):
        images = random_images(n, size=8)
        classes = torch.arange(n) % 4
        mixed = ours(images, classes, 0, number, 0)
        soft = mixed.targets(10, 0.1)
        assert_close(soft.sum(dim=1), torch.ones(n))
        if n % 2 == 0:
            with seeded(Purpose.MIX_INPUTS, 0, number, 0):
                expected, targets = theirs(images / 255, classes)
            assert_close(mixed.images, expected)
            assert torch.equal(soft, targets)


def kind_of(image: Tensor) -> str:
    """How a black image was mixed with a white one."""
    if ((image > 0) & (image < 1)).any():
        return "mixup"
    if (image == 1).any():
        return "cutmix"
    return "none"


def test_input_mixing_has_the_configured_probabilities():
    overrides = overrides_of("""
        augmentation=[mixup,cutmix] augmentation.mixup.prob=0.2 augmentation.cutmix.prob=0.6
        augmentation.mixup.alpha=1 augmentation.cutmix.alpha=1
    """)
    inputs = inputs_of(overrides, NO_ERASING, UNSCALED)
    black = torch.zeros(3, 8, 8)
    white = torch.full((3, 8, 8), 255.0)
    images = torch.stack([black, white]).byte()
    kinds = Counter[str]()
    for number in range(2000):
        mixed = inputs(images, torch.tensor([0, 1]), 0, number, 0)
        kinds[kind_of(mixed.images[0])] += 1
    assert kinds["mixup"] == pytest.approx(200, abs=60)
    assert kinds["cutmix"] == pytest.approx(600, abs=100)  # some boxes are empty


def test_an_image_that_is_its_own_partner_is_not_mixed_and_at_the_end_none_is():
    inputs = inputs_of("augmentation=[mixup]", "augmentation.mixup.prob=1", NO_ERASING, UNSCALED)
    images = random_images(5, size=2)
    mixed = inputs(images, torch.arange(5), 0, 0, 0)
    assert mixed.is_mixed is not None
    assert mixed.is_mixed.tolist() == [True, True, False, True, True]
    inputs.stop_mixing()
    mixed = inputs(images, torch.arange(5), 0, 0, 0)
    assert_close(mixed.images, images / 255)
    assert_close(mixed.targets(5, 0.1), 0.9 * torch.eye(5) + 0.02)


def test_dropout_is_a_function_of_seed_and_step():
    still = overrides_of("""
        recipe.lr=1e-9 recipe.min_lr=0 recipe.warmup_epochs=0 augmentation=[]
        model.embed_dim=16 model.drop_path=0.5
    """)

    def losses(seed: int) -> list[float]:
        trainer = build_trainer(still, NO_ERASING, f"seed={seed}")
        batch = (IMAGES, torch.arange(8))
        return [step(trainer, batch).losses[0] for _ in range(3)]

    first = losses(0)
    assert losses(0) == first
    assert len({*first, *losses(1)}) == 6
