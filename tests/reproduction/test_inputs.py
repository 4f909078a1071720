"""Inputs of a step: the order of images, augmentation, mixing and erasing, by seed, as timm's."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from reproduction.data.halves import Half
from reproduction.data.inputs import Mixed, TrainingInputs
from reproduction.data.loaders import build_training_images
from reproduction.data.seeding import Purpose, seed_device, seeded
from scripts.bench import build_trainer
from tests.doors import SMALL, config_of, step, train
from tests.images import OWN, recorded

CPU = torch.device("cpu")
UNSCALED = ("dataset.mean=[0,0,0]", "dataset.std=[1,1,1]")
IMAGES = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8)
RUN = (*OWN, *(x for x in SMALL if "limit" not in x), "augmentation=[]")


def inputs_of(*overrides: str) -> TrainingInputs:
    return build_trainer(["model.embed_dim=16", *overrides]).inputs


def erasing(prob: float, mode: str, *more: str) -> TrainingInputs:
    settings = {"prob": prob, "mode": mode}
    words = [f"recipe.transforms.erasing_{key}={value}" for key, value in settings.items()]
    return inputs_of("augmentation=[]", *UNSCALED, *words, *more)


def prepared(inputs: TrainingInputs, images: Tensor, *key: int) -> Mixed:
    torch.rand(3)  # anything may draw between two steps
    return inputs(images, torch.arange(len(images)) % 10, *key)


# The order of images


def order_of(log: Path, ranks: int = 1) -> list[list[list[int]]]:
    """The training images by epoch and rank; before the run, it tries the first image."""
    lines = [line.split() for line in log.read_text().splitlines()][1:]
    shares = [
        [int(i) for half, i, r in lines if half == "train" and int(r) == rank]
        for rank in range(ranks)
    ]
    return [
        [x[: len(x) // 2] for x in shares],
        [x[len(x) // 2 :] for x in shares],
    ]


def test_each_epoch_reads_every_image_once_in_an_order_by_seed_and_epoch(here: Path):
    orders = []
    for seed, workers in ((0, 0), (0, 1), (1, 0)):
        log = here / f"log-{seed}-{workers}"
        words = [f"name={log.name}", f"seed={seed}", f"dataset.workers={workers}"]
        with recorded(log):
            assert train(*RUN, *words).status == 0
        orders += [epoch[0] for epoch in order_of(log)]
    assert all(sorted(order) == [*range(60)] for order in orders)
    first, second, again, later, other, _ = orders
    assert (first, second) == (again, later)
    assert len({tuple(x) for x in (first, second, other, range(60))}) == 4


def test_two_ranks_share_the_batches_of_one_process(here: Path):
    for ranks in (1, 2):
        with recorded(here / f"log-{ranks}"):
            result = train(*RUN, f"name=run-{ranks}", f"devices={ranks}", "recipe.batch_size=22")
        assert result.status == 0, result.err
    alone = order_of(here / "log-1")
    shared = order_of(here / "log-2", ranks=2)
    for (whole,), (first, second) in zip(alone, shared, strict=True):
        for batch in np.split(np.array(whole), 3):  # 20 images each, not 22, 22 and 16
            assert batch.tolist() == first[:10] + second[:10]
            del first[:10], second[:10]


# Augmentation


@pytest.mark.parametrize(("seed", "scale"), [(0, "[0.08,1]"), (1, "[0.08,1]"), (2, "[1,1]")])
def test_augmentation_and_normalisation_equal_timm(seed: int, scale: str):
    """Compares values after the recipe's complete augmentation, of images that are oblong."""
    words = ("recipe=cifar_cct", f"seed={seed}", f"recipe.transforms.scale={scale}")
    config = config_of(*words)
    pixels = np.random.default_rng(seed).integers(0, 256, (12, 32, 48, 3), np.uint8)
    pictures = [(Image.fromarray(image), i) for i, image in enumerate(pixels)]
    ours = build_training_images(config, Half.of(pictures, range(12)))
    transforms = config.recipe.transforms
    data = config.dataset
    timms = create_transform(
        (3, 32, 32),
        is_training=True,
        scale=tuple(transforms.scale),
        ratio=(1.0, 1.0) if scale == "[1,1]" else (0.75, 1.3333),
        interpolation=transforms.interpolation,
        hflip=transforms.hflip,
        color_jitter=0.4,
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
        torch.testing.assert_close(normalize(example.image[None])[0], expected, atol=2e-6, rtol=0)
        assert torch.equal(ours[(1, index)].image, example.image)  # whatever batch it is in
    later = ours.__getitems__([(2, index) for index in range(12)])
    differing = [not torch.equal(x.image, y.image) for x, y in zip(batch, later, strict=True)]
    assert sum(differing) > 6  # some are alike by chance


def test_a_square_image_of_scale_one_is_not_cropped():
    words = ("augmentation=[]", "recipe.transforms.scale=[1,1]", "recipe.transforms.hflip=0")
    config = config_of("recipe=quickstart", *words)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
    images = build_training_images(config, Half.of([(x, 0) for x in pixels], [0] * 3))
    for index, expected in enumerate(pixels):
        found = images[(0, index)].image.permute(1, 2, 0).numpy()
        assert np.array_equal(found, expected)


# Erasing


def test_erased_boxes_equal_timms_image_by_image():
    images = torch.randint(1, 256, (64, 3, 32, 32), dtype=torch.uint8)
    erased = prepared(erasing(0.5, "const"), images, 0, 3, 0).images
    timms = RandomErasing(0.5, mode="const", max_count=1, device="cpu")
    with seeded(Purpose.ERASE_BOXES, 0, 3, 0):
        expected = torch.stack([timms(image.clone()) for image in images / 255])
    torch.testing.assert_close(erased, expected)
    assert (expected == 0).any()


@pytest.mark.parametrize(("mode", "colours"), [("pixel", None), ("rand", 1)])
def test_erased_boxes_are_filled_with_standard_noise(mode: str, colours: int | None):
    inputs = erasing(1.0, mode, "dataset.std=[0.01,0.01,0.01]")
    images = torch.full((400, 3, 32, 32), 255, dtype=torch.uint8)
    erased = prepared(inputs, images, 0, 0, 0).images
    is_box = (erased < 50).any(dim=1)  # b h w
    filled = erased.movedim(1, -1)[is_box]  # pixels 3
    assert abs(filled.mean()) < 0.1
    assert abs(filled.std() - 1) < 0.1
    first = erased[0].movedim(0, -1)[is_box[0]]
    assert len(first.unique(dim=0)) == (colours or len(first))
    assert len(filled.unique(dim=0)) >= 390  # no two images share their noise


@pytest.mark.parametrize("stack", ["mixup", "cutmix", "mixup,cutmix"])
def test_a_quarter_of_the_images_is_erased_after_mixing(stack: str):
    """1,000 images with the recipe's probability; erasing before would touch 44 %."""
    words = ["recipe=cifar_cct", f"augmentation=[{stack}]"]
    ours = inputs_of(*words)
    plain = inputs_of(*words, "recipe.transforms.erasing_prob=0")
    touched = 0
    for number in range(10):
        images = torch.randint(256, (100, 3, 32, 32), dtype=torch.uint8)
        erased, mixed = (prepared(x, images, 0, number, 0) for x in (ours, plain))
        differs = (erased.images != mixed.images).flatten(1).any(dim=1)
        touched += int(differs.sum())
        assert torch.equal(erased.targets(10, 0.1), mixed.targets(10, 0.1))
    assert 200 <= touched <= 300


# Draws by seed, step and rank


@pytest.mark.parametrize("stack", ["mixup", "cutmix", "mixup,cutmix", ""])
def test_inputs_are_a_function_of_seed_step_and_rank(stack: str):
    words = [f"augmentation=[{stack}]", "recipe.transforms.erasing_prob=1"]
    inputs = inputs_of(*words, "recipe.transforms.erasing_mode=pixel")
    before = IMAGES.clone()
    state = torch.get_rng_state()
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    results = [inputs(IMAGES, torch.arange(8), *key) for key in keys]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(IMAGES, before)
    for key, mixed in zip(keys, results, strict=True):
        again = prepared(inputs, IMAGES, *key)
        assert torch.equal(again.images, mixed.images)
        assert torch.equal(again.targets(10, 0.1), mixed.targets(10, 0.1))
    assert len({tuple(mixed.images.flatten().tolist()) for mixed in results}) == len(keys)
    labels = {tuple(mixed.targets(10, 0.1).flatten().tolist()) for mixed in results}
    assert len(labels) == (len(keys) if stack else 1)


def test_purposes_have_different_random_streams():
    """Not even the noise of a box equals what dropout draws in that step."""
    noise = prepared(erasing(1.0, "pixel"), torch.zeros_like(IMAGES), 0, 1, 0).images.flatten()
    with seeded(Purpose.AUGMENT):  # restores the generator
        seed_device(CPU, Purpose.MODEL, 0, 1, 0)
        dropout = torch.randn(noise.shape)
    assert (noise == dropout).sum() < 3  # by chance
    draws = set()
    for purpose in Purpose:
        with seeded(purpose, 0, 7, 0):
            draws.add(float(torch.rand(1)))
    assert len(draws) == len(Purpose)


# Mixing


@pytest.mark.parametrize("n", [6, 7, 1])
@pytest.mark.parametrize("stack", ["mixup", "cutmix", "mixup,cutmix"])
def test_input_mixing_equals_timm_and_accepts_odd_batches(n: int, stack: str):
    alphas = {f"{name}_alpha": 0.8 if name in stack else 0.0 for name in ("mixup", "cutmix")}
    words = [f"augmentation.{x}.{k}" for x in stack.split(",") for k in ("alpha=0.8", "prob=1")]
    words += [f"augmentation=[{stack}]", "recipe.transforms.erasing_prob=0", *UNSCALED]
    ours = inputs_of(*words)
    theirs = Mixup(**alphas, label_smoothing=0.1, num_classes=10)
    for number in range(8):
        images = torch.randint(256, (n, 3, 8, 8), dtype=torch.uint8)
        classes = torch.arange(n) % 4
        mixed = ours(images, classes, 0, number, 0)
        soft = mixed.targets(10, 0.1)
        torch.testing.assert_close(soft.sum(dim=1), torch.ones(n))
        if n % 2 == 0:
            with seeded(Purpose.MIX_INPUTS, 0, number, 0):
                expected = theirs(images / 255, classes)
            torch.testing.assert_close(mixed.images, expected[0])
            assert torch.equal(soft, expected[1])


def test_input_mixing_has_the_configured_probabilities():
    shares = {"mixup": 0.2, "cutmix": 0.6}
    words = [f"augmentation.{name}.prob={share}" for name, share in shares.items()]
    words += [f"augmentation.{name}.alpha=1" for name in shares]
    erase = "recipe.transforms.erasing_prob=0"
    inputs = inputs_of("augmentation=[mixup,cutmix]", *words, erase, *UNSCALED)
    kinds = {"none": 0, "mixup": 0, "cutmix": 0}
    images = torch.stack([torch.zeros(3, 8, 8), torch.full((3, 8, 8), 255)]).byte()
    for number in range(2000):
        values = inputs(images, torch.tensor([0, 1]), 0, number, 0).images[0].unique()
        soft = bool(((values > 0) & (values < 1)).any())
        kinds["mixup" if soft else "cutmix" if (values == 1).any() else "none"] += 1
    assert kinds["mixup"] / 2000 == pytest.approx(0.1, abs=0.03)
    assert kinds["cutmix"] / 2000 == pytest.approx(0.3, abs=0.05)  # some boxes are empty


def test_labels_are_mixed_like_images_and_smoothed_like_timms():
    words = ["augmentation.mixup.prob=1", "recipe.transforms.erasing_prob=0"]
    inputs = inputs_of("augmentation=[mixup]", *words, *UNSCALED)
    images = (50 * torch.arange(5))[:, None, None, None].expand(5, 3, 2, 2).byte()
    for number in range(5):
        mixed = inputs(images, torch.arange(5), 0, number, 0)
        soft = mixed.targets(5, 0.0)
        values = soft @ torch.arange(5.0) * 50 / 255  # the pixel value that the labels imply
        torch.testing.assert_close(mixed.images[:, 0, 0, 0], values)
        assert 0 < soft[0, 0] < 1
    inputs.stop_mixing()
    mixed = inputs(images, torch.arange(5), 0, 0, 0)
    torch.testing.assert_close(mixed.images, images / 255)
    torch.testing.assert_close(mixed.targets(5, 0.1), 0.9 * torch.eye(5) + 0.02)


def test_dropout_is_a_function_of_seed_and_step():
    still = ["recipe.lr=1e-9", "recipe.min_lr=0", "recipe.warmup_epochs=0", "augmentation=[]"]
    words = [
        *still,
        "model.embed_dim=16",
        "model.drop_path=0.5",
        "recipe.transforms.erasing_prob=0",
    ]

    def losses(*more: str) -> list[float]:
        trainer = build_trainer([*words, *more])
        return [step(trainer, IMAGES, torch.arange(8)).losses[0] for _ in range(3)]

    first = losses()
    again = losses()
    other = losses("seed=1")
    assert first == again
    assert len({*first, *other}) == 6
