"""An attached model is the model, whatever is done to it before or after `attach`.

Each row is a surgery. Off: with tau=0, logits and gradients are the plain model's. On: with HTM,
VTM and manifold mixup, all is as if it had been done before `attach`.
A twin is a change of the attention beside the same model with the change merged into its weights:
what HTM compares, masks, labels and logits are the same.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torchvision
import transformers
from timm.layers import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.testing import assert_close

from tests.conftest import CLASSES, gradients_of
from tests.tokenmixup.models import (
    BOTH,
    ENCODED,
    batch,
    encoded,
    hf_vit,
    logits_of,
    randomized,
    vit,
)
from tokenmixup import Adapter, TokenMixup, attach, training_loss

HTM_ALONE: dict[str, Any] = {"htm": BOTH["htm"]}  # for attention by a softmax of its own
PLAIN: dict[str, Any] = {**BOTH["htm"], "tau": 0.0}
Patch = pytest.MonkeyPatch


class Row(NamedTuple):
    """A surgery, which may return another model."""

    change: Callable[[Any], Any]
    build: Callable[[], Any] = vit
    adapter: Adapter | None = None
    settings: dict[str, Any] = BOTH


ROWS: dict[str, Row] = {}


def row(**more: Any) -> Any:
    def enter(change: Any) -> Any:
        ROWS[change.__name__] = Row(change, **more)
        return change

    return enter


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
def composed_attention(model: Any) -> None:
    for index in (0, 1):  # a source of VTM, and HTM's
        model.blocks[index].attn.fused_attn = False


@row()
def hook_on_a_block(model: Any) -> None:
    model.blocks[1].register_forward_pre_hook(lambda block, args: (args[0] * 1.5,))
    model.blocks[2].register_forward_hook(lambda block, args, out: out * 1.5)


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


@row(build=hf_vit, settings=HTM_ALONE)
def eager_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def module_of(of: Any, model: Any, **settings: Any) -> TokenMixup:
    torch.manual_seed(0)
    return attach(model, CLASSES, adapter=of.adapter, **settings).train()


def changed(of: Row, model: Any) -> Any:
    torch.manual_seed(2)
    other = of.change(model)
    if other is None:
        return model
    return other


def operated(of: Row, module: TokenMixup) -> TokenMixup:
    """Runs a pass, so that whatever is remembered is old, and changes the model."""
    module(*batch())
    module.model = changed(of, module.model)
    return module.train()


class Step(NamedTuple):
    output: Any
    gradients: dict[str, Tensor]  # of the model


def step_of_module(module: TokenMixup) -> Step:
    torch.manual_seed(5)
    output = module(*batch())
    training_loss(output).backward()
    return Step(output, gradients_of(module.model))


def assert_same(ours: Step, theirs: Step) -> None:
    assert_close(ours.output[:2], theirs.output[:2], rtol=1e-5, atol=1e-5)
    assert_close(ours.gradients, theirs.gradients, rtol=1e-5, atol=1e-5)
    for one, other in zip(ours.output.layers, theirs.output.layers, strict=True):
        assert torch.equal(one.mask, other.mask)
        assert one.mask.any()
        assert_close(one.saliency, other.saliency, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ROWS)
def test_a_model_that_has_been_changed_is_the_model(name: str):
    of = ROWS[name]
    settings = {**of.settings, "manifold_mixup": {"layers": [0, 1, 2]}}
    late = operated(of, module_of(of, of.build(), **settings))
    early = module_of(of, changed(of, of.build()), **settings)
    assert_same(step_of_module(late), step_of_module(early))


@pytest.mark.parametrize("name", ROWS)
def test_a_model_that_has_been_changed_is_the_plain_one_where_nothing_mixes(name: str):
    of = ROWS[name]
    module = operated(of, module_of(of, of.build(), htm=PLAIN))
    output, gradients = step_of_module(module)
    plain = changed(of, of.build()).train()
    images, targets = batch()
    torch.manual_seed(5)
    logits = logits_of(plain(images))
    F.cross_entropy(logits, targets).backward()
    assert_close(output.logits, logits, rtol=1e-5, atol=1e-5)
    assert_close(gradients, gradients_of(plain), rtol=1e-5, atol=1e-5)


# Twins


class Twin(NamedTuple):
    """A change, made also by a patch of a class, and the same merged into the weights."""

    change: Callable[[Any, Patch], Any]
    merge: Callable[[Any], Any]
    build: Callable[[], Any] = vit
    adapter: Adapter | None = None
    settings: dict[str, Any] = BOTH


TWINS: dict[str, Twin] = {}


def twin(merge: Callable[[Any], Any], **more: Any) -> Any:
    def enter(change: Any) -> Any:
        TWINS[change.__name__] = Twin(change, merge, **more)
        return change

    return enter


class LowRank(nn.Module):
    """A frozen projection and a product of low rank beside it (LoRA)."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(0.3 * torch.randn(2, base.in_features, generator=generator))
        self.up = nn.Parameter(0.3 * torch.randn(base.out_features, 2, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Times(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * x


def scaled(layer: nn.Linear, bias: float = 1.5) -> None:
    with torch.no_grad():
        layer.weight.mul_(1.5)
        layer.bias.mul_(bias)


def louder(own: Callable[..., Any]) -> Callable[..., Any]:
    """A `forward` whose output, or the first of several, is larger."""

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **given: Any) -> Any:
        out = own(self, *args, **given)
        if isinstance(out, Tensor):
            return 1.5 * out
        first, *others = out
        return 1.5 * first, *others

    return forward


def each_block(do: Callable[[Any], None]) -> Callable[[Any], None]:
    def do_to_each(model: Any) -> None:
        for block in model.blocks:
            do(block)

    return do_to_each


def with_product(base: nn.Linear) -> None:
    low = LowRank(base)
    with torch.no_grad():
        base.weight.add_(low.up @ low.down)


@twin(each_block(lambda block: with_product(block.attn.qkv)))
def low_rank_adapters(model: Any, patch: Patch) -> None:
    for block in model.blocks:
        block.attn.qkv = LowRank(block.attn.qkv)


@twin(lambda model: scaled(model.blocks[1].attn.qkv, bias=1))
def weight_parametrized(model: Any, patch: Patch) -> None:
    parametrize.register_parametrization(model.blocks[1].attn.qkv, "weight", Times())


@twin(lambda model: None)
def backward_hooks(model: Any, patch: Patch) -> None:
    for module in (model.blocks[1].attn, model.blocks[1].attn.qkv):
        module.register_full_backward_hook(lambda module, inner, outer: None)


@twin(each_block(lambda block: scaled(block.attn.proj)))
def attention_patched_in_its_class(model: Any, patch: Patch) -> None:
    patch.setattr(Attention, "forward", louder(Attention.forward))


@twin(each_block(lambda block: block.register_forward_hook(lambda _, args, out: 1.5 * out)))
def block_patched_in_its_class(model: Any, patch: Patch) -> None:
    patch.setattr(Block, "forward", louder(Block.forward))


def merged_outputs(model: Any) -> None:
    for layer in model.encoder.layers:
        scaled(layer.self_attn.out_proj)


@twin(merged_outputs, build=encoded, adapter=ENCODED)
def torchs_attention_patched(model: Any, patch: Patch) -> None:
    kind = nn.MultiheadAttention
    patch.setattr(kind, "forward", louder(kind.forward))


def merged_queries(model: Any) -> None:
    for layer in model.vit.layers:
        scaled(layer.attention.q_proj)


def sharper(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **given: Any) -> Any:
    out = F.scaled_dot_product_attention(1.5 * q, k, v, scale=given["scaling"])
    return out.transpose(1, 2), None


@twin(merged_queries, build=hf_vit)
def attention_function_registered(model: Any, patch: Patch) -> None:
    transformers.AttentionInterface.register("sharper", sharper)
    model.config._attn_implementation = "sharper"


def merged_keys(model: Any) -> None:
    """Heads 0 and 1 have the keys and values of head 0, heads 2 and 3 those of head 2."""
    for layer in model.vit.layers:
        for projection in (layer.attention.k_proj, layer.attention.v_proj):
            for parameter in projection.parameters():
                heads = parameter.data.unflatten(0, (4, -1))
                heads[1::2] = heads[::2].clone()


def sharing(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **given: Any) -> Any:
    out = F.scaled_dot_product_attention(q, k[:, ::2], v[:, ::2], enable_gqa=True)
    return out.transpose(1, 2), None


@twin(merged_keys, build=hf_vit)
def heads_that_share_their_keys(model: Any, patch: Patch) -> None:
    transformers.AttentionInterface.register("sharing", sharing)
    model.config._attn_implementation = "sharing"


@twin(lambda model: model.set_attn_implementation("eager"), build=hf_vit, settings=HTM_ALONE)
def maps_asked_for(model: Any, patch: Patch) -> None:
    model.set_attn_implementation("eager")
    model.config.output_attentions = True


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", TWINS)
def test_a_changed_attention_mixes_as_the_same_merged_into_its_weights(name: str, late: bool):
    of = TWINS[name]
    settings = {**of.settings, "manifold_mixup": {"layers": [0]}}
    images, targets = batch()
    merged = of.build()
    of.merge(merged)
    expected = module_of(of, merged, **settings)
    torch.manual_seed(5)
    theirs = expected(images, targets)
    model = of.build()
    with pytest.MonkeyPatch.context() as patch:
        if not late:
            of.change(model, patch)
        module = module_of(of, model, **settings)
        if late:
            module(images, targets)
            of.change(model, patch)
        torch.manual_seed(5)
        ours = module(images, targets)
        training_loss(ours).backward()
        with torch.no_grad():
            plain = logits_of(model.eval()(images))
            assert torch.equal(module.eval()(images), plain)
    assert_close(ours[:2], theirs[:2], rtol=1e-5, atol=1e-5)
    (one,) = ours.layers
    (other,) = theirs.layers
    assert torch.equal(one.mask, other.mask)
    assert one.mask.any()
    assert_close(one.saliency, other.saliency, rtol=1e-4, atol=1e-6)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in trained)
