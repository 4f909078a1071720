"""An attached model is the model, whatever is done to it before or after `attach`.

Each row is a surgery. Off: with tau=0, logits and gradients are the plain model's. On: with HTM,
VTM and manifold mixup at each layer in turn, all is as if it had been done before `attach`.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from timm.layers import Attention, LayerScale
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from tests.conftest import CLASSES
from tests.tokenmixup.models import ENCODED, Encoded, huggingface
from tokenmixup import Adapter, TokenMixup, attach, training_loss

HTM: dict[str, Any] = {"layer": 1, "rho": 0.0, "score_loss_weight": 0.0}
BOTH: dict[str, Any] = {
    "htm": {**HTM, "tau": float("inf")},
    "vtm": {"layer": 2, "kappa": 2},
}
Patch = pytest.MonkeyPatch


def randomized(model: Any) -> Any:
    """Gives new parameters values that matter."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def vit(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 3, "depth": 4}
    told = {**sizes, "num_classes": CLASSES, **options}
    return randomized(timm.create_model("vit_tiny_patch16_224", **told))


def encoded() -> Any:
    torch.manual_seed(0)
    return randomized(Encoded())


def hf_vit() -> Any:
    torch.manual_seed(0)
    return randomized(huggingface("ViT"))


class Row(NamedTuple):
    """A surgery, which may return another model."""

    change: Callable[[Any], Any]
    build: Callable[[], Any] = vit
    adapter: Adapter | None = None


ROWS: dict[str, Row] = {}


def row(build: Any = vit, adapter: Adapter | None = None) -> Any:
    def enter(change: Any) -> Any:
        ROWS[change.__name__] = Row(change, build, adapter)
        return change

    return enter


class Scaled(nn.Module):
    """A layer with a factor on its output, as tuning of norms has it."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.base_layer, self.factor = layer, nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) * self.factor


@row()
def nothing(model: Any) -> None:
    pass


@row()
def norms_replaced(model: Any) -> None:
    for block in model.blocks:
        block.norm1 = Scaled(block.norm1)


@row()
def block_inserted(model: Any) -> None:
    model.blocks.insert(0, randomized(copy.deepcopy(model.blocks[3])))


@row()
def blocks_removed_and_reordered(model: Any) -> None:
    model.blocks = nn.Sequential(*reversed(model.blocks[1:]))


@row()
def model_of_other_names(model: Any) -> Any:
    torch.manual_seed(0)
    sizes = (32, 8, 4, 3, 24, 48)
    return randomized(torchvision.models.VisionTransformer(*sizes, num_classes=CLASSES))


@row()
def attention_replaced(model: Any) -> None:
    model.blocks[2].attn = randomized(Attention(24, num_heads=3, qkv_bias=True))
    model.blocks[1].attn.qkv = randomized(nn.Linear(24, 72))


@row()
def queries_normed(model: Any) -> None:
    model.blocks[1].attn.q_norm = randomized(nn.LayerNorm(8))


@row()
def composed_attention(model: Any) -> None:
    for index in (0, 2):
        model.blocks[index].attn.fused_attn = False


@row()
def mlp_removed_and_layers_scaled(model: Any) -> None:
    model.blocks[1].mlp = nn.Identity()
    for block in model.blocks:
        block.ls1 = LayerScale(24, 0.5)


@row()
def dropout_set(model: Any) -> None:
    for block in model.blocks[3:]:
        block.attn.proj_drop.p = block.attn.attn_drop.p = block.mlp.drop1.p = 0.2


@row()
def weights_of_the_rest_normed_and_pruned(model: Any) -> None:
    parametrizations.weight_norm(model.blocks[1].mlp.fc1)
    prune.l1_unstructured(model.blocks[1].attn.proj, "weight", 0.5)


@row()
def blocks_frozen(model: Any) -> None:
    randomized(model.blocks)
    model.blocks[:2].requires_grad_(False)


@row()
def hook_on_a_block(model: Any) -> None:
    model.blocks[1].register_forward_pre_hook(lambda block, args: (args[0] * 1.5,))
    model.blocks[2].register_forward_hook(lambda block, args, out: out * 1.5)


@row()
def hook_on_an_attentions_output(model: Any) -> None:
    model.blocks[1].attn.register_forward_hook(lambda attn, args, out: out * 1.5)


@row()
def forward_of_a_block_wrapped(model: Any) -> None:
    own = model.blocks[1].forward
    model.blocks[1].forward = functools.partial(lambda *args, **given: own(*args, **given) * 1.5)


@row()
def stem_replaced_and_head_reset(model: Any) -> None:
    model.patch_embed = randomized(copy.deepcopy(model.patch_embed))
    model.norm_pre = randomized(nn.LayerNorm(24))
    model.reset_classifier(CLASSES)
    model.head = nn.Sequential(model.head, nn.Tanh())


@row(build=encoded, adapter=ENCODED)
def layer_of_an_encoder_replaced(model: Any) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, norm_first=True, batch_first=True, dropout=0.0)
    model.encoder.layers[1] = randomized(layer)


@row(build=hf_vit)
def eager_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def batch(pixels: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randn(4, CLASSES, generator=generator).softmax(dim=1)
    return torch.randn(4, 3, pixels, pixels, generator=generator), targets


def module_of(of: Row, model: Any, **settings: Any) -> TokenMixup:
    torch.manual_seed(0)
    return attach(model, CLASSES, adapter=of.adapter, **settings).train()


def changed(of: Row, model: Any) -> Any:
    torch.manual_seed(2)
    other = of.change(model)
    return model if other is None else other


def operated(of: Row, module: TokenMixup) -> TokenMixup:
    """Runs a pass, so that whatever is remembered is old, and changes the model."""
    module(*batch())
    module.model = changed(of, module.model)
    return module.train()


def step(module: Any) -> tuple[Any, dict[str, Tensor]]:
    """Returns the output of a pass, and gradients of the model's parameters by name."""
    images, targets = batch()
    module.zero_grad()
    torch.manual_seed(5)
    if isinstance(module, TokenMixup):
        output, model = module(images, targets), module.model
        training_loss(output).backward()
    else:
        output, model = module(images), module
        output = getattr(output, "logits", output)
        F.cross_entropy(output, targets).backward()
    return output, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: Any, theirs: Any) -> None:
    """Compares outputs of two passes, and gradients."""
    (output, gradients), (expected, others) = ours, theirs
    torch.testing.assert_close(
        (output[:2], gradients), (expected[:2], others), rtol=1e-5, atol=1e-5
    )
    for one, other in zip(output.layers, expected.layers, strict=True):
        assert torch.equal(one.mask, other.mask) and one.mask.any()
        torch.testing.assert_close(one.saliency, other.saliency, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ROWS)
def test_a_model_that_has_been_changed_is_the_model(name: str):
    of = ROWS[name]
    for layer in range(3):
        settings = {**BOTH, "manifold_mixup": {"layers": [layer]}}
        late = operated(of, module_of(of, of.build(), **settings))
        early = module_of(of, changed(of, of.build()), **settings)
        assert_same(step(late), step(early))
    late = operated(of, module_of(of, of.build(), htm={**HTM, "tau": 0.0}))
    output, gradients = step(late)
    plain = step(changed(of, of.build()).train())
    torch.testing.assert_close((output.logits, gradients), plain, rtol=1e-5, atol=1e-5)
