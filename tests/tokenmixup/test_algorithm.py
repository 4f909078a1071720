"""The parts of the method as properties of public functions, each beside a plain restatement."""

import math
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor, nn
from torch.testing import assert_close

from tests import oracle
from tests.conftest import CLASSES, drawn_batch, normal, other_rules, small_cct, small_vit
from tests.oracle import gain_by_repetition
from tokenmixup import (
    HTM,
    HorizontalMix,
    Output,
    Rules,
    ScoreNet,
    attach,
    difficulty,
    gain_matrix,
    gradient_saliency,
    mix_horizontal,
    optimal_assignment,
    rollout_saliency,
)
from tokenmixup.attention import AttentionMap

FIXTURES = Path(__file__).parents[1] / "fixtures"
INF = float("inf")
NAN = float("nan")
RHOS = (0.0, 0.005, 0.02, 0.2)
RULES: dict[str, dict[str, Any]] = {"rollout_steps=1": {"rollout_steps": 1}, **other_rules()}


class Batch(NamedTuple):
    tokens: Tensor  # b n d
    targets: Tensor  # b c
    saliency: Tensor  # b t
    is_easy: Tensor  # b

    @property
    def prefix(self) -> int:
        return self.tokens.shape[1] - self.saliency.shape[1]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    b = draw(st.integers(1, 5))
    t = draw(st.integers(1, 12))
    c = draw(st.integers(2, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sharpness = draw(st.sampled_from([0.1, 1.0, 5.0]))
    scores = sharpness * torch.randn(b, t, generator=generator)
    saliency = scores.softmax(dim=1)
    if draw(st.booleans()):
        saliency = (saliency * 8).round() / 8  # some are equal
    n = draw(st.integers(0, 2)) + t
    tokens = torch.randn(b, n, 4, generator=generator)
    targets = torch.randn(b, c, generator=generator).softmax(dim=1)
    is_easy = draw(st.lists(st.booleans(), min_size=b, max_size=b))
    return Batch(tokens, targets, saliency, torch.tensor(is_easy))


on_any_batch = given(batches(), st.sampled_from(RHOS))


def rules(**settings: Any) -> Rules:
    """The rules that a module with these settings of HTM mixes by."""
    return attach(small_cct(), CLASSES, htm={"layer": 0, **settings}).rules


RANDOM_MATCHING = rules(matching="random")
RANDOM_TOKENS = rules(detector="random")
BY_COUNT = rules(labels="count")
PUBLISHED = rules(mask_rule="published")


def mix(batch: Batch, rho: float, by: Rules = Rules()) -> HorizontalMix:  # noqa: B008
    """Mixes with these easy samples: their difficulty is 0, that of the others 1."""
    return mix_horizontal(
        tokens=batch.tokens,
        targets=batch.targets,
        saliency=batch.saliency,
        difficulty=1 - batch.is_easy.float(),
        tau=1.0,
        rho=rho,
        rules=by,
    )


def assert_is_matching(donor: Tensor, is_easy: Tensor) -> None:
    """Easy samples have different donors, hard ones are their own."""
    assert len(donor[is_easy].unique()) == is_easy.sum()
    own = torch.arange(len(donor))
    assert torch.equal(donor[~is_easy], own[~is_easy])


def largest_gain(gain: np.ndarray) -> float:
    """The total gain `k b` of the best different donors, by trying all."""
    k, b = gain.shape
    rows = np.arange(k)
    totals = [gain[rows, donors].sum() for donors in permutations(range(b), k)]
    return float(max(totals))


# Algorithm 1


@on_any_batch
def test_mix_horizontal_equals_the_algorithm_written_out(batch: Batch, rho: float):
    """Lines 6 to 8, one sample after the other, with the donors that it chose.

    Labels have no gradient of saliency.
    """
    tokens, targets, saliency, is_easy = batch
    mixed = mix(batch._replace(saliency=saliency.clone().requires_grad_()), rho)
    assert not mixed.targets.requires_grad
    expected = oracle.mix_all(tokens, targets, saliency, mixed.donor, rho, batch.prefix)
    assert not mixed.mask[~is_easy].any()
    assert torch.equal(mixed.mask, expected.mask)
    assert torch.equal(mixed.tokens, expected.tokens)
    assert_close(mixed.gain, expected.saliency - saliency, atol=1e-7, rtol=0)
    assert_close(mixed.keep_ratio[:, 0], expected.keep_ratio, atol=1e-6, rtol=0)
    assert_close(mixed.targets, expected.targets, atol=1e-6, rtol=1e-5)


@on_any_batch
def test_easy_samples_get_the_best_different_donors_and_hard_ones_themselves(batch, rho):
    donor = mix(batch, rho).donor
    assert_is_matching(donor, batch.is_easy)
    gain = gain_by_repetition(batch.saliency.double(), rho)[batch.is_easy]
    chosen = donor[batch.is_easy]
    total = gain.take_along_dim(chosen[:, None], dim=1).sum()
    assert float(total) == pytest.approx(largest_gain(gain.numpy()), abs=1e-5)


@pytest.mark.parametrize(("tau", "easy"), [(2.0, [0, 1]), (INF, [0, 1, 2, 3]), (0.0, [])])
def test_samples_easier_than_tau_are_mixed(tau: float, easy: list[int]):
    hard = torch.tensor([0.1, 1.9, 2.0, 9.0])
    one_hot = torch.eye(4, dtype=torch.int64)
    mixed = mix_horizontal(torch.rand(4, 8, 4), one_hot, torch.rand(4, 8), hard, tau, 0.0)
    assert mixed.is_easy.nonzero().flatten().tolist() == easy


# Gain and assignment


saliencies = arrays(
    np.float32, st.tuples(st.integers(1, 8), st.integers(1, 20)), elements=st.floats(0, 1, width=32)
).map(torch.from_numpy)


@given(saliencies, st.sampled_from([0.0, 1e-4, 0.005, 0.3, 1.0]))
def test_gain_matrix_equals_its_definition(saliency: Tensor, rho: float):
    """Receivers are rows, donors columns."""
    gain = gain_matrix(saliency, rho)
    expected = gain_by_repetition(saliency.double(), rho)
    assert_close(gain, expected, atol=1e-5, rtol=1e-5)
    assert (gain.diagonal() == 0).all()
    assert (gain >= 0).all()
    assert (gain_matrix(saliency, INF) == 0).all()


wide = st.integers(1, 6).flatmap(lambda b: st.tuples(st.integers(1, b), st.just(b)))
gains = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 2, width=32)


@given(arrays(np.float32, wide, elements=gains))
def test_optimal_assignment_equals_brute_force(gain: np.ndarray):
    donor = optimal_assignment(torch.from_numpy(gain)).numpy()
    assert len(np.unique(donor)) == len(gain)
    total = gain[np.arange(len(gain)), donor].sum()
    assert total == pytest.approx(largest_gain(gain), abs=1e-5)


# Other rules: one replaced, and nothing else moves


def test_without_settings_the_rules_are_the_papers():
    assert rules() == Rules()


@given(batches(), st.sampled_from(RHOS), st.integers(0, 2**31))
def test_random_matching_draws_different_donors_for_easy_samples(batch, rho, seed):
    torch.manual_seed(seed)
    mixed = mix(batch, rho, RANDOM_MATCHING)
    assert_is_matching(mixed.donor, batch.is_easy)
    gained = batch.saliency[mixed.donor] - batch.saliency > rho
    assert torch.equal(mixed.mask, batch.is_easy[:, None] & gained)


@on_any_batch
def test_random_tokens_keep_pairs_and_numbers_and_label_by_attention(batch, rho):
    torch.manual_seed(1)
    mixed = mix(batch, rho, RANDOM_TOKENS)
    expected = mix(batch, rho)
    assert torch.equal(mixed.donor, expected.donor)
    assert torch.equal(mixed.mask.sum(dim=1), expected.mask.sum(dim=1))
    kept = (batch.saliency * ~mixed.mask).sum(dim=1)
    taken = (batch.saliency[mixed.donor] * mixed.mask).sum(dim=1)
    ratio = torch.where(taken > 0, kept / (kept + taken), 1.0)
    assert_close(mixed.keep_ratio[:, 0], ratio, atol=1e-6, rtol=1e-5)


@on_any_batch
def test_labels_by_count_ignore_saliency(batch: Batch, rho: float):
    mixed = mix(batch, rho, BY_COUNT)
    expected = mix(batch, rho)
    assert torch.equal(mixed.tokens, expected.tokens)
    share = expected.mask.float().mean(dim=1, keepdim=True)
    taken = batch.targets[expected.donor]
    targets = (1 - share) * batch.targets + share * taken
    assert_close(mixed.targets, targets)


@pytest.mark.parametrize("file", ["htm_seqpool", "htm_cls"])
@pytest.mark.parametrize("case", range(4))
def test_published_mask_and_order_reproduce_the_published_arrays(file: str, case: int):
    """The published order moves easy samples to the front."""
    recorded = np.load(FIXTURES / f"{file}.npz")

    def array(name: str) -> Tensor:
        return torch.from_numpy(recorded[f"case{case}/{name}"])

    batch = Batch(array("tokens"), array("targets"), array("saliency"), array("is_easy"))
    mixed = mix(batch, float(array("rho")), PUBLISHED)
    order = (~mixed.is_easy).int().argsort(stable=True)
    assert_equals_recorded(mixed.tokens[order], array("out_tokens"))
    assert_equals_recorded(mixed.targets[order], array("out_targets"))
    per_sample = float(mixed.mask.sum() / mixed.is_easy.sum())
    assert per_sample == pytest.approx(float(array("mean_tokens_mixed")))


def assert_equals_recorded(found: Tensor, expected: Tensor) -> None:
    """To a share of the largest number."""
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def step_of(htm: dict[str, Any], vtm: dict[str, Any] | None = None) -> Output:
    """A training pass; evaluation is the plain model's."""
    images, targets = drawn_batch(6, 32)
    torch.manual_seed(0)
    module = attach(small_vit(), CLASSES, htm=htm, vtm=vtm)
    torch.manual_seed(5)
    output = module.train()(images, targets)
    assert torch.equal(module.eval()(images), small_vit().eval()(images))
    return output


USUAL: dict[str, Any] = {"layer": 1, "tau": INF, "rho": 0.002}
VTM: dict[str, Any] = {"layer": 3}


@pytest.mark.parametrize("name", RULES)
def test_every_rule_changes_training_and_nothing_else(name: str):
    """The published order changes what VTM reads, not who is mixed."""
    usual = step_of(USUAL, VTM)
    found = step_of({**USUAL, **RULES[name]}, VTM)
    has_usual_labels = torch.allclose(found.targets, usual.targets)
    has_usual_logits = torch.allclose(found.logits, usual.logits)
    assert has_usual_labels == (name == "order=published")
    assert has_usual_logits == (name == "labels=count")


# Saliency


@pytest.mark.parametrize(("prefix", "class_token"), [(0, False), (1, False), (1, True), (2, True)])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_rollout_saliency_is_the_product_with_later_maps_on_the_left(steps, prefix, class_token):
    generator = torch.Generator().manual_seed(2)
    scores = [torch.randn(3, 2, 6, 6, generator=generator) for _ in range(steps + 1)]
    maps = [each.softmax(dim=-1) for each in scores]
    expected = []
    for sample in range(3):
        rows = torch.eye(6, dtype=torch.float64)
        for attn in maps:
            rows = attn[sample].double().mean(dim=0) @ rows
        if class_token:
            rows = rows[:1]
        expected.append(rows.mean(dim=0)[prefix:])
    with torch.autocast("cpu", torch.bfloat16):  # which it does not take
        found = rollout_saliency(maps, prefix, class_token)
    assert_close(found, torch.stack(expected).float())


def test_heads_that_share_keys_attend_as_in_fused_attention():
    q, k = normal(1, 4, 3, 8, seed=0), normal(1, 2, 3, 8, seed=1)
    values = torch.eye(3).expand(1, 2, 3, 3)  # which give the map
    expected = F.scaled_dot_product_attention(q, k, values, enable_gqa=True)
    assert_close(AttentionMap(q, k, scale=8**-0.5).probabilities(), expected)


def test_the_gradient_detector_is_the_gradient_of_each_samples_own_loss():
    """By the plain model in float32 without dropout, in the patches' grid; nothing stays behind."""
    model = small_vit(drop_path_rate=0.5)
    images = normal(3, 3, 32, 32, seed=1)
    targets = torch.eye(CLASSES)[:3]
    plain = small_vit().eval()
    expected = [gradient_in_cells(plain, images[i], targets[i]) for i in range(3)]
    htm = {"layer": 1, "tau": INF, "rho": 0.0, "detector": "gradient"}
    module = attach(model, CLASSES, htm=htm).train()
    with torch.autocast("cpu", torch.bfloat16):
        output = module(images, targets)
    assert_close(output.layers[0].saliency, torch.stack(expected), atol=1e-6, rtol=1e-3)
    assert output.mask.any()
    assert all(part.training for part in module.modules())
    assert all(p.grad is None for p in module.parameters())
    with torch.no_grad():  # as when pairs are drawn
        pairs = module.mixed_pairs(images, targets)
    assert pairs is not None
    assert torch.equal(pairs.mask, output.mask)


def test_a_class_token_is_in_the_prefix():
    map_ = torch.full((1, 1, 3, 3), 1 / 3)
    assert rollout_saliency([map_], num_prefix_tokens=0).shape == (1, 3)
    with pytest.raises(ValueError, match="class_token=True needs num_prefix_tokens >= 1"):
        rollout_saliency([map_], num_prefix_tokens=0, class_token=True)


def test_tokens_are_square_patches_of_an_oblong_image():
    pixels = torch.arange(32.0).view(1, 4, 8)
    cells = F.avg_pool2d(pixels, 2).flatten(1)
    assert_close(gradient_saliency(pixels, 8), cells / cells.sum())
    with pytest.raises(ValueError, match="12 tokens form no grid"):
        gradient_saliency(torch.ones(1, 16, 16), 12)


def gradient_in_cells(model: nn.Module, image: Tensor, target: Tensor) -> Tensor:
    """The norm over channels of a sample's own gradient, in 4 x 4 patches, with the sum 1."""
    pixels = image[None].clone().requires_grad_()
    F.cross_entropy(model(pixels), target[None]).backward()
    norm = pixels.grad.square().sum(dim=1).sqrt()
    cells = F.avg_pool2d(norm, 8).flatten()
    return cells / cells.sum()


@pytest.mark.parametrize(
    "settings",
    [{}, {"detector": "mean_attention"}, {"detector": "random"}, {"rollout_steps": 2}],
    ids=str,
)
def test_detectors_compare_the_rows_and_blocks_that_they_name(settings: dict[str, Any]):
    """Without dropout and stochastic depth, also where a rollout runs ahead."""
    model: Any = small_vit(proj_drop_rate=0.5, drop_path_rate=0.5)
    plain: Any = small_vit().eval()
    images = torch.randn(3, 3, 32, 32)
    targets = torch.eye(CLASSES)[:3]
    htm = {"layer": 0, "tau": INF, "rho": 0.0, **settings}
    x = oracle.embed(plain, images)
    maps = []
    for block in plain.blocks[: settings.get("rollout_steps", 0) + 1]:
        maps.append(oracle.attention_map(block, x))
        x = block(x)
    reads_class_token = settings.get("detector") != "mean_attention"
    expected = rollout_saliency(maps, 1, reads_class_token)
    model.pos_drop.p = 0.0
    output = attach(model, CLASSES, htm=htm).train()(images, targets)
    found = output.layers[0].saliency
    assert_close(found, expected, atol=1e-6, rtol=1e-4)
    assert not found.requires_grad


# ScoreNet, VTM, manifold mixup


def test_difficulty_is_the_cross_entropy_in_nats_and_includes_that_of_soft_targets():
    logits = torch.tensor([[0.0, 0.0], [20.0, 0.0]])
    targets = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert_close(difficulty(logits, targets), torch.tensor([math.log(2), 0.0]))
    soft = torch.tensor([[0.7, 0.3]])
    entropy = -(soft * soft.log()).sum(dim=1)
    assert_close(difficulty(soft.log(), soft), entropy)
    with torch.autocast("cpu", torch.bfloat16):
        assert difficulty(logits.bfloat16(), targets).dtype == torch.float32


def test_excess_is_the_divergence_of_each_sample_from_its_label():
    """sum of t (log t - log p), written out; a class that a label leaves out adds nothing."""
    logits = torch.randn(3, 4)
    targets = torch.tensor([[0.7, 0.2, 0.1, 0.0], [1, 0, 0, 0], [0.25, 0.25, 0.25, 0.25]])
    found = difficulty(logits, targets, "excess")
    for i in range(3):
        powers = logits[i].exp()
        p = powers / powers.sum()
        chosen = targets[i] > 0
        t = targets[i][chosen]
        divergence = (t * (t / p[chosen]).log()).sum()
        assert float(found[i]) == pytest.approx(float(divergence), abs=1e-5)


@pytest.mark.parametrize("pooling", ["attention", "average", "class_token"])
def test_scorenet_pools_as_named(pooling: Any):
    net = ScoreNet(8, 3, pooling)
    tokens = torch.randn(2, 5, 8)
    spatial = tokens[:, 1:]
    pooled = tokens[:, 0]
    if pooling == "average":
        pooled = spatial.mean(dim=1)
    if pooling == "attention":
        weights = net.pool(spatial).softmax(dim=1)
        pooled = (weights * spatial).sum(dim=1)
    assert_close(net(tokens, 1), net.head(pooled))


@pytest.mark.parametrize(
    ("num_classes", "num_tokens", "tau", "rho"),
    [(100, 256, 2.0, 0.005), (10, 64, 1.0, 0.02), (1000, 196, 3.0, 0.0065)],
)
def test_auto_thresholds_fit_classes_and_tokens(num_classes, num_tokens, tau, rho):
    """The first are those published for CIFAR-100, and for CIFAR-10 tau alone."""
    htm = HTM(layer=0)
    assert (htm.tau, htm.rho) == ("auto", "auto")
    assert htm.for_classes(num_classes).tau == pytest.approx(tau)
    assert htm.rho_for(num_tokens) == pytest.approx(rho, abs=5e-5)
    layered = HTM(layer=[0, 1], tau=["auto", 4], rho=[0.5, "auto"]).for_classes(num_classes)
    first, second = layered.by_layer.values()
    assert first.tau == pytest.approx(tau)
    assert second.tau == 4
    assert first.rho_for(num_tokens) == 0.5
    assert second.rho_for(num_tokens) == pytest.approx(rho, abs=5e-5)


def manifold(**settings: Any) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Returns the output of a pass, the kept share and the partners that its targets tell."""
    torch.manual_seed(0)
    module = attach(small_vit(depth=2), CLASSES, **settings).train()
    images = normal(CLASSES, 3, 32, 32, seed=1)
    torch.manual_seed(4)
    output = module(images, torch.eye(CLASSES))
    share = output.targets.diagonal().min()  # that of a sample that is not its own partner
    partner = (output.targets - share * torch.eye(CLASSES)).argmax(dim=1)
    return output, images, share, partner


@pytest.mark.parametrize("layer", [0, 1])
def test_manifold_mixup_is_linear_in_the_tokens_of_the_drawn_block_and_the_targets(layer: int):
    output, images, share, partner = manifold(manifold_mixup={"alpha": 1.0, "layers": [layer]})
    assert sorted(partner.tolist()) == [0, 1, 2, 3, 4]
    assert 0 < share < 1
    model: Any = small_vit(depth=2).train()

    def mixed(x: Tensor) -> Tensor:
        return share * x + (1 - share) * x[partner]

    def mix_before(block: nn.Module, args: tuple[Tensor]) -> Tensor:
        (x,) = args
        return mixed(x)

    model.blocks[layer].register_forward_pre_hook(mix_before)
    assert_close(output.logits, model(images), atol=1e-5, rtol=1e-4)
    assert_close(output.targets, mixed(torch.eye(CLASSES)))
    assert output.stats["mixed_samples"] == 0
