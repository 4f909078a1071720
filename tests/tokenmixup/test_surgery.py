"""An attached model is the model, whatever is done to it before or after `attach`.

Each row is a surgery. Two properties decide, or the call is refused in one line:
Off: with tau=0 and an empty memory, logits and gradients are the plain model's.
On: with tau=inf, rho=0 and manifold mixup at each layer in turn, all is as if it had been done
before `attach`.
"""

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.data import resolve_model_data_config
from timm.layers import Attention, LayerScale, PatchDropout
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import CLASSES
from tests.tokenmixup.test_adapters import Encoded
from tests.tokenmixup.test_hierarchical import built as built_stages
from tokenmixup import Adapter, TokenMixup, attach, torch_encoder, training_loss
from tokenmixup.adapters import timm_parts
from tokenmixup.vertical import Memory

INF = float("inf")
SIZES: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 3}
HTM: dict[str, Any] = {"layer": 1, "rho": 0.0, "score_loss_weight": 0.0}
BOTH: dict[str, Any] = {"htm": {**HTM, "tau": INF}, "vtm": {"layer": 2, "kappa": 2}}
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
    told = {**SIZES, "depth": 4, "num_classes": CLASSES, **options}
    return randomized(timm.create_model("vit_tiny_patch16_224", **told))


class Wrapped(nn.Module):
    """A backbone inside of another module, which pools and classifies."""

    def __init__(self, **options: Any):
        super().__init__()
        self.backbone = vit(num_classes=0, global_pool="", **options)
        self.head = randomized(nn.Linear(24, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images)[:, 0])


WRAPPED = Adapter(
    blocks="backbone.blocks",
    norm="norm1",
    attn="attn",
    parts=timm_parts,
    embed_dim=24,
    num_prefix_tokens=1,
    reads_class_token=True,
)


def encoded() -> nn.Module:
    torch.manual_seed(0)
    return randomized(Encoded())


def huggingface(**options: Any) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 3}
    sizes |= {
        "intermediate_size": 48,
        "image_size": 32,
        "patch_size": 8,
        "num_labels": CLASSES,
    } | options
    torch.manual_seed(0)
    return randomized(ViTForImageClassification(ViTConfig(**sizes)))


class Row(NamedTuple):
    """A surgery: what is done to the model, which may be replaced; the reason of a refusal."""

    change: Callable[[Any, Patch], Any]
    refused: str = ""
    build: Callable[[], Any] = vit
    adapter: Adapter | None = None


ROWS: dict[str, Row] = {}


def row(refused: str = "", build: Any = vit, adapter: Adapter | None = None) -> Any:
    def enter(change: Any) -> Any:
        ROWS[change.__name__] = Row(change, refused, build, adapter)
        return change

    return enter


class Scaled(nn.Module):
    """A layer with a factor on its output, as tuning of norms has it."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.base_layer, self.factor = layer, nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) * self.factor


class Adapted(nn.Linear):
    """A projection with something added, as low-rank adapters have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Doubled(Attention):
    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return 2 * super().forward(x)


class Merging(Block):
    """Merges tokens, as classes that are swapped do."""

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return super().forward(x)[:, :-1]


class DropKey(nn.Module):
    p = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Skipping(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self):
            x = x if index == 1 else block(x)
        return x


class Rerunning(nn.Sequential):
    """Recomputes its blocks in the backward pass, by one of torch's two ways."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class AtOnce(Rerunning):
    reentrant = False


# Served: norms, blocks and attentions that are others by now.


@row()
def nothing(model: Any, patch: Patch) -> None:
    pass


@row()
def norm_replaced(model: Any, patch: Patch) -> None:
    model.blocks[1].norm1 = randomized(nn.LayerNorm(24))


@row()
def norms_tuned(model: Any, patch: Patch) -> None:
    for block in model.blocks:
        block.norm1 = Scaled(block.norm1)


@row()
def block_inserted(model: Any, patch: Patch) -> None:
    model.blocks.insert(0, randomized(copy.deepcopy(model.blocks[3])))


@row()
def block_removed(model: Any, patch: Patch) -> None:
    del model.blocks[0]


@row()
def blocks_reordered(model: Any, patch: Patch) -> None:
    model.blocks = nn.Sequential(*reversed(model.blocks))


@row()
def model_replaced(model: Any, patch: Patch) -> Any:
    return randomized(vit())


@row()
def model_of_other_names(model: Any, patch: Patch) -> Any:
    from torchvision.models import VisionTransformer as Other

    torch.manual_seed(0)
    return randomized(Other(32, 8, 4, 3, 24, 48, num_classes=CLASSES))


@row()
def attention_replaced(model: Any, patch: Patch) -> None:
    model.blocks[2].attn = randomized(Attention(24, num_heads=3, qkv_bias=True))


@row()
def projection_replaced(model: Any, patch: Patch) -> None:
    model.blocks[1].attn.qkv = randomized(nn.Linear(24, 72))


@row()
def queries_normed(model: Any, patch: Patch) -> None:
    model.blocks[1].attn.q_norm = randomized(nn.LayerNorm(8))


@row()
def composed_attention(model: Any, patch: Patch) -> None:
    for index in (0, 2):
        model.blocks[index].attn.fused_attn = False


@row()
def layers_scaled(model: Any, patch: Patch) -> None:
    for block in model.blocks:
        block.ls1 = LayerScale(24, 0.5)


@row()
def mlp_removed(model: Any, patch: Patch) -> None:
    model.blocks[1].mlp = nn.Identity()


@row()
def dropout_set(model: Any, patch: Patch) -> None:
    for block in model.blocks:
        block.attn.proj_drop.p = block.attn.attn_drop.p = block.mlp.drop1.p = 0.2


@row()
def weight_normed(model: Any, patch: Patch) -> None:
    parametrizations.weight_norm(model.blocks[1].mlp.fc1)


@row()
def output_pruned(model: Any, patch: Patch) -> None:
    prune.l1_unstructured(model.blocks[1].attn.proj, "weight", 0.5)


@row()
def weights_perturbed(model: Any, patch: Patch) -> None:
    randomized(model.blocks)


@row()
def blocks_frozen(model: Any, patch: Patch) -> None:
    model.blocks[:2].requires_grad_(False)


@row()
def hook_on_a_block(model: Any, patch: Patch) -> None:
    model.blocks[1].register_forward_pre_hook(lambda block, args: (args[0] * 1.5,))
    model.blocks[2].register_forward_hook(lambda block, args, out: out * 1.5)


@row()
def hook_on_an_attentions_output(model: Any, patch: Patch) -> None:
    model.blocks[1].attn.register_forward_hook(lambda attn, args, out: out * 1.5)


@row()
def forward_of_a_block_wrapped(model: Any, patch: Patch) -> None:
    own = model.blocks[1].forward
    model.blocks[1].forward = functools.partial(lambda *args, **given: own(*args, **given) * 1.5)


@row()
def projection_adapted_where_nothing_touches_it(model: Any, patch: Patch) -> None:
    model.blocks[3].attn.qkv = Adapted(24, 72)


@row()
def stem_replaced(model: Any, patch: Patch) -> None:
    model.patch_embed = randomized(copy.deepcopy(model.patch_embed))
    model.norm_pre = randomized(nn.LayerNorm(24))


@row()
def head_reset(model: Any, patch: Patch) -> None:
    model.reset_classifier(CLASSES)
    model.head = nn.Sequential(model.head, nn.Tanh())


@row()
def head_reads_the_mean(model: Any, patch: Patch) -> None:
    model.reset_classifier(CLASSES, global_pool="avg")


@row(build=Wrapped, adapter=WRAPPED)
def backbones_block_copied(model: Any, patch: Patch) -> None:
    model.backbone.blocks[1] = copy.deepcopy(model.backbone.blocks[2])


@row(build=encoded, adapter=torch_encoder("encoder", 32))
def layer_of_an_encoder_replaced(model: Any, patch: Patch) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, norm_first=True, batch_first=True, dropout=0.0)
    model.encoder.layers[1] = randomized(layer)


@row(build=huggingface)
def eager_attention(model: Any, patch: Patch) -> None:
    model.set_attn_implementation("eager")


# Refused: what TokenMixup's own attention would bypass.


@row("Attention has a forward of its own")
def attention_patched_in_place(model: Any, patch: Patch) -> None:
    model.blocks[1].attn.forward = lambda x, **given: x


def foreign(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(self: Any, *args: Any, **given: Any) -> Any:
        return own(self, *args, **given)

    return forward


@row("block . is Block, whose Attention's class got another forward")
def attention_patched_in_its_class(model: Any, patch: Patch) -> None:
    patch.setattr(Attention, "forward", foreign(Attention.forward))


@row("block . is Block, whose class got another forward")
def block_patched_in_its_class(model: Any, patch: Patch) -> None:
    patch.setattr(Block, "forward", foreign(Block.forward))


@row("whose MultiheadAttention's class", build=encoded, adapter=torch_encoder("encoder", 32))
def torchs_attention_patched(model: Any, patch: Patch) -> None:
    patch.setattr(nn.MultiheadAttention, "forward", foreign(nn.MultiheadAttention.forward))


@row("whose ViTAttention's class got another", build=huggingface)
def transformers_attention_patched(model: Any, patch: Patch) -> None:
    kind = type(model.vit.layers[0].attention)
    patch.setattr(kind, "forward", foreign(kind.forward))


@row("config._attn_implementation='mine': its function is not", build=huggingface)
def attention_function_registered(model: Any, patch: Patch) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register("mine", lambda module, q, k, v, *args, **given: (v.mT, None))
    model.config._attn_implementation = "mine"


@row("config.output_attentions=True", build=huggingface)
def maps_asked_for(model: Any, patch: Patch) -> None:
    model.set_attn_implementation("eager")
    model.config.output_attentions = True


@row("block 1 is Block, whose Doubled is not a softmax")
def attention_of_a_subclass(model: Any, patch: Patch) -> None:
    model.blocks[1].attn.__class__ = Doubled


@row("block 2 is Merging, not pre-norm self-attention")
def class_of_a_block_swapped(model: Any, patch: Patch) -> None:
    model.blocks[2].__class__ = Merging


@row("block 1 is Block, whose attn_drop is no plain Dropout without hooks, but DropKey")
def dropout_of_another_class(model: Any, patch: Patch) -> None:
    model.blocks[1].attn.attn_drop = DropKey()


@row("whose attn_drop is no plain Dropout without hooks")
def hook_on_the_attentions_dropout(model: Any, patch: Patch) -> None:
    model.blocks[1].attn.attn_drop.register_forward_hook(lambda module, args, out: out)


@row("block 1 is Block, whose Attention has hooks")
def backward_hook_on_an_attention(model: Any, patch: Patch) -> None:
    model.blocks[1].attn.register_full_backward_hook(lambda module, inner, outer: None)


@row("block 1 is Block, whose Attention has hooks")
def hook_before_an_attention(model: Any, patch: Patch) -> None:
    model.blocks[1].attn.register_forward_pre_hook(lambda attn, args: (args[0] * 2,))


@row("block 1 is Block, whose qkv is Adapted, not a plain Linear")
def projection_adapted(model: Any, patch: Patch) -> None:
    model.blocks[1].attn.qkv = Adapted(24, 72)


@row("block 1 is Block, whose qkv has hooks")
def hook_on_a_projection(model: Any, patch: Patch) -> None:
    model.blocks[1].attn.qkv.register_forward_hook(lambda module, args, out: out)


@row("block 1 is Block, whose qkv has hooks")
def backward_hook_on_a_projection(model: Any, patch: Patch) -> None:
    model.blocks[1].attn.qkv.register_full_backward_hook(lambda module, inner, outer: None)


@row("whose qkv is ParametrizedLinear, not a plain Linear")
def projection_parametrized(model: Any, patch: Patch) -> None:
    parametrizations.weight_norm(model.blocks[1].attn.qkv)


@row("block 0 is Identity, which has no self-attention named attn")
def source_replaced(model: Any, patch: Patch) -> None:
    model.blocks[0] = nn.Identity()


@row("block 1 is Block, whose BatchNorm1d would update its statistics twice")
def batch_norm(model: Any, patch: Patch) -> None:
    model.blocks[1].norm1 = nn.BatchNorm1d(17)


# Refused: blocks that do not run, or run again.


@row(r"block 1 \(Block\) did not run")
def block_skipped(model: Any, patch: Patch) -> None:
    model.blocks = Skipping(*model.blocks)


@row("block 2|blocks 0..1")
def too_few_blocks(model: Any, patch: Patch) -> None:
    model.blocks = model.blocks[:2]


@row("attention over all tokens|no block")
def model_with_stages_instead(model: Any, patch: Patch) -> Any:
    return built_stages("swin")


@row("holds one block more than once")
def block_shared(model: Any, patch: Patch) -> None:
    model.blocks[1] = model.blocks[2]


@row(r"block 0 \(Block\) runs without gradients or under the model's own")
def reentrant_checkpoint(model: Any, patch: Patch) -> None:
    model.blocks = Rerunning(*model.blocks)


@row(r"block 0 \(Block\) runs .* use attach\(\.\.\., checkpoint_blocks=True\)")
def checkpoint_that_is_not_reentrant(model: Any, patch: Patch) -> None:
    model.blocks = AtOnce(*model.blocks)


@row(r"block 0 \(Block\) runs .* under the model's own gradient checkpointing")
def timms_checkpointing(model: Any, patch: Patch) -> None:
    model.set_grad_checkpointing()


@row("which is compiled by itself", build=huggingface)
def layers_compiled_one_by_one(model: Any, patch: Patch) -> None:
    for index, layer in enumerate(model.vit.layers):
        model.vit.layers[index] = torch.compile(layer, backend="eager")


# Refused: tokens that are no patches, and heads that read what nobody told.


@row(r"gets 9 tokens for 16 patches|patch dropout", build=Wrapped, adapter=WRAPPED)
def backbones_patches_dropped(model: Any, patch: Patch) -> None:
    model.backbone.patch_drop = PatchDropout(0.5)


@row(r"block 0 \(Block\) gets 19 tokens for 16 patches, but must get 1 more")
def prompts_behind_the_patches(model: Any, patch: Patch) -> None:
    model.norm_pre.register_forward_hook(lambda m, args, x: torch.cat([x, x[:, :2]], dim=1))


@row("PoolsItself has its own forward_head: an Adapter must say")
def head_of_ones_own(model: Any, patch: Patch) -> None:
    class PoolsItself(VisionTransformer):
        def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
            return self.head(x[:, 1:].mean(dim=1))

    model.__class__ = PoolsItself


@row("TokenLast has its own _pos_embed: an Adapter must say")
def class_token_placed_last(model: Any, patch: Patch) -> None:
    class TokenLast(VisionTransformer):
        def _pos_embed(self, x: Tensor) -> Tensor:
            return torch.cat([x, self.cls_token.expand(len(x), -1, -1)], dim=1)

    model.__class__ = TokenLast


@row("has global_pool='': an Adapter must say")
def pooling_of_ones_own(model: Any, patch: Patch) -> None:
    class PoolsLater(VisionTransformer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, 0]

    model.__class__, model.global_pool = PoolsLater, ""


@row("PoolsItself|VisionTransformer has its own pool: an Adapter must say")
def pooling_patched_in_place(model: Any, patch: Patch) -> None:
    model.pool = lambda x, *args: x[:, -1]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randn(4, CLASSES, generator=generator).softmax(dim=1)
    return torch.randn(4, 3, 32, 32, generator=generator), targets


def module_of(of: Row, model: Any, **settings: Any) -> TokenMixup:
    torch.manual_seed(0)
    return attach(model, CLASSES, adapter=of.adapter, **settings).train()


def step(module: Any, loss_of: Callable[[Any, Tensor], Tensor]) -> list[Any]:
    """Returns tensors of the output, and gradients by name."""
    images, targets = batch()
    module.zero_grad()
    torch.manual_seed(5)
    output = module(images, targets) if isinstance(module, TokenMixup) else module(images)
    loss_of(output, targets).backward()
    model = module.model if isinstance(module, TokenMixup) else module
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    output = getattr(output, "logits", output) if module is model else output
    return [*([output] if isinstance(output, Tensor) else output[:2]), gradients, output]


def operated(of: Row, module: TokenMixup, patch: Patch) -> TokenMixup:
    """Runs a pass, so that whatever is remembered is old, and changes the model."""
    module(*batch())
    module.model = changed(of, module.model, patch)
    return module.train()


def changed(of: Row, model: Any, patch: Patch) -> Any:
    torch.manual_seed(2)
    other = of.change(model, patch)
    return model if other is None else other


@pytest.mark.parametrize("name", [name for name, of in ROWS.items() if not of.refused])
def test_a_model_that_has_been_changed_is_the_model(name: str, monkeypatch: Patch):
    of = ROWS[name]
    for layer in range(3):
        settings = {**BOTH, "manifold_mixup": {"layers": [layer]}}
        late = operated(of, module_of(of, of.build(), **settings), monkeypatch)
        early = module_of(of, changed(of, of.build(), monkeypatch), **settings)
        *ours, _, output = step(late, lambda out, _: training_loss(out))
        *theirs, _, expected = step(early, lambda out, _: training_loss(out))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert torch.equal(output.mask, expected.mask) and output.mask.any()
    with monkeypatch.context() as patch:
        empty_memory(patch)
        settings = {**BOTH, "htm": {**HTM, "tau": 0.0}}
        module = operated(of, module_of(of, of.build(), **settings), patch)
        plain = changed(of, of.build(), patch).train()
        logits, _, ours, _ = step(module, lambda out, targets: training_loss(out))
        expected, theirs, _ = step(plain, cross_entropy)
    torch.testing.assert_close((logits, ours), (expected, theirs), rtol=1e-5, atol=1e-5)


def cross_entropy(out: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(getattr(out, "logits", out), targets)


def empty_memory(patch: Patch) -> None:
    def nothing(memory: Memory, tokens: Tensor, *told: Any) -> None:
        memory.tokens.append(tokens[:, :0])
        memory.indices.append(torch.zeros(len(tokens), 0, dtype=torch.int64))

    patch.setattr(Memory, "remember", nothing)


@pytest.mark.parametrize("name", [name for name, of in ROWS.items() if of.refused])
def test_a_model_that_is_not_understood_is_refused_in_one_line(name: str, monkeypatch: Patch):
    of = ROWS[name]
    late = module_of(of, of.build(), **BOTH)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=of.refused) as error:
        operated(of, late, patch)(*batch())
    assert "\n" not in str(error.value)
    assert not any(
        "forward" in vars(part) and hasattr(part.forward, "func") for part in late.model.modules()
    )
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=of.refused):
        module_of(of, changed(of, of.build(), patch), **BOTH)(*batch())


MANIFOLD: dict[str, Any] = {**BOTH, "manifold_mixup": {"layers": [1]}}


def outputs(call: Callable[..., Any], images: Tensor, targets: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    return list(call(images, targets)[:2])


def test_forward_is_a_pass_as_a_call_is():
    module, (images, targets) = module_of(ROWS["nothing"], vit(), **MANIFOLD), batch()
    assert not torch.equal(outputs(module, images, targets)[1], targets)
    torch.testing.assert_close(
        outputs(module.forward, images, targets), outputs(module, images, targets)
    )
    with pytest.raises(ValueError, match="must be probabilities"):
        module.forward(images, 2 * targets)


@pytest.mark.parametrize("detector", ["attention", "gradient"])
def test_what_a_hook_of_the_module_returns_is_the_batch(detector: str):
    settings = {**MANIFOLD, "htm": {**BOTH["htm"], "detector": detector}}
    module, (images, targets) = module_of(ROWS["nothing"], vit(), **settings), batch()
    expected = outputs(module, images * 2 - 1, targets.flip(0))
    module.register_forward_pre_hook(lambda _, args: (args[0] * 2 - 1, args[1].flip(0)))
    torch.testing.assert_close(outputs(module, images, targets), expected)


def test_a_module_that_is_compiled_in_parts_is_refused():
    """As accelerate's compile_regions does it: a shallow copy with compiled children."""
    module = module_of(ROWS["nothing"], vit(), **BOTH)
    module(*batch())
    regions = copy.copy(module)
    regions._modules = {
        name: torch.compile(child, backend="eager") for name, child in module.named_children()
    }
    with pytest.raises(ValueError, match="compiled as a whole"):
        regions(*batch())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"manifold_mixup": {"layers": [1]}}, r"block 1 \(Block\) did not run"),
        ({"vtm": {"layer": 2}}, r"block 1 \(Block\) did not run"),
        ({"checkpoint_blocks": True}, r"checkpoint_blocks=True: block 1 \(Block\) did not run"),
    ],
)
def test_a_block_that_must_run_and_does_not_is_an_error(settings: Any, message: str):
    model = vit()
    model.blocks = Skipping(*model.blocks)
    module = attach(model, CLASSES, **settings).train()
    with pytest.raises(ValueError, match=message):
        module(*batch())


def test_what_a_model_loses_is_freed():
    module = module_of(ROWS["nothing"], vit(), **BOTH)
    gone = []
    for _ in range(3):
        module(*batch())
        block: Any = module.model.blocks[1]  # type: ignore[union-attr, index]
        block.forward = functools.partial(block.forward)
        gone.append(weakref.ref(block.forward))
    del block
    module.model.blocks[1] = vit().blocks[0]  # type: ignore[union-attr, index, operator]
    module(*batch())
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


class Oblong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 32, (4, 16), stride=(4, 16))
        self.encoder, self.head = Encoded().encoder, nn.Linear(32, CLASSES)

    forward = Encoded.forward


@pytest.mark.parametrize("build", [Oblong, functools.partial(huggingface, patch_size=(4, 16))])
def test_the_gradient_detector_takes_the_grid_of_oblong_patches(build: Any):
    told = torch_encoder("encoder", 32, patch_embed="embed") if build is Oblong else None
    module = attach(build(), CLASSES, htm={"layer": 1, "detector": "gradient"}, adapter=told)
    detect, grids = module.detect, []
    module.detect = lambda entry: grids.append(entry.grid) or detect(entry)
    module.train()(*batch())
    assert grids == [(8, 2)]


def test_the_gradient_detector_needs_a_grid():
    htm = {"layer": 1, "detector": "gradient"}
    for more, refused in (({}, True), ({"square_patches": True}, False)):
        module = attach(encoded(), CLASSES, htm=htm, adapter=torch_encoder("encoder", 32, **more))
        if refused:
            with pytest.raises(ValueError, match="grid of the patches is not known"):
                module.train()(*batch())
        else:
            assert module.train()(*batch()).layers


def test_timms_helpers_see_the_model():
    model = vit()
    told = resolve_model_data_config(model)
    assert told == resolve_model_data_config(attach(model, CLASSES))
    assert told["mean"] == (0.5, 0.5, 0.5) and told["input_size"] == (3, 224, 224)


def test_flops_are_counted():
    module = module_of(ROWS["nothing"], vit(), **BOTH)
    with FlopCounterMode(display=False) as counter:
        training_loss(module(*batch())).backward()
    assert counter.get_total_flops() > 0


def test_mistakes_are_named_in_one_line():
    module, (images, targets) = module_of(ROWS["nothing"], vit(), **BOTH), batch()
    with pytest.raises(ValueError, match=r"export module\.model"):
        torch.export.export(module, (images, targets))
    parameters = dict(module.named_parameters())

    def loss(parameters: Any) -> Tensor:
        called = torch.func.functional_call(module, parameters, (images, targets))
        return training_loss(called)

    with pytest.raises(ValueError, match=r"not by a transform of torch\.func"):
        torch.func.grad(loss)(parameters)
    images[2] = float("nan")
    with pytest.raises(FloatingPointError, match=r"images\[2\]: not finite") as error:
        module(images, targets)
    assert "\n" not in str(error.value)
    with pytest.raises(TypeError, match="needs the Output of a training pass, got a Tensor"):
        training_loss(module.eval()(images))


def test_manifold_mixup_draws_whatever_the_default_dtype_and_device():
    images, targets = batch()
    module = module_of(ROWS["nothing"], vit(), **MANIFOLD)
    expected = outputs(module, images, targets)
    try:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")
        found = outputs(module, images, targets)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    torch.testing.assert_close(found, expected)
