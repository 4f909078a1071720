"""Inputs on the device: normalisation, mixing and erasing, drawn by seed, step and rank."""

import pytest
import torch
from timm.data import create_transform
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from reproduction.config import Augmentation, CutMix, InputMix
from reproduction.data.build import build_training_images, build_training_inputs
from reproduction.data.inputs import (
    Erasing,
    InputMixing,
    Mixed,
    TrainingInputs,
    build_input_mixing,
    build_normalize,
)
from reproduction.data.seeding import Purpose, seed_device, seeded
from tests.reproduction.conftest import config_of, load_source

CPU = torch.device("cpu")
MIXUP, CUTMIX = InputMix(alpha=0.8, prob=1.0), CutMix(alpha=1.0, prob=1.0)


def mixed_by(mixer: InputMixing | None, images: Tensor, targets: Tensor, *key: int) -> Mixed:
    return TrainingInputs(lambda x: x, mixer)(images, targets, *key)


def erased_by(erase: Erasing, images: Tensor, *key: int) -> Tensor:
    return erase.fill(images, erase.draw(images.shape, *key))


def inputs_of(*overrides: str) -> TrainingInputs:
    return build_training_inputs(config_of(*overrides), CPU)


@pytest.mark.parametrize("seed", range(3))
def test_augmentation_and_normalisation_equal_timm(seed: int):
    """Compares values after the recipe's complete augmentation."""
    config = config_of("recipe=cifar_cct", "dataset=digits", f"seed={seed}")
    source = load_source("digits", None, 12)
    ours = build_training_images(config, source.train)
    transforms = config.recipe.transforms
    timms = create_transform(
        (3, 32, 32),
        is_training=True,
        scale=tuple(transforms.scale),
        ratio=tuple(transforms.ratio),
        interpolation=transforms.interpolation,
        hflip=transforms.hflip,
        color_jitter=0.4,
        auto_augment=transforms.auto_augment,
        re_prob=0.0,
        mean=config.dataset.mean,
        std=config.dataset.std,
    )
    normalize = build_normalize(config.dataset.mean, config.dataset.std, CPU)
    for index in range(12):
        image, _ = ours[(1, index)]
        assert image.dtype == torch.uint8
        with seeded(Purpose.AUGMENT, seed, 1, index):
            expected = timms(source.train[index][0])
        torch.testing.assert_close(normalize(image[None])[0], expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("count", [1, 3])
def test_erased_boxes_equal_timms_image_by_image(count: int):
    images = torch.randn(64, 3, 32, 32)
    erased = erased_by(Erasing(0.5, "const", count, CPU), images, 0, 3, 0)
    timms = RandomErasing(0.5, mode="const", max_count=count, device="cpu")
    with seeded(Purpose.ERASE_BOXES, 0, 3, 0):
        expected = torch.stack([timms(image.clone()) for image in images])
    assert torch.equal(erased, expected)
    assert not torch.equal(erased, images)


@pytest.mark.parametrize(("mode", "colours"), [("pixel", None), ("rand", 1)])
def test_erased_boxes_are_filled_with_standard_noise(mode: str, colours: int | None):
    images = torch.full((400, 3, 32, 32), 100.0)
    erased = erased_by(Erasing(1.0, mode, 1, CPU), images, 0, 0, 0)
    is_box = (erased != 100).any(dim=1)  # b h w
    filled = erased.movedim(1, -1)[is_box]  # pixels 3
    assert abs(filled.mean()) < 0.1 and abs(filled.std() - 1) < 0.1
    first = erased[0].movedim(0, -1)[is_box[0]]
    distinct = len(first.unique(dim=0))
    assert distinct == (colours or len(first))
    assert len(filled.unique(dim=0)) >= 390  # no two images share their noise


def test_a_quarter_of_the_images_is_erased():
    """2,000 images with the recipe's probability; mixing after erasing would touch 44 %."""
    inputs = inputs_of("recipe=cifar_cct", "augmentation=[mixup,cutmix]")
    assert inputs.erase is not None
    touched = 0
    for step in range(20):
        flat = torch.zeros(100, 3, 32, 32)
        touched += int((erased_by(inputs.erase, flat, 0, step, 0) != 0).flatten(1).any(dim=1).sum())
    assert 440 <= touched <= 560


@pytest.mark.parametrize("stack", ["mixup", "cutmix"])
def test_erased_boxes_are_not_mixed(stack: str):
    """With probability 1, every box holds its own image's noise, unscaled by mixing."""
    overrides = [f"augmentation=[{stack}]", "recipe.transforms.erasing_mode=pixel"]
    inputs, plain = (
        inputs_of(*overrides, f"recipe.transforms.erasing_prob={prob}") for prob in (1.0, 0.0)
    )
    assert inputs.erase is not None and plain.erase is None
    for step in range(20):
        images = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8)
        erased, mixed = (of(images, torch.arange(8), 0, step, 0) for of in (inputs, plain))
        noise = erased_by(inputs.erase, torch.full_like(mixed.images, torch.inf), 0, step, 0)
        assert (noise != torch.inf).flatten(1).any(dim=1).all()
        assert torch.equal(erased.images, torch.where(noise == torch.inf, mixed.images, noise))
        assert torch.equal(erased.targets(10, 0.1), mixed.targets(10, 0.1))


def test_inputs_are_a_function_of_seed_step_and_rank():
    inputs = inputs_of("recipe=cifar_cct", "augmentation=[mixup,cutmix]")
    images = torch.randint(256, (16, 3, 32, 32), dtype=torch.uint8)

    def prepared(*key: int) -> tuple[Tensor, Tensor]:
        torch.rand(3)  # unrelated draws
        mixed = inputs(images, torch.arange(16) % 10, *key)
        return mixed.images, mixed.targets(10, 0.1)

    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    results = [prepared(*key) for key in keys]
    for key, (mixed, targets) in zip(keys, results, strict=True):
        again = prepared(*key)
        assert torch.equal(again[0], mixed) and torch.equal(again[1], targets)
    assert len({tuple(mixed.flatten().tolist()) for mixed, _ in results}) == len(keys)
    assert len({tuple(targets.flatten().tolist()) for _, targets in results}) == len(keys)
    assert inputs.erase is not None
    flat = torch.zeros_like(results[0][0])
    erased = [erased_by(inputs.erase, flat, *key) for key in keys]
    boxes = {tuple((x != 0).flatten().tolist()) for x in erased}
    assert len(boxes) == len(keys)


def test_erasing_noise_differs_from_dropout_draws_of_the_same_step():
    blank = torch.full((4, 3, 32, 32), torch.inf)
    noise = erased_by(Erasing(1.0, "pixel", 1, CPU), blank, 0, 1, 0)
    with seeded(Purpose.AUGMENT):  # restores the generator
        seed_device(CPU, Purpose.DROPOUT, 0, 1, 0)
        assert not torch.isclose(noise, torch.randn(blank.shape)).any()


def test_inputs_leave_images_and_global_generators_unchanged():
    inputs = inputs_of("recipe=cifar_cct", "augmentation=[mixup,cutmix]")
    images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    before, state = images.clone(), torch.get_rng_state()
    inputs(images, torch.arange(4), 0, 0, 0)
    assert torch.equal(images, before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("n", [6, 7, 1])
@pytest.mark.parametrize(
    "stack",
    [{"mixup": MIXUP}, {"cutmix": CUTMIX}, {"mixup": MIXUP, "cutmix": CUTMIX}],
)
def test_input_mixing_equals_timm_and_accepts_odd_batches(n, stack):
    ours = build_input_mixing(Augmentation(**stack))
    theirs = Mixup(
        mixup_alpha=0.8 if "mixup" in stack else 0.0,
        cutmix_alpha=1.0 if "cutmix" in stack else 0.0,
        label_smoothing=0.1,
        num_classes=4,
    )
    for step in range(8):
        images, targets = torch.randn(n, 3, 8, 8), torch.arange(n) % 4
        mixed = mixed_by(ours, images.clone(), targets, 0, step)
        soft = mixed.targets(4, 0.1)
        torch.testing.assert_close(soft.sum(dim=1), torch.ones(n))
        if n % 2 == 0:
            with seeded(Purpose.MIX_INPUTS, 0, step):
                expected = theirs(images.clone(), targets)
            assert torch.equal(mixed.images, expected[0])
            assert torch.equal(soft, expected[1])


def test_input_mixing_has_the_configured_probabilities():
    mixup, cutmix = InputMix(alpha=1.0, prob=0.2), CutMix(alpha=1.0, prob=0.6)
    mixer = build_input_mixing(Augmentation(mixup=mixup, cutmix=cutmix))
    kinds = {"none": 0, "mixup": 0, "cutmix": 0}
    for step in range(2000):
        images = torch.stack([torch.zeros(1, 8, 8), torch.ones(1, 8, 8)])
        values = mixed_by(mixer, images, torch.tensor([0, 1]), step).images[0].unique()
        soft = bool(((values > 0) & (values < 1)).any())
        kinds["mixup" if soft else "cutmix" if (values == 1).any() else "none"] += 1
    assert kinds["mixup"] / 2000 == pytest.approx(0.1, abs=0.03)
    assert kinds["cutmix"] / 2000 == pytest.approx(0.3, abs=0.05)  # some boxes are empty


def test_targets_are_smoothed_like_timms_without_input_mixing():
    mixer = build_input_mixing(Augmentation())
    soft = mixed_by(mixer, torch.zeros(2, 3, 4, 4), torch.tensor([1, 3])).targets(4, 0.1)
    torch.testing.assert_close(soft[0], torch.tensor([0.025, 0.925, 0.025, 0.025]))


def test_mixup_of_odd_batches_mixes_labels_like_images():
    mixer = build_input_mixing(Augmentation(mixup=InputMix(alpha=1.0, prob=1.0)))
    for step in range(5):
        images = torch.arange(5.0)[:, None, None, None].expand(5, 3, 2, 2).clone()
        mixed = mixed_by(mixer, images, torch.arange(5), step)
        soft = mixed.targets(5, 0.0)
        expected = soft @ torch.arange(5.0)  # the pixel value that the labels imply
        torch.testing.assert_close(mixed.images[:, 0, 0, 0], expected)
        assert 0 < soft[0, 0] < 1


def test_purposes_have_different_random_streams():
    with seeded(Purpose.AUGMENT, 0, 7, 0):
        first = torch.rand(2)
    with seeded(Purpose.MIX_INPUTS, 0, 7, 0):
        assert not torch.equal(first, torch.rand(2))


def test_stop_mixing_keeps_label_smoothing():
    mixer = build_input_mixing(Augmentation(mixup=MIXUP))
    inputs = TrainingInputs(lambda x: x, mixer)
    images = torch.randn(4, 3, 8, 8)
    assert not torch.equal(inputs(images.clone(), torch.arange(4), 0, 0, 0).images, images)
    inputs.stop_mixing()
    for step in range(5):
        mixed = inputs(images.clone(), torch.arange(4), 0, step, 0)
        assert torch.equal(mixed.images, images)
        torch.testing.assert_close(mixed.targets(4, 0.1), 0.9 * torch.eye(4) + 0.025)
