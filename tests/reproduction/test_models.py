from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from reproduction.cli import compose
from reproduction.errors import UserError
from reproduction.models.build import build_model, build_module, count_macs, count_parameters
from reproduction.models.cct import CCT
from reproduction.models.names import in_our_names
from reproduction.parse import parse
from tests.conftest import small_cct
from tokenmixup import Output, attach

RECORDED = Path(__file__).parents[1] / "fixtures" / "cct_vtm.npz"


def count(classes: int, *overrides: str) -> int:
    config = parse(compose("train", list(overrides)).raw)
    with torch.device("meta"):
        return count_parameters(build_module(config.model, config.augmentation, classes))


@pytest.mark.parametrize(
    ("model", "stack", "classes", "parameters"),
    [
        ("cct_7_3x1", "[]", 100, 3_783_269),
        ("cct_7_3x1", "[htm]", 100, 3_809_226),
        ("cct_7_3x1", "[vtm]", 100, 3_783_269),
        ("cct_7_3x1", "[htm,vtm]", 100, 3_809_226),
        ("vit_base_patch16_224", "[]", 1000, 86_567_656),
        ("vit_base_patch16_224", "[htm]", 1000, 87_336_656),
        ("vit_tiny_patch16_224", "[vtm]", 1000, 5_717_416),
    ],
)
def test_parameters_are_those_of_the_paper(model, stack, classes, parameters):
    assert count(classes, f"model={model}", f"augmentation={stack}") == parameters


def test_macs_of_cct_7_3x1_count_attention_too():
    config = parse(compose("train", ["model=cct_7_3x1"]).raw)
    assert count_macs(build_model(config.model, 100), 32) == pytest.approx(1.1816e9, rel=1e-4)


@pytest.mark.parametrize("option", ["learnable", "sine"])
def test_cct_positions_are_what_they_are_called(option):
    config = parse(compose("train", [f"model.positional_embedding={option}"]).raw)
    model = build_model(config.model, 10)
    assert isinstance(model, CCT)
    assert model.pos_embed.requires_grad == (option == "learnable")
    if option == "sine":
        position, i = 5, 7
        angle = position / 10000 ** (2 * i / 128)
        assert float(model.pos_embed[0, position, 2 * i]) == pytest.approx(np.sin(angle), abs=1e-5)
        found = float(model.pos_embed[0, position, 2 * i + 1])
        assert found == pytest.approx(np.cos(angle), abs=1e-5)


def test_cct_stochastic_depth_rises_linearly():
    rates = [
        getattr(block.drop_path, "drop_prob", 0.0) for block in small_cct(drop_path=0.3).blocks
    ]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_cct_with_vtm_equals_the_published_model():
    """Logits, loss and gradient norms that the published code computed on a small model."""
    arrays = dict(np.load(RECORDED))
    model = CCT(
        num_classes=10,
        image_size=32,
        embed_dim=32,
        depth=4,
        num_heads=2,
        mlp_ratio=2.0,
        conv_layers=2,
        positional_embedding="learnable",
        drop=0.0,
        attn_drop=0.0,
        drop_path=0.0,
    )
    state = {
        k.removeprefix("state/"): torch.from_numpy(v)
        for k, v in arrays.items()
        if k.startswith("state/")
    }
    model.load_state_dict(in_our_names(state))
    vtm = {"layer": int(arrays["setting/vertical_layer"]), "kappa": int(arrays["setting/kappa"])}
    module = attach(model, 10, vtm=vtm)
    images, targets = (torch.from_numpy(arrays[key]) for key in ("images", "targets"))

    def close(found: Tensor, key: str) -> None:
        expected = torch.from_numpy(arrays[key])
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()

    with torch.no_grad():
        close(module.eval()(images), "eval_logits")
    output = module.train()(images, targets)
    assert isinstance(output, Output)
    close(output.logits, "train_logits")
    loss = torch.nn.functional.cross_entropy(output.logits, output.targets)
    assert loss.item() == pytest.approx(float(arrays["train_loss"]), rel=1e-5)
    loss.backward()
    norm = model.tokenizer.conv_layers[0][0].weight.grad.norm()  # type: ignore[union-attr, index]
    expected = float(arrays["grad_norm/tokenizer.conv_layers.0.0.weight"])
    assert float(norm) == pytest.approx(expected, rel=3e-4)


def tiny_vit(*overrides: str):
    return parse(compose("train", ["model=vit_tiny_patch16_224", *overrides]).raw).model


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.architecture=vit_nope", "model.architecture=vit_nope"),
        ("model.pretrained=nope", "tags of vit_tiny_patch16_224 are .*augreg_in21k"),
        ("model.depth=5", "model.depth=5: .* has 12 blocks"),
    ],
)
def test_vit_refuses_what_timm_does_not_have(override, message):
    with pytest.raises(UserError, match=message):
        build_model(tiny_vit(override), 10)


def test_vit_says_what_to_do_when_the_weights_cannot_be_downloaded(monkeypatch):
    def refuse(*args, **settings):
        raise OSError("no route to host")

    monkeypatch.setattr("timm.create_model", refuse)
    with pytest.raises(UserError, match=r"no route to host.*model.weights"):
        build_model(tiny_vit("model.pretrained=augreg_in21k_ft_in1k"), 1000)
