"""Settings that `attach` refuses: in one line that begins with the key and its value."""

import math
from typing import Any

import pytest
import timm
import torch
import torchvision

from tests.conftest import CLASSES, small_cct, small_vit
from tokenmixup import VTM, attach

NAN, INF = math.nan, math.inf
VALUES: dict[str, dict[str, list[Any]]] = {  # beside layer=1
    "htm": {
        "layer": [1.0, 4, [1, 9], [1, 1], []],
        "tau": [-1.0, NAN, "2"],
        "rho": [-0.1, 1.5, NAN, [0.1, 0.2]],
        "score_loss_weight": [-1.0, INF],
        "stop_gradient": ["no"],
        "pooling": ["max", "class_token"],  # the CCT has none
        "detector": ["salient"],
        "rollout_steps": [-1],
        "matching": ["best"],
        "labels": ["all"],
        "mask_rule": ["own"],
        "order": ["front"],
        "layr": [1],
    },
    "vtm": {
        "layer": [4, 0, [0, 2]],
        "kappa": [2.5, 0, [3, 1]],
        "class_token_offset": ["published"],
    },
    "manifold_mixup": {"layers": [1, [], [1, 1], [9]], "alpha": [0.0, "1"]},
}


def refused(model: Any, begins: str, **told: Any) -> None:
    with pytest.raises(ValueError) as error:
        attach(model, **{"num_classes": CLASSES, **told})
    assert str(error.value).startswith(begins) and "\n" not in str(error.value)


@pytest.mark.parametrize("method", VALUES)
def test_a_value_out_of_range_is_named(method: str):
    for option, values in VALUES[method].items():
        for value in values:
            given = {} if method == "manifold_mixup" else {"layer": 1}
            told: Any = {method: {**given, option: value}}
            refused(small_cct(), f"{method}.{option}", **told)


@pytest.mark.parametrize(
    ("begins", "told"),
    [
        ("htm=True", {"htm": True}),
        ("htm=VTM", {"htm": VTM(layer=1)}),
        ("htm.layer: no value", {"htm": {}}),
        ("htm.tau", {"htm": {"layer": [1, 2], "tau": [1, 2, 3]}}),
        ("htm.layer=[1, 2]", {"htm": {"layer": [1, 2], "order": "published"}}),
        ("htm.layer=[1, 2]", {"htm": {"layer": [1, 2], "detector": "gradient"}}),
        ("htm.rollout_steps=1", {"htm": {"layer": 1, "rollout_steps": 1, "detector": "random"}}),
        ("htm.layer + htm.rollout_steps=4", {"htm": {"layer": 2, "rollout_steps": 2}}),
        ("vtm.kappa", {"vtm": {"layer": [1, 2], "kappa": [3, 0]}}),
        ("checkpoint_blocks='no'", {"checkpoint_blocks": "no"}),
        *((f"num_classes={n!r}", {"num_classes": n}) for n in (0, "10", 2.0, True)),
    ],
)
def test_settings_that_do_not_go_together_are_named(begins: str, told: dict[str, Any]):
    refused(small_cct(), begins, **told)


def test_the_number_of_classes_is_that_of_the_head():
    models: list[Any] = [small_cct(), small_vit()]
    models.append(torchvision.models.VisionTransformer(32, 8, 3, 2, 32, 64, num_classes=CLASSES))
    with torch.device("meta"):
        for name in ("deit_tiny_distilled_patch16_224", "resnet18", "swin_tiny_patch4_window7_224"):
            models.append(timm.create_model(name, num_classes=CLASSES))
    for model in models:
        refused(model, "num_classes=7", num_classes=7)
    attach(models[3], CLASSES)
    model: Any = small_vit()
    model.reset_classifier(0)  # another head follows outside of the model
    attach(model, 100)
