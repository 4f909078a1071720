"""Complete models of the published code, reproduced with the published switches.

Arrays agree when max |a - b| <= 1e-4 max |b|, gradient norms to 3e-4. Norms recorded below 1e-6
(gradients of a shift, to which softmax is invariant) are 0 up to rounding.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from reproduction.models.names import convert_names
from tests.programs import as_recorded
from tests.reproduction.recorded import Recorded
from tokenmixup import Output, TokenMixup, attach, training_loss

NAMES = [
    f"{model}_{stack}"
    for model in ("cct", "vit")
    for stack in ("base", "htm", "vtm", "htm_then_vtm", "vtm_then_htm")
] + ["cct_htm_stopgrad"]
SCORENET = {  # published name -> ours
    "small_h_attention_pool": "pool",
    "small_h_fc": "head",
    "scorenet": "head",
}


def published_module(recorded: Recorded, **changes: dict[str, Any]) -> TokenMixup:
    """Builds the recorded model with the published switches; `changes` by method override them."""
    settings = {key: value.item() for key, value in recorded.under("setting").items()}
    stack: dict[str, dict[str, Any]] = {}
    if settings.get("horizontal_mixup"):
        stack["htm"] = {
            "layer": settings["horizontal_layer"],
            "tau": 10 * settings["tau"],  # published: cross-entropy times 0.1
            "rho": settings["rho"],
            # the published ViT always stops the gradient
            "stop_gradient": settings.get("scorenet_stopgrad", not recorded.is_cct),
            "mask_rule": "published",
            "order": "published",
        }
    if settings.get("vertical_mixup"):
        stack["vtm"] = {
            "layer": settings["vertical_layer"],
            "kappa": settings["kappa"],
            "class_token_offset": "paper" if recorded.is_cct else "published",
        }
    model = recorded.build()
    model.load_state_dict(convert_names(recorded.under("state")))
    module = attach(model, 10, **{key: x | changes.get(key, {}) for key, x in stack.items()})
    for scorenet in module.scorenets.values():
        scorenet.load_state_dict(scorenet_state(recorded.under("state")))
    return module


def scorenet_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the parameters of ScoreNet under our names."""
    ours = {}
    for name, value in state.items():
        *_, part, leaf = name.split(".")
        if part in SCORENET:
            ours[f"{SCORENET[part]}.{leaf}"] = value
    return ours


def gradient_norms(module: TokenMixup, names: list[str], state: dict[str, Tensor]) -> list[Tensor]:
    """Returns the gradient norms by published parameter, several of which may form one of ours.

    To trace them, the values of each published parameter are replaced by its index.
    """
    numbered = {name: torch.full_like(state[name], i) for i, name in enumerate(names)}
    ours = {f"model.{key}": value for key, value in convert_names(numbered).items()}
    if module.htm is not None:
        prefix = f"scorenets.{module.htm.layer}"
        ours |= {f"{prefix}.{key}": value for key, value in scorenet_state(numbered).items()}
    squares = torch.zeros(len(names), dtype=torch.float64)
    parameters = dict(module.named_parameters())
    for name, number in ours.items():
        gradient = parameters[name].grad
        assert gradient is not None, name
        squares.index_add_(0, number.flatten().long(), gradient.flatten().double().square())
    return list(squares.sqrt())


@pytest.mark.parametrize("name", NAMES)
def test_the_published_model_is_reproduced(name: str):
    recorded = Recorded(name)
    module = published_module(recorded)
    images = recorded.tensor("images")
    targets = recorded.tensor("targets")
    with torch.no_grad():
        close(module.eval()(images), recorded.tensor("eval_logits"))
    output = module.train()(images, targets)
    assert isinstance(output, Output)
    close(output.logits, recorded.tensor("train_logits"))
    close(output.targets, recorded.tensor("train_targets"))
    if "score_logits" in recorded.arrays:
        close(output.layers[0].score_logits, recorded.tensor("score_logits"))
        expected = float(recorded.arrays["difficulty"].mean())
        assert float(output.stats["difficulty"]) == pytest.approx(expected, rel=1e-4)
        assert 0 < output.stats["easy_samples"] < len(images)
        assert output.stats["mixed_tokens"] > 0
    if "mean_tokens_mixed" in recorded.arrays:
        mixed = float(recorded.arrays["mean_tokens_mixed"])
        tokens = float(as_recorded(output.stats)["mixed_tokens"])
        assert tokens == pytest.approx(mixed, rel=1e-4)
    loss = training_loss(output, float(recorded.arrays["score_loss_weight"]))
    assert loss.item() == pytest.approx(float(recorded.arrays["train_loss"]), rel=1e-4)
    loss.backward()
    norms = recorded.under("grad_norm")
    assert norms.keys() == recorded.under("state").keys()
    our_norms = gradient_norms(module, list(norms), recorded.under("state"))
    for key, ours, theirs in zip(norms, our_norms, norms.values(), strict=True):
        if theirs < 1e-6:
            assert ours < 1e-6, key
        else:
            assert float(ours) == pytest.approx(float(theirs), rel=3e-4), key


@pytest.mark.parametrize(
    ("name", "switch"),
    [
        ("cct_htm_then_vtm", "mask_rule"),
        ("cct_htm_then_vtm", "order"),
        ("vit_htm_then_vtm", "mask_rule"),
        ("vit_htm_then_vtm", "order"),
        ("vit_htm_then_vtm", "class_token_offset"),
    ],
)
def test_every_published_switch_is_needed(name: str, switch: str):
    recorded = Recorded(name)
    paper_rule = {"mask_rule": "paper", "order": "in_place", "class_token_offset": "paper"}[switch]
    method = "vtm" if switch == "class_token_offset" else "htm"
    module = published_module(recorded, **{method: {switch: paper_rule}})
    with torch.no_grad():
        output = module.train()(recorded.tensor("images"), recorded.tensor("targets"))
    assert isinstance(output, Output)
    expected = recorded.tensor("train_logits")
    difference = float((output.logits - expected).abs().max() / expected.abs().max())
    assert difference > 1e-3


def close(actual: Tensor, expected: Tensor) -> None:
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()
