"""The models of the paper: their parameters beside the printed ones, dropout, and parts."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from timm.layers import DropPath, PatchDropout
from torch import nn

from tests.programs import (
    ROOT,
    Overrides,
    initial_model,
    meta_module,
)

PRINTED = yaml.safe_load((ROOT / "tests" / "fixtures" / "paper_sizes.yaml").read_text())
SIZES: dict[tuple[str, str], dict[str, Any]] = {  # table, row -> a model and its size
    (table, row): size for table, sizes in PRINTED.items() for row, size in sizes.items()
}
TOLERANCE = 0.005  # of printed numbers of parameters, which are rounded
WITHOUT_SCORENET = ("table2", "ViT-B/16-224 + HTM + VTM")  # 86.6 million are printed


def count(*overrides: Overrides, classes: int) -> int:
    module = meta_module(overrides, classes=classes)
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("key", SIZES, ids=str)
def test_rows_of_tables_1_and_2_have_the_printed_number_of_parameters(key: tuple[str, str]):
    size = SIZES[key]
    millions = count(size["overrides"], classes=size["classes"]) / 1e6
    printed = size.get("parameters")
    if printed is None:
        return  # the model is built
    digits = len(str(printed).partition(".")[2])
    is_printed = round(millions, digits) == printed
    is_close = abs(millions / printed - 1) <= TOLERANCE
    assert (is_printed or is_close) == (key != WITHOUT_SCORENET), millions


OF_ANY_SIZE = ("timm", "custom")
FILES = [path for path in (ROOT / "conf" / "model").glob("*.yaml") if path.stem not in OF_ANY_SIZE]


@pytest.mark.parametrize("file", sorted(FILES), ids=lambda path: path.stem)
def test_model_files_state_their_number_of_parameters(file: Path):
    text = " ".join(line.strip("# \n") for line in file.open() if line.startswith("#"))
    stated = re.search(r"([\d,]+) parameters with ([\d,]+) classes", text)
    assert stated is not None
    parameters = int(stated[1].replace(",", ""))
    classes = int(stated[2].replace(",", ""))
    assert count(f"model={file.stem}", "augmentation=[]", classes=classes) == parameters


def dropouts(override: str) -> dict[str, float]:
    """The rates of all dropouts of a model in training; blocks are equal and unnumbered."""
    rates: dict[str, Any] = {}
    for name, module in meta_module(override).model.named_modules():
        if isinstance(module, nn.Dropout | PatchDropout | DropPath):
            unnumbered = re.sub(r"blocks\.\d+", "blocks", name)
            rate = getattr(module, "p", type(module))  # the other kinds are named
            assert rates.setdefault(unnumbered, rate) == rate, "blocks differ"
    return rates


PUBLISHED = {
    "pos_drop": 0.1,
    "head_drop": 0,
    "blocks.attn.attn_drop": 0,
    "blocks.attn.proj_drop": 0,
    "blocks.mlp.drop1": 0.1,
    "blocks.mlp.drop2": 0.1,
}


@pytest.mark.parametrize("row", ["baseline", "htm", "vtm", "htm_vtm"])
def test_imagenet_runs_have_the_published_dropout(row: str):
    assert dropouts(f"experiment=table2/imagenet1k_{row}") == PUBLISHED


def test_stochastic_depth_of_a_cct_rises_linearly():
    model: Any = meta_module("model=cct_2_3x2", "model.depth=4", "model.drop_path=0.3").model
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for block in model.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_positions_are_learnable_or_sines_and_cosines():
    learnable: Any = initial_model("model.positional_embedding=learnable")
    sine: Any = initial_model("model.positional_embedding=sine")
    assert learnable.pos_embed.requires_grad
    assert not sine.pos_embed.requires_grad
    position = 5
    i = 7
    angle = position / 10000 ** (2 * i / 128)
    waves = sine.pos_embed[0, position, 2 * i : 2 * i + 2]
    expected = torch.tensor([math.sin(angle), math.cos(angle)])
    torch.testing.assert_close(waves, expected)


@pytest.mark.parametrize(
    ("row", "last"), [("WRN-40-4", "stages"), ("ResNeXt-29-8x64d", "layer3")], ids=str
)
def test_the_stem_for_small_images_keeps_the_resolution(row: str, last: str):
    built = meta_module(SIZES["table1", row]["overrides"]).model
    convolutions = [module for module in built.modules() if isinstance(module, nn.Conv2d)]
    (first,) = [module for module in convolutions if module.in_channels == 3]
    sizes = []

    def note(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        sizes.append(output.shape[-2:])

    first.register_forward_hook(note)
    built.get_submodule(last).register_forward_hook(note)
    built(torch.zeros(2, 3, 32, 32, device="meta"))
    assert sizes == [(32, 32), (8, 8)]
