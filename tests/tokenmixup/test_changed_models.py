"""An attached model is the model, whatever is done to it before or after `attach`.

Each row is a change. With HTM, VTM and manifold mixup, all is as if it had been made before
`attach`. With tau=0, logits and gradients are the changed model's own. And where weights can say
the same, what HTM compares, masks, labels and logits are those of a model with such weights.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
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
    """A change, which may return another model, and perhaps the same merged into the weights."""

    change: Callable[[Any, Patch], Any]
    merge: Callable[[Any], Any] | None = None
    build: Callable[[], Any] = vit
    adapter: Adapter | None = None
    settings: dict[str, Any] = BOTH


ROWS: dict[str, Row] = {}


def row(merge: Callable[[Any], Any] | None = None, **more: Any) -> Any:
    def enter(change: Any) -> Any:
        ROWS[change.__name__] = Row(change, merge, **more)
        return change

    return enter


@row()
def block_inserted(model: Any, patch: Patch) -> None:
    model.blocks.insert(0, randomized(copy.deepcopy(model.blocks[3])))


@row()
def blocks_removed_and_reordered(model: Any, patch: Patch) -> None:
    model.blocks = nn.Sequential(*reversed(model.blocks[1:]))


@row()
def attention_replaced(model: Any, patch: Patch) -> None:
    model.blocks[2].attn = randomized(Attention(24, num_heads=3, qkv_bias=True))
    model.blocks[1].attn.qkv = randomized(nn.Linear(24, 72))


@row()
def composed_attention(model: Any, patch: Patch) -> None:
    for index in (0, 1):  # a source of VTM, and HTM's
        model.blocks[index].attn.fused_attn = False


@row()
def hook_on_a_block(model: Any, patch: Patch) -> None:
    model.blocks[1].register_forward_pre_hook(lambda block, args: (args[0] * 1.5,))
    model.blocks[2].register_forward_hook(lambda block, args, out: out * 1.5)


@row()
def forward_of_a_block_wrapped(model: Any, patch: Patch) -> None:
    own = model.blocks[1].forward
    model.blocks[1].forward = functools.partial(lambda *args, **given: own(*args, **given) * 1.5)


@row()
def stem_replaced_and_head_reset(model: Any, patch: Patch) -> None:
    model.patch_embed = randomized(copy.deepcopy(model.patch_embed))
    model.norm_pre = randomized(nn.LayerNorm(24))
    model.reset_classifier(CLASSES)
    model.head = nn.Sequential(model.head, nn.Tanh())


@row(build=encoded, adapter=ENCODED)
def layer_of_an_encoder_replaced(model: Any, patch: Patch) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, norm_first=True, batch_first=True, dropout=0.0)
    model.encoder.layers[1] = randomized(layer)


@row(build=hf_vit, settings=HTM_ALONE)
def eager_attention(model: Any, patch: Patch) -> None:
    model.set_attn_implementation("eager")


# Changes that weights can say as well


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


@row(each_block(lambda block: with_product(block.attn.qkv)))
def low_rank_adapters(model: Any, patch: Patch) -> None:
    for block in model.blocks:
        block.attn.qkv = LowRank(block.attn.qkv)


@row(lambda model: scaled(model.blocks[1].attn.qkv, bias=1))
def weight_parametrized(model: Any, patch: Patch) -> None:
    parametrize.register_parametrization(model.blocks[1].attn.qkv, "weight", Times())


@row(lambda model: None)
def backward_hooks(model: Any, patch: Patch) -> None:
    for module in (model.blocks[1].attn, model.blocks[1].attn.qkv):
        module.register_full_backward_hook(lambda module, inner, outer: None)


@row(each_block(lambda block: scaled(block.attn.proj)))
def attention_patched_in_its_class(model: Any, patch: Patch) -> None:
    patch.setattr(Attention, "forward", louder(Attention.forward))


@row(each_block(lambda block: block.register_forward_hook(lambda _, args, out: 1.5 * out)))
def block_patched_in_its_class(model: Any, patch: Patch) -> None:
    patch.setattr(Block, "forward", louder(Block.forward))


def merged_outputs(model: Any) -> None:
    for layer in model.encoder.layers:
        scaled(layer.self_attn.out_proj)


@row(merged_outputs, build=encoded, adapter=ENCODED)
def torchs_attention_patched(model: Any, patch: Patch) -> None:
    kind = nn.MultiheadAttention
    patch.setattr(kind, "forward", louder(kind.forward))


def merged_queries(model: Any) -> None:
    for layer in model.vit.layers:
        scaled(layer.attention.q_proj)


def sharper(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **given: Any) -> Any:
    out = F.scaled_dot_product_attention(1.5 * q, k, v, scale=given["scaling"])
    return out.transpose(1, 2), None


@row(merged_queries, build=hf_vit)
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


@row(merged_keys, build=hf_vit)
def heads_that_share_their_keys(model: Any, patch: Patch) -> None:
    transformers.AttentionInterface.register("sharing", sharing)
    model.config._attn_implementation = "sharing"


@row(lambda model: model.set_attn_implementation("eager"), build=hf_vit, settings=HTM_ALONE)
def maps_asked_for(model: Any, patch: Patch) -> None:
    model.set_attn_implementation("eager")
    model.config.output_attentions = True


def attached(of: Row, model: Any, **settings: Any) -> TokenMixup:
    torch.manual_seed(0)
    return attach(model, CLASSES, adapter=of.adapter, **settings).train()


def changed(of: Row, model: Any, patch: Patch) -> Any:
    torch.manual_seed(2)
    other = of.change(model, patch)
    if other is None:
        return model
    return other


class Step(NamedTuple):
    output: Any
    gradients: dict[str, Tensor]  # of the model


def step_of(module: TokenMixup) -> Step:
    torch.manual_seed(5)
    output = module.train()(*batch())
    training_loss(output).backward()
    return Step(output, gradients_of(module.model))


def changed_step(of: Row, is_late: bool, **settings: Any) -> Step:
    """A step of a model that is changed before `attach`, or after a pass that has remembered it."""
    with Patch.context() as patch:
        if not is_late:
            return step_of(attached(of, changed(of, of.build(), patch), **settings))
        module = attached(of, of.build(), **settings)
        module(*batch())
        module.model = changed(of, module.model, patch)
        return step_of(module)


def assert_same_outputs(ours: Any, theirs: Any) -> None:
    assert_close(ours[:2], theirs[:2], rtol=1e-5, atol=1e-5)
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(one.mask, other.mask)
        assert one.mask.any()
        assert_close(one.saliency, other.saliency, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ROWS)
def test_a_change_is_as_one_before_attach_and_as_its_like_in_the_weights(name: str):
    of = ROWS[name]
    settings = {**of.settings, "manifold_mixup": {"layers": [0, 1, 2]}}
    late = changed_step(of, True, **settings)
    early = changed_step(of, False, **settings)
    assert_same_outputs(late.output, early.output)
    assert_close(late.gradients, early.gradients, rtol=1e-5, atol=1e-5)
    if of.merge is not None:
        merged = of.build()
        of.merge(merged)
        assert_same_outputs(late.output, step_of(attached(of, merged, **settings)).output)


@pytest.mark.parametrize("name", ROWS)
def test_a_changed_model_is_the_plain_one_where_nothing_mixes(name: str):
    of = ROWS[name]
    output, gradients = changed_step(of, True, htm=PLAIN)
    images, targets = batch()
    with Patch.context() as patch:
        plain = changed(of, of.build(), patch).train()
        torch.manual_seed(5)
        logits = logits_of(plain(images))
        F.cross_entropy(logits, targets).backward()
    assert_close(output.logits, logits, rtol=1e-5, atol=1e-5)
    assert_close(gradients, gradients_of(plain), rtol=1e-5, atol=1e-5)
