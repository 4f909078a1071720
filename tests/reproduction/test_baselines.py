"""The models of Tables 1 and 2: parameters and MACs beside the printed ones, and training."""

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from reproduction.config import CONF_DIR, Config
from reproduction.models.build import (
    build_model,
    build_module,
    count_macs,
    count_parameters,
    without_weights,
)
from reproduction.studies.study import Size, papers_studies
from tests.reproduction.conftest import Command, config_of
from tokenmixup import Output, training_loss

MODELS = sorted(path.stem for path in (CONF_DIR / "model").glob("*.yaml"))
SIZES = {
    (name, row): size
    for name, study in papers_studies().items()
    for row, size in study.sizes.items()
}


TOLERANCE = 0.005
Counts = tuple[int, int, int]  # parameters, MACs of one image, MACs without attention's matmuls


def count(size: Size, config: Config) -> Counts:
    """Builds the model of a row on the meta device and counts."""
    with torch.device("meta"):
        module = build_module(without_weights(config.model), config.augmentation, size.classes)
    return count_parameters(module), *count_macs(module.model, config.model.image_size)


def agrees(measured: float, printed: float) -> bool:
    """Whether `measured` rounds to the printed digits or lies within the tolerance."""
    digits = len(str(printed).partition(".")[2])
    return round(measured, digits) == printed or abs(measured / printed - 1) <= TOLERANCE


def differences(size: Size, counts: Counts) -> Iterator[str]:
    """Yields each printed figure that does not agree."""
    parameters, *both_macs = counts
    if size.parameters is not None and not agrees(parameters / 1e6, size.parameters):
        yield "parameters"
    if size.macs is not None and not any(agrees(macs / 1e9, size.macs) for macs in both_macs):
        yield "MACs"


@pytest.mark.parametrize("model", MODELS)
def test_model_files_state_their_number_of_parameters(model: str):
    lines = (CONF_DIR / "model" / f"{model}.yaml").read_text().splitlines()
    head = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    stated = re.search(r"([\d,]+) parameters with ([\d,]+) classes", head)
    assert stated is not None
    parameters, classes = (int(number.replace(",", "")) for number in stated.groups())
    plain = Size(model=model, classes=classes, counted=(0, 0, 0))
    rows = [
        size.counted
        for size in SIZES.values()
        if (size.command, size.classes) == (plain.command, classes)
    ]
    counted = rows[0] if rows else count(plain, config_of(*plain.command))
    assert counted[0] == parameters


@pytest.mark.parametrize(
    "key",
    [
        key if "CCT" in key[1] or "ViT" in key[1] else pytest.param(key, marks=pytest.mark.slow)
        for key in SIZES
    ],
    ids=str,
)
def test_stored_counts_are_those_of_the_model(key: tuple[str, str]):
    assert count(SIZES[key], config_of(*SIZES[key].command)) == SIZES[key].counted


# Millions of parameters, of MACs, and of MACs without attention's matmuls, measured before this
# code was written.
MEASURED: dict[tuple[int, str], tuple[float, float, float]] = {
    (1, "ResNet18"): (11.1816, 37.0, 37.0),
    (1, "ResNet50"): (23.5285, 83.4, 83.4),
    (1, "ResNet1001-v2"): (10.3277, 1491.0, 1491.0),
    (1, "MobileNetV2/2.0"): (8.7227, 23.2, 23.2),
    (1, "WRN-28-10"): (36.5369, 5243.4, 5243.4),
    (1, "WRN-40-4"): (8.9492, 1298.6, 1298.6),
    (1, "ResNeXt-29-8x64d"): (34.4267, 5387.3, 5387.3),
    (1, "ResNeXt-29-16x64d"): (68.1552, 10688.9, 10688.9),
    (1, "ViT-Lite-6/4"): (3.1905, 218.2, 205.3),
    (1, "ViT-Lite-7/4"): (3.7169, 254.5, 239.3),
    (1, "NesT-T"): (17.0576, 5807.2, 5217.1),
    (1, "NesT-B"): (67.7234, 17925.8, 16667.0),
    (1, "CVT-6/4"): (3.1903, 214.7, 202.1),
    (1, "CCT-7/3x1(1500)"): (3.7601, 1181.6, 946.7),
    (1, "CCT-7/3x1(1500)*"): (3.7833, 1181.6, 946.7),
    (1, "CCT-7/3x1(1500) + HTM"): (3.8092, 1181.6, 946.7),
    (1, "CCT-7/3x1(1500) + VTM"): (3.7833, 1181.6, 946.7),
    (1, "CCT-7/3x1(1500) + HTM + VTM"): (3.8092, 1181.6, 946.7),
    (2, "ResNet50"): (25.557, 4089.2, 4089.2),
    (2, "ResNet152"): (60.1928, 11513.6, 11513.6),
    (2, "DenseNet-264"): (33.3377, 5751.7, 5751.7),
    (2, "WRN-50-2-bottleneck"): (68.8832, 11398.0, 11398.0),
    (2, "RegNetY-4G"): (20.6467, 3973.3, 3973.3),
    (2, "ResNeXt-50-2x40d"): (25.425, 4124.5, 4124.5),
    (2, "ResNeXt-101-64x4d"): (83.4553, 15460.3, 15460.3),
    (2, "ViT-B/16-224"): (86.5677, 17563.8, 16848.5),
    (2, "ViT-B/16-224 + HTM"): (87.3367, 17563.8, 16848.5),
    (2, "ViT-B/16-224 + VTM"): (86.5677, 17563.8, 16848.5),
    (2, "ViT-B/16-224 + HTM + VTM"): (87.3367, 17563.8, 16848.5),
}


def test_all_29_rows_have_the_recorded_sizes():
    rounded = {
        (int(study[-1]), row): (round(x[0] / 1e6, 4), *(round(macs / 1e6, 1) for macs in x[1:]))
        for (study, row), x in ((key, size.counted) for key, size in SIZES.items())
    }
    assert len(rounded) == 29
    assert rounded == MEASURED


def test_differences_from_the_printed_sizes_are_those_that_comments_explain():
    differing = {key: [*differences(size, size.counted)] for key, size in SIZES.items()}
    assert {key: figures for key, figures in differing.items() if figures} == {
        ("table1", "ResNet1001-v2"): ["MACs"],
        ("table1", "ViT-Lite-7/4"): ["MACs"],
        ("table1", "CVT-6/4"): ["MACs"],
        ("table2", "ResNet50"): ["MACs"],
        ("table2", "ResNet152"): ["MACs"],
        ("table2", "RegNetY-4G"): ["MACs"],
        ("table2", "ViT-B/16-224 + HTM + VTM"): ["parameters"],
    }


@pytest.mark.parametrize(
    ("measured", "printed", "expected"),
    [
        (20.6467, 21, True),  # rounds
        (0.0232, 0.02, True),
        (17.0576, 17.0, True),  # within the tolerance
        (87.3367, 86.6, False),
        (11.5136, 11.58, False),
        (20.6467, 21.0, False),
    ],
)
def test_agrees_by_rounding_or_tolerance(measured: float, printed: float, expected: bool):
    assert agrees(measured, printed) == expected


def test_library_models_train_and_evaluate(command: Command):
    small = ["dataset.limit=20", "recipe.batch_size=10", "recipe.epochs=1", "device=cpu"]
    model = ["model=mobilenetv2_200", "model.options.width_mult=0.25"]
    mixing = "augmentation=[mixup,cutmix]"
    assert command("train", "name=mine", *model, mixing, *small).status == 0
    run = command("eval", "run=outputs/mine")
    file = "outputs/mine/checkpoints/best.safetensors"
    weights = command("eval", f"checkpoint={file}", *model)
    assert run.status == weights.status == 0
    results = [re.findall(r"top-1 .* digits", result.out) for result in (run, weights)]
    assert results[0] == results[1] != []


@pytest.mark.parametrize(("model", "last"), [("wrn_40_4", "stages"), ("resnext29_8x64d", "layer3")])
def test_small_image_stem_keeps_the_resolution(model: str, last: str):
    with torch.device("meta"):
        built = build_model(config_of(f"model={model}", "augmentation=[]").model, 10)
    sizes: list[tuple[int, ...]] = []
    first = next(m for m in built.modules() if isinstance(m, nn.Conv2d) and m.in_channels == 3)
    for module in (first, built.get_submodule(last)):
        module.register_forward_hook(lambda m, inputs, output: sizes.append(output.shape[-2:]))
    built(torch.zeros(2, 3, 32, 32, device="meta"))
    assert sizes == [(32, 32), (8, 8)]


@pytest.mark.parametrize("model", ["vit_lite_6_4", "cvt_6_4"])
def test_vit_lite_and_cvt_train_with_htm_and_vtm(model: str):
    config = config_of(f"model={model}", "augmentation.htm.tau=inf", "augmentation.htm.rho=0")
    torch.manual_seed(0)
    module = build_module(config.model, config.augmentation, 10)
    images, targets = torch.randn(4, 3, 32, 32), torch.eye(10)[:4]
    entering: list[Tensor] = []
    block = module.model.blocks[2]  # type: ignore[union-attr, index]
    handle = block.register_forward_pre_hook(lambda m, inputs: entering.append(inputs[0]))
    mix = module.eval().mixed_pairs(images, targets)
    handle.remove()
    assert mix is not None and mix.mask.shape == (4, 64) and mix.mask.any()
    prefix = module.model.num_prefix_tokens
    assert prefix == (model == "vit_lite_6_4")
    assert torch.equal(mix.tokens[:, :prefix], entering[0][:, :prefix])
    assert not torch.equal(mix.tokens[:, prefix:], entering[0][:, prefix:])

    output = module.train()(images, targets)
    assert isinstance(output, Output)
    loss = training_loss(output, 0.001)
    loss.backward()
    assert torch.isfinite(loss) and output.stats["mixed_tokens"] > 0
    assert all(p.grad is not None for p in module.parameters())
    torch.manual_seed(0)
    plain = build_model(config.model, 10).eval()
    assert torch.equal(module.eval()(images), plain(images))


def test_vit_lite_reads_only_its_class_token():
    """Logits depend on the images only through attention: without blocks they are all equal."""
    model = build_model(config_of("model=vit_lite_6_4", "augmentation=[]").model, 10).eval()
    images = torch.randn(3, 3, 32, 32)
    assert not torch.allclose(model(images)[0], model(images)[1])
    model.blocks = nn.Sequential()
    assert torch.equal(model(images)[0], model(images)[1])
