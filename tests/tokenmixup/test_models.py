"""An example of each model beside what its own blocks compute."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from reproduction.models.build import place
from tests.conftest import CLASSES, drawn_batch, gradients_of, of_each, small_cct
from tests.tokenmixup.models import (
    EXAMPLES,
    QUICK,
    WITH_MEMORY,
    batch_of,
    blocks_of,
    build,
    calls_of,
    logits_of,
    recorded,
    saliency_of,
)
from tokenmixup import Adapter, HorizontalMix, TokenMixup, attach, mix_horizontal, training_loss

INF = math.inf
ALL: dict[str, Any] = {"tau": INF, "rho": 0.0}
LAYER = 2  # of VTM
KAPPA = 3


def attached(name: str, **settings: Any) -> TokenMixup:
    model, adapter = build(name)
    return attach(model, CLASSES, adapter=adapter, **settings).train()


def assert_same_gradients(one: nn.Module, other: nn.Module) -> None:
    """Within rounding errors of a model whose largest gradient is 1."""
    ours = gradients_of(one)
    theirs = gradients_of(other)
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    assert_close(ours, theirs, atol=1e-5 * largest, rtol=1e-3)


@pytest.mark.parametrize("name", of_each(EXAMPLES, QUICK))
def test_saliency_is_that_of_the_blocks_own_attention(name: str):
    """And ScoreNet reads what the class is read from."""
    images, targets = batch_of(name)
    model = build(name)[0]
    calls = calls_of(name, model, images)
    example = EXAMPLES[name]
    blocks = blocks_of(name, model)
    together = [list(example.layers)]
    if example.stages:  # of other widths
        together = [[layer] for layer in example.layers]
    spreads = []
    for layers in together:
        module = attached(name, htm={"layer": layers, "tau": INF, "rho": INF})
        for mix in module(images, targets).layers:
            expected = saliency_of(name, blocks[mix.layer], calls[mix.layer])
            assert_close(mix.saliency, expected, atol=1e-6, rtol=1e-4)
            spreads.append(float(expected.std() / expected.mean()))
        assert {net.pooling for net in module.scorenets.values()} == {example.pooling}
    assert max(spreads) > 0.02


@pytest.mark.parametrize(
    ("name", "pool", "reads"),
    [
        ("vit", "avg", False),
        ("vit", "map", False),
        ("eva02", "token", True),
        ("beit", "token", True),
    ],
)
def test_saliency_follows_what_the_class_is_read_from(name: str, pool: str, reads: bool):
    images, targets = batch_of(name)
    example = EXAMPLES[name]._replace(reads=reads)
    torch.manual_seed(0)
    model = timm.create_model(
        example.listed,
        num_classes=CLASSES,
        global_pool=pool,
        img_size=64,
        patch_size=16,
        embed_dim=48,
        depth=2,
        num_heads=3,
    )
    module = attach(model, CLASSES, htm={"layer": 1, **ALL}).train()
    (mix,) = module(images, targets).layers
    rows = calls_of(name, model, images)[1].attn.mean(dim=1)
    if reads:
        rows = rows[:, :1]
    expected = rows.mean(dim=1)[:, 1:]
    assert_close(mix.saliency, expected, atol=1e-6, rtol=1e-4)
    assert module.scorenets["1"].pooling == example.pooling


@pytest.mark.parametrize("name", of_each(EXAMPLES, QUICK))
def test_a_block_gets_the_tokens_that_are_mixed_by_hand(name: str):
    """The plain model with Algorithm 1 before the block: logits, labels and gradients.

    Also where untouched blocks run twice. In evaluation it is the plain model.
    """
    images, targets = batch_of(name)
    for layer in EXAMPLES[name].layers[-2:]:
        module = attached(name, htm={"layer": layer, **ALL}, checkpoint_blocks=True)
        output = module(images, targets)
        plain, expected, mixed = mixed_by_hand(name, layer, output.layers[0].saliency)
        assert_close(output.logits, expected, atol=1e-5, rtol=1e-4)
        assert torch.equal(output.mask, mixed.mask)
        assert mixed.mask.any()
        assert torch.equal(output.targets, mixed.targets)
        training_loss(output, 0.0).backward()
        F.cross_entropy(expected, mixed.targets).backward()
        assert_same_gradients(module.model, plain)
        with torch.no_grad():
            evaluated = logits_of(build(name)[0].eval()(images))
            assert torch.equal(module.eval()(images), evaluated)


def mixed_by_hand(
    name: str, layer: int, saliency: Tensor
) -> tuple[nn.Module, Tensor, HorizontalMix]:
    """The plain model, its logits if a block gets mixed tokens, and how these were mixed."""
    images, targets = batch_of(name)
    plain, _ = build(name)
    mixes: list[HorizontalMix] = []

    def mix(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = args
        easy = torch.zeros(len(x))
        mixed = mix_horizontal(x.flatten(1, -2), targets, saliency, easy, 1.0, 0.0)
        mixes.append(mixed)
        return mixed.tokens.view_as(x), *others

    blocks_of(name, plain)[layer].register_forward_pre_hook(mix)
    logits = logits_of(plain.train()(images))
    (mixed,) = mixes
    return plain, logits, mixed


# Eq. 13: the memory's tokens are further keys and values, at the positions that they come from


class Asked(NamedTuple):
    """What an attention module hands to the fused kernel."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None

    def attended(self) -> Tensor:
        width = self.q.shape[-1]
        scores = self.q @ self.k.mT / width**0.5
        if self.mask is not None:
            scores = scores + self.mask
        return scores.softmax(dim=-1) @ self.v


@contextmanager
def answering(answer: Callable[[Asked], Tensor]) -> Iterator[None]:
    """Calls `answer` in the place of the fused attention."""
    fused = F.scaled_dot_product_attention

    def wrapper(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
        assert dropout_p == 0
        assert not is_causal
        assert scale in (None, q.shape[-1] ** -0.5)
        return answer(Asked(q, k, v, attn_mask))

    F.scaled_dot_product_attention = wrapper
    try:
        yield
    finally:
        F.scaled_dot_product_attention = fused


def asked_by(block: Any, tokens: Tensor, given: dict[str, Any]) -> Asked:
    """What a block's own attention asks for on these tokens."""
    calls: list[Asked] = []

    def record(asked: Asked) -> Tensor:
        calls.append(asked)
        return asked.v

    with answering(record):
        block.attn(block.norm1(tokens), **given)
    return calls[0]


def widened(asked: Asked, source: Asked, chosen: Tensor) -> Asked:
    """With keys and values of a source's tokens, at the columns that the mask has for them."""
    places = chosen[:, None, :, None]  # b 1 kappa 1
    k = torch.cat([asked.k, source.k.take_along_dim(places, dim=2)], dim=2)
    v = torch.cat([asked.v, source.v.take_along_dim(places, dim=2)], dim=2)
    mask = asked.mask
    if mask is not None:
        columns = mask.take_along_dim(places.mT, dim=3)
        mask = torch.cat([mask.expand(len(chosen), -1, -1, -1), columns], dim=3)
    return Asked(asked.q, k, v, mask)


def with_positions(name: str, model: Any, images: Tensor, indices: list[Tensor]) -> Tensor:
    """Logits where block LAYER also reads its own keys and values of the sources' tokens.

    `indices`: of each source, `b kappa`. Of timm's models: by answering for the fused attention,
    with the positions that the tokens have.
    """
    blocks = blocks_of(name, model)
    calls = recorded(blocks)
    numbers = itertools.count()

    def answer(asked: Asked) -> Tensor:
        if next(numbers) == LAYER:
            for call, chosen in zip(calls, indices, strict=False):
                source = asked_by(blocks[LAYER], call.args[0], calls[LAYER].given)
                asked = widened(asked, source, chosen)
        return asked.attended()

    with answering(answer):
        return logits_of(model(images))


def with_tokens(name: str, model: Any, images: Tensor, indices: list[Tensor]) -> Tensor:
    """Logits where block LAYER runs on its tokens and the memory's, and is cut to its own.

    This is Eq. 13 for a block that works token by token beside its attention.
    """
    blocks = blocks_of(name, model)
    memory: list[Tensor] = []
    rows = torch.arange(len(images))[:, None]

    def remember(chosen: Tensor, block: nn.Module, args: tuple[Any, ...]) -> None:
        memory.append(args[0][rows, chosen])

    for block, chosen in zip(blocks, indices, strict=False):
        block.register_forward_pre_hook(partial(remember, chosen))
    plain = blocks[LAYER].forward

    def wide(x: Tensor, *args: Any, **given: Any) -> Any:
        n = x.shape[1]
        all_tokens = torch.cat([x, *memory], dim=1)
        out = plain(all_tokens, *args, **given)
        if isinstance(out, Tensor):
            return out[:, :n]
        first, *others = out
        return first[:, :n], *others

    blocks[LAYER].forward = wide
    return logits_of(model(images))


@pytest.mark.parametrize("name", of_each(WITH_MEMORY, QUICK))
def test_vtm_is_the_block_on_its_own_tokens_and_the_memory(name: str):
    assert_is_by_hand(name)


def test_a_class_token_in_the_memory_has_no_position():
    """The published indices, of patches, begin at the class token."""
    indices = assert_is_by_hand("eva02 of clip", "published")
    assert (indices == 0).any(), "choose another example"


def assert_is_by_hand(name: str, offset: str = "paper") -> Tensor:
    """Returns the indices of the memory."""
    images, targets = batch_of(name)
    example = EXAMPLES[name]
    model = build(name)[0].train()
    vtm = {"layer": LAYER, "kappa": KAPPA, "class_token_offset": offset}
    module = attached(name, vtm=vtm)
    plain = logits_of(copy.deepcopy(model)(images))
    sources = blocks_of(name, model)[:LAYER]
    indices = []
    for block, call in zip(sources, calls_of(name, model, images), strict=False):
        places = saliency_of(name, block, call).topk(KAPPA).indices
        indices.append(places + example.prefix if offset == "paper" else places)
    has_positions = example.pixels == 64 and name not in ("norms behind", "parallel")
    if has_positions:
        expected = with_positions(name, model, images, indices)
    else:
        expected = with_tokens(name, model, images, indices)
    output = module(images, targets)
    assert_close(output.logits, expected, atol=1e-4, rtol=1e-3)
    assert (plain - expected).abs().max() > 1e-3, "the memory must matter"
    training_loss(output).backward()
    F.cross_entropy(expected, targets).backward()
    assert_same_gradients(module.model, model)
    return torch.cat(indices)


class Rows(nn.Module):
    """Blocks without a softmax, which get a map of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in "abc")
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(dim=(1, 2)))


def test_blocks_without_a_softmax_are_mixed_by_other_detectors():
    def magnitude(block_input: Any) -> Tensor:
        return block_input.tokens.square().mean(dim=-1).flatten(1)

    adapter = Adapter(blocks="blocks", embed_dim=8)
    images = torch.randn(3, 3, 32, 48)
    targets = torch.eye(CLASSES)[:3]
    for detector in (magnitude, "gradient"):
        htm = {"layer": 1, **ALL, "detector": detector}
        output = attach(Rows(), CLASSES, htm=htm, adapter=adapter).train()(images, targets)
        (mix,) = output.layers
        assert mix.mask.any()
        assert mix.mask.shape == (3, 96)


def test_a_model_placed_on_a_cpu_keeps_vtm_beside_dropout_of_attention():
    """Whose other blocks leave the fused attention, which is slower there."""
    module = attach(small_cct(attn_drop=0.1), CLASSES, vtm={"layer": 2, "kappa": 3})
    place(module, torch.device("cpu"))
    module.train()
    blocks: Any = module.model.blocks
    assert [block.attn.fused_attn for block in blocks] == [False, False, True, False]
    assert training_loss(module(*drawn_batch(4, 16))).isfinite()


def test_the_page_lists_the_supported_models():
    """An example of each, with and without VTM."""
    page = Path(__file__).parents[2].joinpath("docs/library.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| ")]
    ends = {True: "| yes |", False: "| no |"}  # by whether there is VTM
    for name, example in EXAMPLES.items():
        (row,) = (
            row for row in rows if f"{example.listed}`" in row or f" {example.listed}," in row
        )
        assert row.endswith(ends[name in WITH_MEMORY]), name
