"""One model of every kind of block and attention, against what the block itself computes.

The oracle listens to the fused attention that timm's modules call, and answers in its place.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.layers.attention import AttentionRope
from torch import Tensor, nn

from tests.conftest import CLASSES
from tokenmixup import Output, attach, rollout_saliency, training_loss, vertical_attention
from tokenmixup.adapters import timm_parts
from tokenmixup.attention import Positions, attention_map, positions, project, received
from tokenmixup.detectors import by_rollout
from tokenmixup.encoder import find_encoder
from tokenmixup.module import BlockPass

SMALL: dict[str, Any] = {"depth": 3, "embed_dim": 48, "num_heads": 3}
KINDS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": SMALL,  # class token, fused qkv
    "vit_base_patch16_siglip_224": SMALL,  # attention pooling
    "vit_small_patch14_reg4_dinov2": SMALL | {"patch_size": 16},  # registers, layer scale
    "vit_little_patch16_reg4_gap_256": SMALL,  # registers without a class token
    "deit_tiny_distilled_patch16_224": SMALL,  # two prefix tokens
    "deit3_small_patch16_224": SMALL,  # positions without the class token
    "vit_small_patch16_224": SMALL | {"qk_norm": True, "dynamic_img_size": True},
    "naflexvit_base_patch16_gap": SMALL,
    "eva02_tiny_patch14_224": SMALL | {"patch_size": 16},  # rotary, SwiGLU
    "eva02_base_patch16_clip_224": SMALL,  # separate q, k, v, norm inside attention
    "vit_small_patch16_rope_mixed_224": SMALL,  # rotary positions of each block's own
    "vit_betwixt_patch16_rope_reg4_gap_256": SMALL,
    "vit_small_patch16_dinov3_qkvb": SMALL,  # rotates halves, registers
    "vit_pe_core_tiny_patch16_384": SMALL,
    "beit_base_patch16_224": SMALL,  # a relative position table in each block
    "vit_relpos_small_patch16_224": SMALL,  # an MLP of relative positions in each block
    "vit_srelpos_small_patch16_224": SMALL,  # and one for all blocks
    "vit_relpos_medium_patch16_cls_224": SMALL,
    "cait_xxs24_224": SMALL | {"depth_token_only": 1},  # talking heads; class token joins later
}
QUICK = {  # of the others, the rest of the family is marked slow
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "naflexvit_base_patch16_gap",
    "eva02_tiny_patch14_224",
    "vit_small_patch16_rope_mixed_224",
    "vit_small_patch16_dinov3_qkvb",
    "beit_base_patch16_224",
    "vit_relpos_medium_patch16_cls_224",
    "cait_xxs24_224",
}
LAYER, KAPPA = 2, 3
TALKING = {"cait_xxs24_224"}
FUSED = [name for name in KINDS if name not in TALKING]
READ_FROM_THE_CLASS_TOKEN = {  # the others pool their tokens, some of them beside a class token
    "vit_tiny_patch16_224",
    "vit_small_patch14_reg4_dinov2",
    "deit_tiny_distilled_patch16_224",
    "deit3_small_patch16_224",
    "vit_small_patch16_224",
    "eva02_base_patch16_clip_224",
    "vit_small_patch16_rope_mixed_224",
    "vit_relpos_medium_patch16_cls_224",
}


def of_each_kind(names: Iterable[str]) -> list[Any]:
    slow = pytest.mark.slow
    return [name if name in QUICK else pytest.param(name, marks=slow) for name in names]


def build(name: str, **options: Any) -> Any:
    """A small model with random positions, biases and layer scales as well, at 64 px."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=CLASSES, img_size=64, **(KINDS[name] | options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", True)
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # timm drops inside the MLP of relative positions
    model.name = name
    return model


def a_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(4, 3, 64, 64, generator=generator),
        torch.randn(4, CLASSES, generator=generator).softmax(dim=1),
    )


class Call(NamedTuple):
    """What an attention module hands to the fused kernel."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None

    def map(self) -> Tensor:
        scores = self.q @ self.k.mT / self.q.shape[-1] ** 0.5
        return (scores if self.mask is None else scores + self.mask).softmax(dim=-1)


@contextmanager
def answering(answer: Callable[[Call], Tensor]) -> Iterator[None]:
    """Lets `answer` stand in for the fused attention."""
    fused = F.scaled_dot_product_attention

    def stand_in(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
        assert dropout_p == 0 and not is_causal and scale in (None, q.shape[-1] ** -0.5)
        return answer(Call(q, k, v, attn_mask))

    F.scaled_dot_product_attention = stand_in
    try:
        yield
    finally:
        F.scaled_dot_product_attention = fused


class Seen(NamedTuple):
    """What enters a block."""

    tokens: Tensor
    given: dict[str, Any]


@contextmanager
def watching(model: Any) -> Iterator[list[Seen]]:
    """Collects what enters the blocks."""
    seen: list[Seen] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(Seen(args[0], kwargs))

    handles = [b.register_forward_pre_hook(note, with_kwargs=True) for b in model.blocks]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def own_call(block: Any, seen: Seen) -> Call:
    """What the block's own attention computes on these tokens."""
    calls: list[Call] = []

    def listen(call: Call) -> Tensor:
        calls.append(call)
        return call.v

    with answering(listen):
        block.attn(block.norm1(seen.tokens), **seen.given)
    (call,) = calls
    return call


def saliency_of(model: Any, attn: Tensor, prefix: int) -> Tensor:
    attn = attn.mean(dim=1)
    by_class_token = model.name in READ_FROM_THE_CLASS_TOKEN
    return (attn[:, 0] if by_class_token else attn.mean(dim=1))[:, prefix:]


def with_memory(model: Any, images: Tensor) -> Tensor:
    """Logits of a pass in which block LAYER attends to the most salient tokens of those before."""
    block, num_calls = model.blocks[LAYER], 0

    def answer(call: Call) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls != LAYER + 1:
            return call.map() @ call.v
        ks, vs, masks = [call.k], [call.v], [call.mask]
        n = call.k.shape[2]
        for source in range(LAYER):
            prefix = n - 16
            own = own_call(model.blocks[source], seen[source])
            places = saliency_of(model, own.map(), prefix).topk(KAPPA).indices + prefix
            # positions are those of the block that attends
            there = own_call(block, Seen(seen[source].tokens, seen[LAYER].given))
            rows = torch.arange(len(places))[:, None]
            ks.append(there.k[rows, :, places].transpose(1, 2))
            vs.append(there.v[rows, :, places].transpose(1, 2))
            if call.mask is not None:
                mask = call.mask.expand(len(places), -1, -1, -1)
                masks.append(mask[rows, :, :, places].permute(0, 2, 3, 1))
        mask = None if call.mask is None else torch.cat([m.expand(4, -1, -1, -1) for m in masks], 3)
        wide = Call(call.q, torch.cat(ks, dim=2), torch.cat(vs, dim=2), mask)
        return wide.map() @ wide.v

    with watching(model) as seen, answering(answer):
        return model(images)


@pytest.mark.parametrize(
    ("name", "pool", "by_class_token"),
    [
        *((name, None, name in READ_FROM_THE_CLASS_TOKEN) for name in FUSED if name in QUICK),
        ("vit_tiny_patch16_224", "avg", False),
        ("vit_tiny_patch16_224", "map", False),
        ("eva02_tiny_patch14_224", "token", True),
        ("beit_base_patch16_224", "token", True),
    ],
)
def test_saliency_in_training_follows_what_the_class_is_read_from(
    name: str, pool: str | None, by_class_token: bool
):
    """The mean over query rows (Eq. 3), or row 0 if the class token is pooled; ScoreNet alike."""
    model = build(name, **({} if pool is None else {"global_pool": pool})).eval()
    module = attach(model, CLASSES, htm={"layer": LAYER})
    used: list[Tensor] = []
    detect = module.detect
    module.detect = lambda entry: used.append(detect(entry)) or used[-1]
    images, targets = a_batch()
    with watching(model) as seen:
        model(images)
    module.mixed_pairs(images, targets)
    attn = own_call(model.blocks[LAYER], seen[LAYER]).map().mean(dim=1)
    rows = attn[:, 0] if by_class_token else attn.mean(dim=1)
    expected = rows[:, model.num_prefix_tokens :]
    torch.testing.assert_close(used[0], expected, atol=1e-6, rtol=1e-4)
    assert module.scorenet.pooling == ("class_token" if by_class_token else "attention")


@pytest.mark.parametrize("name", of_each_kind(FUSED))
def test_saliency_is_that_of_the_blocks_own_attention(name: str):
    """And so are a rollout and a memory, whose tokens keep their positions."""
    images, targets = a_batch()
    model = build(name).eval()
    with watching(model) as seen:
        model(images)
    encoder, by_class_token = find_encoder(model), name in READ_FROM_THE_CLASS_TOKEN
    maps = [own_call(block, x).map() for block, x in zip(model.blocks, seen, strict=True)]
    prefix = seen[0].tokens.shape[1] - 16
    assert prefix == model.num_prefix_tokens
    entries = [BlockPass(encoder, index, *entered) for index, entered in enumerate(seen)]
    for entry, attn in zip(entries, maps, strict=True):
        expected = saliency_of(model, attn, prefix)
        torch.testing.assert_close(entry.own_saliency(), expected, atol=1e-6, rtol=1e-4)
    if not encoder.own_positions:
        expected = rollout_saliency(maps, prefix, by_class_token)
        torch.testing.assert_close(by_rollout(2, entries[0]), expected, atol=1e-6, rtol=1e-4)
    module = attach(model, CLASSES, vtm={"layer": LAYER, "kappa": KAPPA}).train()
    expected, plain = with_memory(model, images), model(images)
    for fused in (True, False):
        model.blocks[LAYER].attn.fused_attn = fused
        torch.testing.assert_close(module(images, targets).logits, expected, atol=1e-4, rtol=1e-3)
    assert (plain - expected).abs().max() > 1e-3, "the memory must matter"


def test_rollout_is_refused_where_each_block_has_positions_of_its_own():
    with pytest.raises(ValueError, match=r"rollout_steps=1: .* rotary positions of their own"):
        attach(
            build("vit_small_patch16_rope_mixed_224"), CLASSES, htm={"layer": 0, "rollout_steps": 1}
        )


def test_talking_heads_attend_to_a_memory_as_to_tokens():
    images, targets = a_batch()
    model = build("cait_xxs24_224").train()
    with watching(model) as seen:
        attach(model, CLASSES, vtm={"layer": LAYER, "kappa": KAPPA}).train()(images, targets)
    tokens, memory = seen[LAYER].tokens, []
    for index, (block, entered) in enumerate(zip(model.blocks[:LAYER], seen, strict=False)):
        heads = block.attn.num_heads
        q, k, _ = block.attn.qkv(block.norm1(entered.tokens)).chunk(3, dim=-1)
        q, k = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (q, k))
        scores = block.attn.proj_l((q * block.attn.scale @ k.mT).permute(0, 2, 3, 1))
        attn = scores.softmax(dim=2).mean(dim=3)  # b n n, of the heads that have talked once
        places = attn.mean(dim=1).topk(KAPPA).indices  # no class token here
        found = BlockPass(find_encoder(model), index, entered.tokens, {})
        torch.testing.assert_close(found.own_saliency(), attn.mean(dim=1))
        memory.append(entered.tokens[torch.arange(4)[:, None], places])
    block = model.blocks[LAYER]
    wide = block.norm1(torch.cat([tokens, *memory], dim=1))
    expected = block.attn(wide)[:, : tokens.shape[1]]
    heard: list[Tensor] = []
    block.attn.register_forward_hook(lambda attn, args, out: heard.append(out))
    attach(model, CLASSES, vtm={"layer": LAYER, "kappa": KAPPA}).train()(images, targets)
    torch.testing.assert_close(heard[0], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rotate_half", [True, False])
@pytest.mark.parametrize("fused_qkv", [True, False])
def test_grouped_gated_rotary_attention_attends_to_a_memory_as_to_tokens(rotate_half, fused_qkv):
    torch.manual_seed(0)
    attn = AttentionRope(
        32,
        num_heads=4,
        num_kv_heads=4 if fused_qkv else 2,
        qkv_fused=fused_qkv,
        num_prefix_tokens=2,
        qk_norm=True,
        scale_norm=True,
        gated=True,
        norm_layer=nn.LayerNorm,
        rotate_half=rotate_half,
    )
    tokens, memory = torch.randn(3, 7, 32), torch.randn(3, 4, 32)
    rope, places = torch.randn(5, 16), torch.tensor([2, 6, 3, 3])  # none of the prefix
    context = torch.cat([tokens, memory], dim=1)
    expected = attn(context, rope=torch.cat([rope, rope[places - 2]]))[:, :7]
    parts = timm_parts(attn)
    where = positions(parts, 7, {"rope": rope}).of_memory([places.expand(3, 4)])
    torch.testing.assert_close(vertical_attention(parts, tokens, context, where), expected)


def test_saliency_has_no_dropout_where_the_positions_of_a_block_have():
    model = build("vit_relpos_small_patch16_224")
    for block in model.blocks:
        block.attn.rel_pos.mlp.drop1.p = 0.5
    images, _ = a_batch()
    with watching(model) as seen, torch.no_grad():
        model.eval()(images)
    found = []
    for mode in (False, True):
        model.train(mode)
        entry = BlockPass(find_encoder(model), 1, seen[1].tokens, seen[1].given)
        found.append((entry.own_saliency(), by_rollout(1, entry)))
        assert model.blocks[1].attn.rel_pos.mlp.drop1.training is mode
    torch.testing.assert_close(*found, rtol=0, atol=0)
    with torch.no_grad():
        assert not torch.equal(*(model.blocks[1].attn.rel_pos.get_bias() for _ in range(2)))


def test_an_argument_that_is_not_understood_is_refused():
    parts = timm_parts(AttentionRope(32, num_heads=4))
    understood = {"rope": None, "attn_mask": None, "is_causal": False}
    assert positions(parts, 5, understood) == (None, None)
    for given in ({"is_causal": True}, {"windows": torch.ones(2)}):
        with pytest.raises(ValueError, match=f"does not support the argument {next(iter(given))}"):
            positions(parts, 5, given)


def test_a_mask_hides_tokens_and_their_memory():
    torch.manual_seed(0)
    attn = AttentionRope(32, num_heads=4)
    tokens, memory = torch.randn(2, 6, 32), torch.randn(2, 2, 32)
    visible = torch.tensor([True, True, True, True, False, False]).expand(2, 1, 1, 6)
    parts = timm_parts(attn)
    where = positions(parts, 6, {"attn_mask": visible})
    seen = attention_map(parts, tokens, where=where)
    assert (seen[..., 4:] == 0).all() and (seen[..., :4] > 0).all()
    wide = where.of_memory([torch.tensor([[0], [5]]), torch.tensor([[5], [0]])])
    context = torch.cat([tokens, memory], dim=1)
    expected = attn(
        context,
        attn_mask=torch.cat(
            [visible, torch.tensor([[True, False], [False, True]])[:, None, None]], dim=3
        ),
    )[:, :6]
    torch.testing.assert_close(vertical_attention(parts, tokens, context, wide), expected)


@pytest.mark.parametrize("scores", [70, 2**17])
@pytest.mark.parametrize("first_row_only", [False, True])
@pytest.mark.parametrize("of_bias", [None, (1, 1, 6), (1, 4, 6), (3, 4, 6), (3, 1, 1)])
def test_what_keys_receive_is_the_mean_of_the_map_however_it_is_cut(
    of_bias: tuple[int, ...] | None, first_row_only: bool, scores: int, monkeypatch
):
    monkeypatch.setattr("tokenmixup.attention.CACHED_SCORES", scores)
    torch.manual_seed(0)
    parts, tokens = timm_parts(Attention(32, num_heads=4)), torch.randn(3, 6, 32)
    bias = None if of_bias is None else torch.randn(*of_bias, 6)
    where = Positions(None, bias)
    expected = attention_map(parts, tokens, first_row_only, where).mean(dim=(1, 2))
    rows = 1 if first_row_only else None
    q, k, _ = project(parts, tokens)
    found = received(parts, q[:, :, :rows], k, None if bias is None else bias[:, :, :rows])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(3))


@pytest.mark.parametrize("order", ["in_place", "published"])
@pytest.mark.parametrize("name", of_each_kind(KINDS))
def test_projections_that_move_with_their_tokens_are_those_of_the_mixed_tokens(
    name: str, order: str, monkeypatch: pytest.MonkeyPatch
):
    """The oracle: the block's own attention, of the tokens as they are mixed."""
    images, targets = a_batch()[0], torch.eye(CLASSES)[[1, 0, 2, 0]]
    module = attach(build(name), CLASSES, htm={"layer": 1, "rho": 0.002, "order": order}).train()
    with torch.no_grad():  # class 0 is easy
        module.scorenet.head.weight.zero_()
        module.scorenet.head.bias.copy_(9.0 * torch.eye(CLASSES)[0])
    found = []
    for _ in range(2):
        module.zero_grad()
        output = module(images, targets)
        assert isinstance(output, Output)
        assert output.stats["mixed_samples"] == 2
        assert output.stats["mixed_tokens"] > 0
        training_loss(output, 1.0).backward()
        found.append([output.logits, *(p.grad for p in module.parameters() if p.grad is not None)])
        monkeypatch.setattr(module, "answered_blocks", set)
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", of_each_kind(KINDS))
def test_every_kind_trains_and_evaluates_as_the_plain_model(name: str):
    images, targets = a_batch()
    plain = build(name).eval()(images)
    module = attach(
        build(name, drop_path_rate=0.1),
        CLASSES,
        htm={"layer": 1, "tau": float("inf"), "rho": 0.0},
        vtm={"layer": LAYER},
        manifold_mixup={"layers": [0, 1, 2]},
    ).train()
    output = module(images, targets)
    assert isinstance(output, Output)
    assert output.stats["mixed_samples"] == 4
    assert output.stats["mixed_tokens"] > 0
    training_loss(output, 1.0).backward()
    for key, parameter in module.model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), key
    for index in range(3):
        gradients = [p.grad for p in module.model.blocks[index].attn.parameters()]  # type: ignore
        assert any(g is not None and g.abs().sum() > 0 for g in gradients)
    assert torch.equal(module.eval()(images), plain)
