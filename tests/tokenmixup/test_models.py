"""One model of every kind beside what its own blocks compute."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import CLASSES
from tests.tokenmixup.models import (
    ENCODED,
    KINDS,
    WITH_MEMORY,
    Call,
    Encoded,
    batch_of,
    blocks_of,
    build,
    calls_of,
    huggingface,
    logits_of,
    of_each_kind,
    saliency_of,
)
from tokenmixup import Adapter, HorizontalMix, TokenMixup, attach, mix_horizontal, training_loss

INF = math.inf
ALL: dict[str, Any] = {"tau": INF, "rho": 0.0}
LAYER = 2  # of VTM
KAPPA = 3


def attached(name: str, model: Any = None, **settings: Any) -> TokenMixup:
    built, adapter = build(name)
    return attach(model or built, CLASSES, adapter=adapter, **settings).train()


@pytest.mark.parametrize("name", of_each_kind())
def test_a_step_mixes_and_evaluation_is_the_plain_model(name: str):
    images, targets = batch_of(name)
    settings: dict[str, Any] = {"manifold_mixup": {"layers": [0]}}
    if name in WITH_MEMORY:
        settings["vtm"] = {"layer": LAYER, "kappa": KAPPA}
    for layer in KINDS[name].layers if KINDS[name].stages else (1,):
        module = attached(name, htm={"layer": layer, **ALL}, **settings)
        output = module(images, targets)
        assert output.stats["mixed_samples"] == 4
        assert output.stats["mixed_tokens"] > 0
        loss = training_loss(output, 0.5)
        loss.backward()
        lost = {key for key, p in module.model.named_parameters() if p.grad is None}
        assert loss.isfinite()
        assert lost <= {KINDS[name].unused}
        assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
        plain = build(name)[0].eval()
        with torch.no_grad():
            assert torch.equal(module.eval()(images), logits_of(plain(images)))


@pytest.mark.parametrize("name", of_each_kind())
def test_a_pass_that_replaces_no_token_is_the_models_own(name: str):
    """Logits and gradients, also where untouched blocks run twice."""
    plain = build(name)[0].train()
    images, targets = batch_of(name)
    layer = KINDS[name].layers[1:2] or KINDS[name].layers
    htm = {"layer": layer, "tau": INF, "rho": INF, "stop_gradient": True}
    module = attached(name, htm=htm, checkpoint_blocks=True)
    output = module(images, targets)
    expected = logits_of(plain(images))
    torch.testing.assert_close(output.logits, expected, atol=1e-5, rtol=1e-4)
    F.cross_entropy(output.logits, targets).backward()
    F.cross_entropy(expected, targets).backward()
    assert_same_gradients(module.model, plain)


def assert_same_gradients(one: nn.Module, other: nn.Module) -> None:
    """Within rounding errors of a model whose largest gradient is 1."""
    largest = max(float(p.grad.abs().max()) for p in other.parameters() if p.grad is not None)
    for (key, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        if p.grad is None or q.grad is None:
            assert p.grad is q.grad, key
        else:
            torch.testing.assert_close(p.grad, q.grad, atol=1e-5 * largest, rtol=1e-3, msg=key)


@pytest.mark.parametrize("name", of_each_kind())
def test_saliency_is_that_of_the_blocks_own_attention(name: str):
    """And ScoreNet reads what the class is read from."""
    images, targets = batch_of(name)
    model = build(name)[0]
    calls = calls_of(name, model, images)
    kind = KINDS[name]
    together = [list(kind.layers)]
    if kind.stages:  # of other widths
        together = [[layer] for layer in kind.layers]
    spread = 0.0
    for layers in together:
        module = attached(name, htm={"layer": layers, "tau": INF, "rho": INF})
        for mix in module(images, targets).layers:
            expected = saliency_of(name, blocks_of(name, model)[mix.layer], calls[mix.layer])
            torch.testing.assert_close(mix.saliency, expected, atol=1e-6, rtol=1e-4)
            spread = max(spread, float(expected.std() / expected.mean()))
        scorenet: Any = next(iter(module.scorenets.values()))
        assert scorenet.pooling == ("class_token" if kind.reads else "attention")
    assert spread > 0.02


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
    torch.manual_seed(0)
    model = timm.create_model(
        KINDS[name].build.args[0],  # type: ignore[attr-defined]
        num_classes=CLASSES,
        global_pool=pool,
        img_size=64,
        patch_size=16,
        embed_dim=48,
        depth=2,
        num_heads=3,
    )
    module = attach(model, CLASSES, htm={"layer": 1, **ALL}).train()
    saliency = module(images, targets).layers[0].saliency
    call = calls_of(name, model, images)[1]
    assert call.attn is not None
    rows = call.attn.mean(dim=1)
    expected = (rows[:, 0] if reads else rows.mean(dim=1))[:, 1:]
    torch.testing.assert_close(saliency, expected, atol=1e-6, rtol=1e-4)
    scorenet: Any = next(iter(module.scorenets.values()))
    assert scorenet.pooling == ("class_token" if reads else "attention")


@pytest.mark.parametrize("name", of_each_kind())
def test_a_block_gets_the_tokens_that_are_mixed_by_hand(name: str):
    """The plain model with Algorithm 1 before the block, logits, labels and gradients."""
    images, targets = batch_of(name)
    for layer in KINDS[name].layers[-2:]:
        module = attached(name, htm={"layer": layer, **ALL})
        plain = build(name)[0].train()
        output = module(images, targets)
        mixes: list[HorizontalMix] = []

        def mix(block: Any, args: Any, output: Any = output, mixes: Any = mixes) -> Any:
            tokens = args[0].flatten(1, -2)
            easy = torch.zeros(len(tokens))
            mixed = mix_horizontal(tokens, targets, output.layers[0].saliency, easy, 1.0, 0.0)
            mixes.append(mixed)
            return mixed.tokens.view_as(args[0]), *args[1:]

        blocks_of(name, plain)[layer].register_forward_pre_hook(mix)
        expected = logits_of(plain(images))
        (mixed,) = mixes
        torch.testing.assert_close(output.logits, expected, atol=1e-5, rtol=1e-4)
        assert torch.equal(output.mask, mixed.mask)
        assert mixed.mask.any()
        assert torch.equal(output.targets, mixed.targets)
        training_loss(output, 0.0).backward()
        F.cross_entropy(expected, mixed.targets).backward()
        assert_same_gradients(module.model, plain)


# Eq. 13: the memory's tokens are further keys and values, at the positions that they come from


class Asked(NamedTuple):
    """What an attention module hands to the fused kernel."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None

    def attended(self) -> Tensor:
        scores = self.q @ self.k.mT / self.q.shape[-1] ** 0.5
        if self.mask is not None:
            scores = scores + self.mask
        return scores.softmax(dim=-1) @ self.v


@contextmanager
def answering(answer: Callable[[Asked], Tensor]) -> Iterator[None]:
    """Lets `answer` stand in for the fused attention."""
    fused = F.scaled_dot_product_attention

    def stand_in(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
        assert dropout_p == 0
        assert not is_causal
        assert scale in (None, q.shape[-1] ** -0.5)
        return answer(Asked(q, k, v, attn_mask))

    F.scaled_dot_product_attention = stand_in
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


def with_positions(name: str, model: Any, images: Tensor, indices: list[Tensor]) -> Tensor:
    """Logits where block LAYER also reads its own keys and values of the sources' tokens.

    `indices`: of each source, `b kappa`. Of timm's models: by answering for the fused attention,
    with the positions that the tokens have.
    """
    blocks = blocks_of(name, model)
    calls: list[Call] = []  # of the blocks
    rows = torch.arange(len(images))[:, None]
    count = 0

    def answer(asked: Asked) -> Tensor:
        nonlocal count
        count += 1
        if count != LAYER + 1:
            return asked.attended()
        wide = asked
        for source, chosen in enumerate(indices):
            of_source = asked_by(blocks[LAYER], calls[source].args[0], calls[LAYER].given)
            k = torch.cat([wide.k, of_source.k[rows, :, chosen].transpose(1, 2)], dim=2)
            v = torch.cat([wide.v, of_source.v[rows, :, chosen].transpose(1, 2)], dim=2)
            mask = wide.mask
            if asked.mask is not None and mask is not None:
                columns = asked.mask.expand(len(rows), -1, -1, -1)[rows, :, :, chosen]
                before = mask.expand(len(rows), -1, -1, -1)
                mask = torch.cat([before, columns.permute(0, 2, 3, 1)], dim=3)
            wide = Asked(asked.q, k, v, mask)
        return wide.attended()

    for block in blocks:
        block.register_forward_pre_hook(
            lambda _, args, given: calls.append(Call(args, given)), with_kwargs=True
        )
    with answering(answer):
        return logits_of(model(images))


def with_tokens(name: str, model: Any, images: Tensor, indices: list[Tensor]) -> Tensor:
    """Logits where block LAYER runs on its tokens and the memory's, and is cut to its own."""
    blocks = blocks_of(name, model)
    memory: list[Tensor] = []
    rows = torch.arange(len(images))[:, None]
    for block, chosen in zip(blocks, indices, strict=False):
        block.register_forward_pre_hook(
            lambda _, args, chosen=chosen: memory.append(args[0][rows, chosen])
        )
    plain = blocks[LAYER].forward

    def wide(x: Tensor, *args: Any, **given: Any) -> Any:
        out = plain(torch.cat([x, *memory], dim=1), *args, **given)
        n = x.shape[1]
        if isinstance(out, Tensor):
            return out[:, :n]
        return out[0][:, :n], *out[1:]

    blocks[LAYER].forward = wide
    return logits_of(model(images))


@pytest.mark.parametrize("name", of_each_kind(WITH_MEMORY))
def test_vtm_is_the_block_on_its_own_tokens_and_the_memory(name: str):
    images, targets = batch_of(name)
    kind = KINDS[name]
    model = build(name)[0].train()
    module = attached(name, vtm={"layer": LAYER, "kappa": KAPPA})
    plain = logits_of(copy.deepcopy(model)(images))
    sources = blocks_of(name, model)[:LAYER]
    indices = []
    for block, call in zip(sources, calls_of(name, model, images), strict=False):
        indices.append(saliency_of(name, block, call).topk(KAPPA).indices + kind.prefix)
    has_positions = kind.pixels == 64 and name not in ("norms behind", "parallel")
    by = with_positions if has_positions else with_tokens
    expected = by(name, model, images, indices)
    output = module(images, targets)
    torch.testing.assert_close(output.logits, expected, atol=1e-4, rtol=1e-3)
    assert (plain - expected).abs().max() > 1e-3, "the memory must matter"
    training_loss(output).backward()
    F.cross_entropy(expected, targets).backward()
    assert_same_gradients(module.model, model)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("torchvision", {"detector": "gradient"}),
        ("by hand", {"detector": "gradient"}),
        ("swin, padded", {"detector": "gradient"}),
        ("torchvision", {"rollout_steps": 1}),
        ("hf vit", {"rollout_steps": 1}),
        ("encoder", {"rollout_steps": 1}),
    ],
)
def test_other_detectors_mix(name: str, more: dict[str, Any]):
    vtm = {"layer": 2} if name in WITH_MEMORY else None
    module = attached(name, htm={"layer": 1, **ALL, **more}, vtm=vtm)
    output = module(*batch_of(name))
    assert output.stats["mixed_tokens"] > 0
    assert training_loss(output).isfinite()


@pytest.mark.parametrize("name", ["swin, padded", "pvt v2", "hiera", "hf vit", "encoder"])
def test_autocast_mixes_as_well(name: str):
    module = attached(name, htm={"layer": 2, **ALL})
    with torch.autocast("cpu", torch.bfloat16):
        output = module(*batch_of(name))
    assert output.logits.isfinite().all()
    assert output.stats["mixed_tokens"] > 0


def test_layers_of_one_stage_are_counted_over_all_blocks():
    output = attached("swin", htm={"layer": [4, 5], **ALL})(*batch_of("swin"))
    assert [mix.layer for mix in output.layers] == [4, 5]
    assert output.mask is not None
    assert output.mask.shape == (4, 16)


@pytest.mark.parametrize(
    ("build", "adapter"),
    [
        (lambda: Encoded((4, 16)), ENCODED),
        (lambda: huggingface("ViT", patch_size=(4, 16)), None),
    ],
    ids=["encoder", "hf vit"],
)
def test_the_gradient_detector_takes_the_grid_of_oblong_patches(build: Any, adapter: Any):
    """8 rows of 2: a grid of another shape would pool to other numbers."""
    htm = {"layer": 1, "detector": "gradient", **ALL}
    images, targets = batch_of("encoder")
    torch.manual_seed(0)
    model = build()
    plain = copy.deepcopy(model).eval()
    output = attach(model, CLASSES, htm=htm, adapter=adapter).train()(images, targets)
    images.requires_grad_()
    F.cross_entropy(logits_of(plain(images)), targets, reduction="sum").backward()
    assert images.grad is not None
    pixels = images.grad.square().sum(dim=1, keepdim=True).sqrt()
    cells = F.avg_pool2d(pixels, (4, 16)).flatten(1)
    expected = cells / cells.sum(dim=1, keepdim=True)
    torch.testing.assert_close(output.layers[0].saliency, expected, atol=1e-6, rtol=1e-3)


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


def test_blocks_without_a_softmax_get_their_saliency_from_the_adapter():
    def magnitude(block: nn.Module, x: Tensor) -> Tensor:
        return x.square().mean(dim=-1).flatten(1)

    adapter = Adapter(blocks="blocks", embed_dim=8, patch_embed="stem", saliency=magnitude)
    images = torch.randn(3, 3, 32, 48)
    targets = torch.eye(CLASSES)[:3]
    for detector in ("attention", "gradient"):
        htm = {"layer": 1, **ALL, "detector": detector}
        output = attach(Rows(), CLASSES, htm=htm, adapter=adapter).train()(images, targets)
        assert output.mask.any()
        assert output.mask.shape == (3, 96)
        torch.testing.assert_close(output.layers[0].saliency.sum(dim=1), torch.ones(3))
    with pytest.raises(ValueError, match="vtm"):
        attach(Rows(), CLASSES, vtm={"layer": 1}, adapter=adapter)


class Queried(nn.Module):
    """Attention whose queries alone have positions."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.places = nn.Parameter(3 * torch.randn(64, 8))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.attn(x + self.places, x, x, need_weights=False)[0]

    def received(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.attn(x + self.places, x, x)[1].mean(dim=1)


class Masked(nn.Module):
    """Attention of one head, with a mask for each sample."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + F.scaled_dot_product_attention(x, x, x, mask)

    def received(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x @ x.mT / math.sqrt(8) + mask).softmax(dim=-1).mean(dim=1)


class Masking(Masked):
    """The same, with a mask that the block computes."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, 4 * x @ x.mT)


class Unusual(nn.Module):
    """Blocks of a stage that get a mask `b n n`, by name."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.head = nn.Linear(8, CLASSES)
        self.stages = nn.ModuleList([nn.Module()])
        self.stages[0].blocks = nn.ModuleList(kind() for _ in "abc")

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).mT
        for block in self.stages[0].blocks:
            x = block(x, mask=4 * x @ x.mT)
        return self.head(x.mean(dim=1))


@pytest.mark.parametrize(
    ("kind", "vtm", "told"),
    [
        (Queried, None, {}),
        (Masked, {"layer": 2, "kappa": 2}, {}),
        (Masking, {"layer": 2, "kappa": 2}, {}),
        (Masked, None, {"geometry": lambda block, seen, x, mask: seen.received()}),
    ],
)
def test_saliency_is_what_a_block_of_ones_own_attends_to(kind: Any, vtm: Any, told: dict[str, Any]):
    torch.manual_seed(0)
    model = Unusual(kind)
    block = model.stages[0].blocks[1]
    adapter = Adapter(blocks="stages.*.blocks", embed_dim=8, **told)
    htm = {"layer": 1, **ALL}
    module = attach(model, CLASSES, htm=htm, vtm=vtm, adapter=adapter).train()
    entered: dict[str, Any] = {}
    block.register_forward_pre_hook(
        lambda block, args, kwargs: entered.update(kwargs, x=args[0].detach()), with_kwargs=True
    )
    output = module(torch.randn(3, 3, 32, 32), torch.eye(CLASSES)[:3])
    assert output.mask.any()
    assert output.logits.isfinite().all()
    expected = block.received(**entered)
    torch.testing.assert_close(output.layers[0].saliency, expected, atol=1e-5, rtol=1e-4)


def test_the_page_lists_the_models_that_are_served():
    """Of each kind an example, with and without VTM."""
    page = Path(__file__).parents[2].joinpath("docs/library.md").read_text()
    others = {
        "torchvision": "torchvision.models.VisionTransformer",
        "cct": "CCT",
        "vit-lite": "CCT",
        "hf vit": "ViTForImageClassification",
        "hf deit": "DeiTForImageClassification",
        "hf dinov2": "Dinov2ForImageClassification",
        "encoder": "adapter",
        "by hand": "adapter",
    }
    rows = [row for row in page.splitlines() if row.startswith("| ")]
    for name, kind in KINDS.items():
        listed = others.get(name) or kind.build.args[0]  # type: ignore[attr-defined]
        (row,) = (row for row in rows if f"{listed}`" in row or f" {listed}," in row)
        assert row.endswith("| yes |" if name in WITH_MEMORY else "| no |"), name
