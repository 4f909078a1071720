"""The models of the paper: their parameters beside the printed ones, dropout, and parts."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from timm.layers import DropPath, PatchDropout
from torch import nn

from tests.doors import CCT, ROOT, initial_model, meta_module, train

TABLES = ROOT / "src" / "reproduction" / "studies" / "paper"
SIZES = {
    (table, row): size
    for table in ("table1", "table2")
    for row, size in yaml.safe_load((TABLES / f"{table}.yaml").read_text())["sizes"].items()
}
TOLERANCE = 0.005  # of printed numbers of parameters, which are rounded
WITHOUT_SCORENET = ("table2", "ViT-B/16-224 + HTM + VTM")  # 86.6 million are printed


def count(*words: str, classes: int) -> int:
    return sum(parameter.numel() for parameter in meta_module(*words, classes=classes).parameters())


@pytest.mark.parametrize("key", SIZES, ids=str)
def test_rows_of_tables_1_and_2_have_the_printed_number_of_parameters(key: tuple[str, str]):
    size = SIZES[key]
    millions = count(*size["overrides"], classes=size["classes"]) / 1e6
    if (printed := size.get("parameters")) is not None:
        digits = len(str(printed).partition(".")[2])
        agrees = round(millions, digits) == printed or abs(millions / printed - 1) <= TOLERANCE
        assert agrees == (key != WITHOUT_SCORENET), millions


FILES = [path for path in (ROOT / "conf" / "model").glob("*.yaml") if path.stem != "timm"]


@pytest.mark.parametrize("file", sorted(FILES), ids=lambda path: path.stem)
def test_model_files_state_their_number_of_parameters(file: Path):
    text = " ".join(line.strip("# \n") for line in file.open() if line.startswith("#"))
    stated = re.search(r"([\d,]+) parameters with ([\d,]+) classes", text)
    assert stated is not None
    parameters, classes = (int(number.replace(",", "")) for number in stated.groups())
    assert count(f"model={file.stem}", "augmentation=[]", classes=classes) == parameters


def dropouts(*words: str) -> dict[str, float]:
    """The rates of all dropouts of a model in training; blocks are equal and unnumbered."""
    kinds = nn.Dropout | PatchDropout | DropPath
    modules = meta_module(*words).model.named_modules()
    found = [(re.sub(r"blocks\.\d+", "blocks", x), y) for x, y in modules if isinstance(y, kinds)]
    rates = [(name, getattr(each, "p", getattr(each, "drop_prob", None))) for name, each in found]
    assert len({*rates}) == len(dict(rates)), "blocks differ"
    return dict(rates)


PUBLISHED = {
    "pos_drop": 0.1,
    "head_drop": 0,
    "blocks.attn.attn_drop": 0,
    "blocks.attn.proj_drop": 0,
}
PUBLISHED |= {"blocks.mlp.drop1": 0.1, "blocks.mlp.drop2": 0.1}


@pytest.mark.parametrize("row", ["baseline", "htm", "vtm", "htm_vtm"])
def test_imagenet_runs_have_the_published_dropout(row: str):
    assert dropouts(f"experiment=table2/imagenet1k_{row}") == PUBLISHED


def test_stochastic_depth_of_a_cct_rises_linearly():
    model: Any = meta_module("model=cct_2_3x2", "model.depth=4", "model.drop_path=0.3").model
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for block in model.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_positions_are_learnable_or_sines_and_cosines():
    learnable, sine = (
        initial_model(f"model.positional_embedding={x}") for x in ("learnable", "sine")
    )
    assert isinstance(sine, CCT)
    assert isinstance(learnable, CCT)
    assert learnable.pos_embed.requires_grad
    assert not sine.pos_embed.requires_grad
    position = 5
    i = 7
    angle = position / 10000 ** (2 * i / 128)
    waves = sine.pos_embed[0, position, 2 * i : 2 * i + 2]
    torch.testing.assert_close(waves, torch.tensor([np.sin(angle), np.cos(angle)]).float())


@pytest.mark.parametrize(
    ("row", "last"), [("WRN-40-4", "stages"), ("ResNeXt-29-8x64d", "layer3")], ids=str
)
def test_the_stem_for_small_images_keeps_the_resolution(row: str, last: str):
    built = meta_module(*SIZES["table1", row]["overrides"]).model
    sizes = []
    first = next(m for m in built.modules() if isinstance(m, nn.Conv2d) and m.in_channels == 3)
    for module in (first, built.get_submodule(last)):
        module.register_forward_hook(lambda m, inputs, output: sizes.append(output.shape[-2:]))
    built(torch.zeros(2, 3, 32, 32, device="meta"))
    assert sizes == [(32, 32), (8, 8)]


TIMM_VIT = "model=vit_tiny_patch16_224"
COMPARATOR = ["model=timm", "augmentation=[]"]
RESNET = "model.architecture=resnet18"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([TIMM_VIT, "model.architecture=vit_nope"], "model.architecture=vit_nope"),
        ([TIMM_VIT, "model.pretrained=nope"], "model.pretrained=nope"),
        ([TIMM_VIT, "model.depth=5"], "model.depth=5"),
        ([TIMM_VIT, "model.patch_size=8"], "model.patch_size=8"),
        (["model.image_size=16", "augmentation.vtm.kappa=17"], "kappa=17"),
        (
            [*COMPARATOR, "model.stem=cifar", "model.architecture=mobilenetv3_small_050"],
            "stem=cifar",
        ),
        ([*COMPARATOR, "+model.options.nope=1", RESNET], "model.options"),
        ([*COMPARATOR, "model.architecture=resnet_nope"], "resnet_nope"),
        ([*COMPARATOR[:1], RESNET, "augmentation=[htm]"], "htm"),
        (COMPARATOR, "model.architecture"),
    ],
    ids=str,
)
def test_models_that_cannot_be_built_are_refused_in_one_line(
    here: Path, words: list[str], part: str
):
    result = train(*words, "device=cpu")
    assert (result.status, len(result.lines)) == (2, 1), result
    assert part in result.err
    assert not [*here.iterdir()]
