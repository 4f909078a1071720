"""The parts of the method as properties of public functions, each beside a plain restatement."""

import math
from itertools import permutations
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from tests.conftest import CLASSES, small_cct, small_vit
from tokenmixup import (
    HTM,
    HorizontalMix,
    Rules,
    ScoreNet,
    attach,
    difficulty,
    gain_matrix,
    gradient_saliency,
    mix_horizontal,
    optimal_assignment,
    rollout_saliency,
    salient_indices,
)

FIXTURES = Path(__file__).parents[1] / "fixtures"
INF = float("inf")
NAN = float("nan")
RHOS = (0.0, 0.005, 0.02, 0.2)


def other_rules() -> dict[str, dict[str, Any]]:
    """Every value of a rule that is not the paper's, by its text."""
    others: dict[str, dict[str, Any]] = {"rollout_steps=1": {"rollout_steps": 1}}
    for option, kind in get_type_hints(HTM).items():
        if get_origin(kind) is Literal and option not in ("pooling", "difficulty"):
            _, *values = get_args(kind)
            others |= {f"{option}={value}": {option: value} for value in values}
    return others


RULES = other_rules()


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
    saliency = (sharpness * torch.randn(b, t, generator=generator)).softmax(dim=1)
    if draw(st.booleans()):
        saliency = (saliency * 8).round() / 8  # some are equal
    return Batch(
        tokens=torch.randn(b, draw(st.integers(0, 2)) + t, 4, generator=generator),
        targets=torch.randn(b, c, generator=generator).softmax(dim=1),
        saliency=saliency,
        is_easy=torch.tensor(draw(st.lists(st.booleans(), min_size=b, max_size=b))),
    )


def one_batch() -> Batch:
    generator = torch.Generator().manual_seed(3)
    saliency = torch.randn(5, 8, generator=generator).softmax(dim=1)
    tokens = torch.randn(5, 8, 4, generator=generator)
    return Batch(tokens, torch.eye(5), saliency, torch.ones(5, dtype=torch.bool))


def rules(**settings: Any) -> Rules:
    """The rules that a module with these settings of HTM mixes by."""
    return attach(small_cct(), CLASSES, htm={"layer": 0, **settings}).rules


def mix(batch: Batch, rho: float, by: Rules = Rules()) -> HorizontalMix:  # noqa: B008
    """Mixes with the easy samples told: their difficulty is 0, that of the others 1."""
    return mix_horizontal(
        tokens=batch.tokens,
        targets=batch.targets,
        saliency=batch.saliency,
        difficulty=1 - batch.is_easy.float(),
        tau=1.0,
        rho=rho,
        rules=by,
    )


# Algorithm 1


@given(batches(), st.sampled_from(RHOS))
def test_mix_horizontal_equals_the_algorithm_written_out(batch: Batch, rho: float):
    """Lines 5 to 8, one sample and one token at a time, with the donors that it chose."""
    mixed = mix(batch, rho)
    for i in range(len(batch.tokens)):
        j = int(mixed.donor[i])
        tokens = batch.tokens[i].clone()
        kept = 0.0
        taken = 0.0
        for t, (own, other) in enumerate(zip(batch.saliency[i], batch.saliency[j], strict=True)):
            replaced = bool(batch.is_easy[i]) and bool(other - own > rho)
            assert bool(mixed.mask[i, t]) == replaced
            if replaced:
                tokens[batch.prefix + t] = batch.tokens[j, batch.prefix + t]
                taken += float(other)
            else:
                kept += float(own)
            gained = float(other - own) if replaced else 0.0
            assert float(mixed.gain[i, t]) == pytest.approx(gained, abs=1e-7)
        ratio = kept / (kept + taken) if taken else 1.0
        assert torch.equal(mixed.tokens[i], tokens)
        assert float(mixed.keep_ratio[i]) == pytest.approx(ratio, abs=1e-6)
        expected = ratio * batch.targets[i] + (1 - ratio) * batch.targets[j]
        torch.testing.assert_close(mixed.targets[i], expected, atol=1e-6, rtol=1e-5)


@given(batches(), st.sampled_from(RHOS))
def test_easy_samples_get_the_best_different_donors_and_hard_ones_themselves(batch, rho):
    mixed = mix(batch, rho)
    easy = batch.is_easy
    assert torch.equal(mixed.donor[~easy], torch.arange(len(easy))[~easy])
    donors = mixed.donor[easy]
    assert donors.unique().numel() == donors.numel()
    gain = gain_by_definition(batch.saliency, rho)[easy]
    rows = torch.arange(len(gain))
    best = max(float(gain[rows, list(p)].sum()) for p in permutations(range(len(easy)), len(gain)))
    assert float(gain[rows, donors].sum()) == pytest.approx(best, abs=1e-5)


@given(batches(), st.sampled_from([*RHOS, INF]))
def test_without_easy_samples_or_below_rho_no_bit_changes(batch: Batch, rho: float):
    nobody = batch._replace(is_easy=torch.zeros_like(batch.is_easy))
    for mixed in (mix(batch, INF), mix(nobody, rho)):
        assert torch.equal(mixed.tokens, batch.tokens)
        assert not mixed.mask.any()
        assert torch.equal(mixed.targets, batch.targets)


@pytest.mark.parametrize(("tau", "easy"), [(2.0, [0, 1]), (INF, [0, 1, 2, 3]), (0.0, [])])
def test_samples_easier_than_tau_are_mixed(tau: float, easy: list[int]):
    tokens, targets, saliency = (x[:4] for x in one_batch()[:3])
    hard = torch.tensor([0.1, 1.9, 2.0, 9.0])
    mixed = mix_horizontal(tokens, targets, saliency, hard, tau, 0.0)
    assert mixed.is_easy.nonzero().flatten().tolist() == easy


def test_gradients_go_to_the_donors_and_none_to_saliency():
    tokens = torch.zeros(2, 2, 1, requires_grad=True)
    saliency = torch.tensor([[0.9, 0.1], [0.1, 0.9]], requires_grad=True)
    mixed = mix(Batch(tokens, torch.eye(2), saliency, torch.tensor([True, False])), 0.0)
    mixed.tokens[0].sum().backward()
    assert tokens.grad is not None
    assert not mixed.targets.requires_grad
    assert tokens.grad.squeeze(-1).tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_zeros_and_what_is_not_finite():
    batch = one_batch()
    mixed = mix(batch._replace(saliency=torch.zeros(5, 8)), 0.0)
    assert torch.equal(mixed.targets, batch.targets)
    assert (mixed.keep_ratio == 1).all()
    lost = batch._replace(saliency=torch.full((5, 8), NAN))
    for easy, rho in ((torch.zeros(5, dtype=torch.bool), 0.0), (batch.is_easy, INF)):
        mixed = mix(lost._replace(is_easy=easy), rho)  # nothing is replaced, so it does not matter
        assert torch.equal(mixed.tokens, batch.tokens)
        assert mixed.gain.isnan().all()
        assert torch.equal(mixed.targets, batch.targets)
    for by in (Rules(), rules(matching="random")):
        with pytest.raises(FloatingPointError, match="not finite"):
            mix(lost, 0.0, by)


@pytest.mark.parametrize("rule", ["match", "choose"])
def test_a_rule_that_returns_another_type_is_named(rule: str):
    b = 4
    t = 3
    arrays = torch.rand(b, t, 2), torch.eye(b), torch.rand(b, t), torch.zeros(b)
    wrong = Rules()._replace(**{rule: lambda *_: torch.zeros(b)})
    with pytest.raises(TypeError, match=f"{rule}: returns torch.float32, must return torch"):
        mix_horizontal(*arrays, tau=1.0, rho=0.0, rules=wrong)


def test_mix_horizontal_refuses_other_shapes():
    tokens, targets, saliency, easy = one_batch()
    with pytest.raises(ValueError, match=r"saliency of 8 tokens"):
        mix(Batch(tokens[:, :4], targets, saliency, easy), 0.0)
    with pytest.raises(ValueError, match=r"targets \[5\]: must be"):
        mix(Batch(tokens, torch.arange(5), saliency, easy), 0.0)


# Gain and assignment


def gain_by_definition(saliency: Tensor, rho: float) -> Tensor:
    difference = saliency.double()[None, :, :] - saliency.double()[:, None, :]  # i j t
    return (difference - rho).clamp(min=0).sum(dim=2)


saliencies = arrays(
    np.float32, st.tuples(st.integers(1, 8), st.integers(1, 20)), elements=st.floats(0, 1, width=32)
)


@given(saliencies, st.sampled_from([0.0, 1e-4, 0.005, 0.3, 1.0]))
def test_gain_matrix_equals_its_definition(saliency: np.ndarray, rho: float):
    """Receivers are rows, donors columns."""
    gain = gain_matrix(torch.from_numpy(saliency), rho)
    expected = gain_by_definition(torch.from_numpy(saliency), rho)
    torch.testing.assert_close(gain, expected, atol=1e-5, rtol=1e-5)
    assert (gain.diagonal() == 0).all()
    assert (gain >= 0).all()
    assert gain_matrix(torch.from_numpy(saliency), INF).eq(0).all()


def test_gain_matrix_is_exact_with_many_tokens():
    saliency = (0.1 * torch.randn(8, 4096, generator=torch.Generator().manual_seed(0))).softmax(1)
    expected = gain_by_definition(saliency, 0.005)
    torch.testing.assert_close(gain_matrix(saliency, 0.005), expected, atol=1e-12, rtol=1e-9)


@given(
    arrays(
        np.float32,
        st.integers(1, 6).flatmap(lambda b: st.tuples(st.integers(1, b), st.just(b))),
        elements=st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 2, width=32),
    )
)
def test_optimal_assignment_equals_brute_force(gain: np.ndarray):
    k, b = gain.shape
    donor = optimal_assignment(torch.from_numpy(gain)).numpy()
    assert len({*donor.tolist()}) == k
    best = max(sum(gain[i, p[i]] for i in range(k)) for p in permutations(range(b), k))
    assert gain[np.arange(k), donor].sum() == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("receivers", [64, 115, 128])
@pytest.mark.parametrize("sharpness", [0.1, 3.0])  # from nearly uniform saliency on
def test_donors_of_large_batches_gain_as_much_as_the_solvers(receivers: int, sharpness: float):
    generator = torch.Generator().manual_seed(receivers)
    saliency = (sharpness * torch.randn(128, 64, generator=generator)).softmax(dim=1)
    gain = gain_matrix(saliency, 0.0005)[:receivers]
    donor = optimal_assignment(gain)
    assert donor.unique().numel() == receivers
    best = gain.numpy()[linear_sum_assignment(gain.numpy(), maximize=True)].sum()
    assert float(gain[torch.arange(receivers), donor].sum()) == pytest.approx(best, rel=1e-12)


def test_optimal_assignment_takes_any_precision_and_refuses_what_has_no_answer():
    assert optimal_assignment(torch.eye(3).bfloat16()).tolist() == [0, 1, 2]
    assert optimal_assignment(torch.eye(3).requires_grad_()).tolist() == [0, 1, 2]
    nobody = optimal_assignment(torch.zeros(0, 5))
    assert nobody.shape == (0,)
    assert nobody.dtype == torch.int64
    with pytest.raises(ValueError, match="3 receivers"):
        optimal_assignment(torch.zeros(3, 2))
    for bad in (NAN, INF):
        with pytest.raises(FloatingPointError, match="not finite"):
            optimal_assignment(torch.tensor([[0.0, 1, 2], [0, bad, 0]]))


# Other rules: one replaced, and nothing else moves


def test_without_settings_the_rules_are_the_papers():
    assert rules() == Rules()


@given(batches(), st.sampled_from(RHOS), st.integers(0, 2**31))
def test_random_matching_draws_different_donors_for_easy_samples(batch, rho, seed):
    torch.manual_seed(seed)
    mixed = mix(batch, rho, RANDOM_MATCHING)
    easy = batch.is_easy
    assert mixed.donor[easy].unique().numel() == int(easy.sum())
    assert torch.equal(mixed.donor[~easy], torch.arange(len(easy))[~easy])
    gained = batch.saliency[mixed.donor] - batch.saliency > rho
    assert torch.equal(mixed.mask, easy[:, None] & gained)


@given(batches(), st.sampled_from(RHOS))
def test_random_tokens_keep_pairs_and_numbers_and_label_by_attention(batch, rho):
    torch.manual_seed(1)
    mixed = mix(batch, rho, RANDOM_TOKENS)
    expected = mix(batch, rho)
    assert torch.equal(mixed.donor, expected.donor)
    assert torch.equal(mixed.mask.sum(dim=1), expected.mask.sum(dim=1))
    taken = batch.saliency[mixed.donor]
    kept_sum = (batch.saliency * ~mixed.mask).sum(1)
    taken_sum = (taken * mixed.mask).sum(1)
    ratio = torch.where(taken_sum > 0, kept_sum / (kept_sum + taken_sum), 1.0)
    torch.testing.assert_close(mixed.keep_ratio[:, 0], ratio, atol=1e-6, rtol=1e-5)


def test_random_tokens_are_spread_evenly():
    torch.manual_seed(0)
    expected = mix(one_batch(), 0.0).mask.float().mean(dim=1, keepdim=True)
    total = torch.stack([mix(one_batch(), 0.0, RANDOM_TOKENS).mask.float() for _ in range(500)])
    assert ((total.mean(dim=0) - expected).abs() < 0.12).all()  # 5 standard deviations


@given(batches(), st.sampled_from(RHOS))
def test_labels_by_count_ignore_saliency(batch: Batch, rho: float):
    mixed = mix(batch, rho, BY_COUNT)
    expected = mix(batch, rho)
    assert torch.equal(mixed.tokens, expected.tokens)
    share = expected.mask.float().mean(dim=1, keepdim=True)
    targets = (1 - share) * batch.targets + share * batch.targets[expected.donor]
    torch.testing.assert_close(mixed.targets, targets)


@given(batches(), st.sampled_from(RHOS))
def test_published_mask_compares_with_the_first_easy_sample(batch: Batch, rho: float):
    mixed = mix(batch, rho, PUBLISHED)
    expected = mix(batch, rho)
    assert torch.equal(mixed.donor, expected.donor)
    first = batch.saliency[batch.is_easy][:1]
    gained = batch.saliency[mixed.donor] - first > rho if len(first) else mixed.mask
    assert torch.equal(mixed.mask, batch.is_easy[:, None] & gained)


@pytest.mark.parametrize("file", ["htm_seqpool", "htm_cls"])
@pytest.mark.parametrize("case", range(4))
def test_published_mask_and_order_reproduce_the_published_arrays(file: str, case: int):
    """The published order moves easy samples to the front."""
    recorded = dict(np.load(FIXTURES / f"{file}.npz"))
    names = ("tokens", "targets", "saliency", "is_easy", "out_tokens", "out_targets")
    *batch, tokens, targets = (torch.from_numpy(recorded[f"case{case}/{x}"]) for x in names)
    mixed = mix(Batch(*batch), float(recorded[f"case{case}/rho"]), PUBLISHED)
    order = (~mixed.is_easy).int().argsort(stable=True)
    for ours, expected in ((mixed.tokens, tokens), (mixed.targets, targets)):
        assert (ours[order] - expected).abs().max() <= 1e-4 * expected.abs().max()
    per_sample = float(mixed.mask.sum() / mixed.is_easy.sum())
    assert per_sample == pytest.approx(float(recorded[f"case{case}/mean_tokens_mixed"]))


RANDOM_MATCHING = rules(matching="random")
RANDOM_TOKENS = rules(detector="random")
BY_COUNT = rules(labels="count")
PUBLISHED = rules(mask_rule="published")


@pytest.mark.parametrize("name", RULES)
def test_every_rule_changes_training_and_nothing_else(name: str):
    """Off it is the plain model; the published order changes what VTM reads, not who is mixed."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(6, 3, 32, 32, generator=generator)
    targets = torch.randn(6, CLASSES, generator=generator).softmax(dim=1)
    outputs = []
    for settings in ({}, RULES[name], {**RULES[name], "tau": 0.0}):
        htm = {"layer": 1, "tau": INF, "rho": 0.002, **settings}
        torch.manual_seed(0)
        module = attach(
            small_vit(), CLASSES, htm=htm, vtm=None if "tau" in settings else {"layer": 3}
        )
        torch.manual_seed(5)
        outputs.append(module.train()(images, targets))
        assert torch.equal(module.eval()(images), small_vit().eval()(images))
    usual, found, off = outputs
    assert torch.allclose(found.targets, usual.targets) == (name == "order=published")
    assert torch.allclose(found.logits, usual.logits) == (name == "labels=count")
    assert torch.equal(off.logits, small_vit().train()(images))
    assert torch.equal(off.targets, targets)
    assert off.stats["mixed_tokens"] == 0


# Saliency


@pytest.mark.parametrize(("prefix", "class_token"), [(0, False), (1, False), (1, True), (2, True)])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_rollout_saliency_is_the_product_with_later_maps_on_the_left(steps, prefix, class_token):
    generator = torch.Generator().manual_seed(2)
    expected = []
    maps = [torch.randn(3, 2, 6, 6, generator=generator).softmax(-1) for _ in range(steps + 1)]
    for sample in range(3):
        product = np.eye(6)
        for attn in maps:
            product = attn[sample].double().numpy().mean(axis=0) @ product
        expected.append(product[0] if class_token else product.mean(axis=0))
    found = rollout_saliency(maps, prefix, class_token)
    torch.testing.assert_close(found, torch.tensor(np.array(expected)[:, prefix:]).float())


def test_saliency_is_float32_detached_and_needs_the_token_that_it_reads():
    maps = [torch.rand(3, 2, 6, 6).bfloat16().requires_grad_()]
    found = rollout_saliency(maps)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    with pytest.raises(ValueError, match="num_prefix_tokens"):
        rollout_saliency(maps, num_prefix_tokens=0, class_token=True)


def test_gradient_saliency_pools_to_the_grid_and_sums_to_one():
    pixels = torch.arange(32.0).reshape(1, 4, 8)
    found = gradient_saliency(pixels, 8)  # 2 x 4 tokens of 2 x 2 pixels
    blocks = pixels.reshape(2, 2, 4, 2).mean(dim=(1, 3)).flatten()
    torch.testing.assert_close(found[0], blocks / blocks.sum())
    assert torch.equal(gradient_saliency(torch.zeros(1, 4, 4), 4), torch.zeros(1, 4))
    with pytest.raises(ValueError, match="5 tokens form no grid"):
        gradient_saliency(pixels, 5)


def test_the_gradient_detector_is_the_gradient_of_each_samples_own_loss():
    """By the plain model without dropout, in the patches' grid; nothing of it stays behind."""
    model = small_vit(drop_path_rate=0.5)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(3, 3, 32, 32, generator=generator)
    targets = torch.eye(CLASSES)[:3]
    expected = []
    plain = small_vit().eval()
    for image, target in zip(images, targets, strict=True):
        pixels = image[None].clone().requires_grad_()
        F.cross_entropy(plain(pixels), target[None]).backward()
        assert pixels.grad is not None
        norm = pixels.grad.square().sum(dim=1).sqrt()
        cells = norm.unflatten(1, (4, -1)).unflatten(3, (4, -1)).mean(dim=(2, 4))
        expected.append((cells / cells.sum()).flatten())
    htm = {"layer": 1, "tau": INF, "rho": 0.0, "detector": "gradient"}
    module = attach(model, CLASSES, htm=htm).train()
    output = module(images, targets)
    torch.testing.assert_close(
        output.layers[0].saliency, torch.stack(expected), atol=1e-6, rtol=1e-3
    )
    assert output.mask.any()
    assert all(part.training for part in module.modules())
    assert all(p.grad is None for p in module.parameters())
    with torch.no_grad():  # as when pairs are drawn
        pairs = module.mixed_pairs(images, targets)
    assert pairs is not None
    assert torch.equal(pairs.mask, output.mask)


def embedded(model: Any, images: Tensor) -> Tensor:
    return model.norm_pre(model._pos_embed(model.patch_embed(images)))


def map_of(block: Any, x: Tensor) -> Tensor:
    q, k, _ = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1)


@pytest.mark.parametrize(
    "settings",
    [{}, {"detector": "mean_attention"}, {"detector": "random"}, {"rollout_steps": 2}],
    ids=str,
)
def test_detectors_compare_the_rows_and_blocks_that_they_name(settings: dict[str, Any]):
    """Without dropout and stochastic depth, also where a rollout runs ahead."""
    model = small_vit(proj_drop_rate=0.5, drop_path_rate=0.5)
    plain = small_vit().eval()
    images = torch.randn(3, 3, 32, 32)
    targets = torch.eye(CLASSES)[:3]
    htm = {"layer": 0, "tau": INF, "rho": 0.0, **settings}
    x = embedded(plain, images)
    maps = []
    for block in plain.blocks[: settings.get("rollout_steps", 0) + 1]:  # type: ignore[index]
        maps.append(map_of(block, x))
        x = block(x)
    expected = rollout_saliency(maps, 1, settings.get("detector") != "mean_attention")
    model.pos_drop.p = 0.0  # type: ignore[union-attr, assignment]
    found = attach(model, CLASSES, htm=htm).train()(images, targets).layers[0].saliency
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    assert not found.requires_grad


@pytest.mark.parametrize(
    "settings",
    [
        {"vtm": {"layer": 2, "kappa": 4}},
        {"vtm": {"layer": [2, 3], "kappa": 4}, "htm": {"layer": 1, "tau": INF, "rho": 0.0}},
    ],
    ids=["vtm", "both"],
)
def test_a_pass_leaves_the_generator_where_the_plain_model_does(settings: dict[str, Any]):
    """So that what is drawn after it, such as the next step's dropout, is the plain model's."""
    options = {"pos_drop_rate": 0.1, "proj_drop_rate": 0.5, "drop_path_rate": 0.5}
    images = torch.randn(3, 3, 32, 32)
    targets = torch.eye(CLASSES)[:3]
    plain = small_vit(**options).train()
    module = attach(small_vit(**options), CLASSES, **settings).train()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    plain(images)
    expected = torch.get_rng_state()
    torch.manual_seed(7)
    output = module(images, targets)
    assert torch.equal(torch.get_rng_state(), expected)
    assert not torch.equal(expected, before)
    assert output.layers == () or output.mask.any()


# ScoreNet, VTM, manifold mixup


def test_difficulty_is_the_cross_entropy_in_nats_and_includes_that_of_soft_targets():
    logits = torch.tensor([[0.0, 0.0], [20.0, 0.0]])
    targets = torch.tensor([[1.0, 0.0]] * 2)
    torch.testing.assert_close(difficulty(logits, targets), torch.tensor([math.log(2), 0.0]))
    soft = torch.tensor([[0.7, 0.3]])
    torch.testing.assert_close(difficulty(soft.log(), soft)[0], -(soft * soft.log()).sum())
    with torch.autocast("cpu", torch.bfloat16):
        assert difficulty(logits.bfloat16(), targets).dtype == torch.float32


@pytest.mark.parametrize(
    ("keep", "smoothing", "floor"),
    [(1.0, 0.0, 0.0), (1.0, 0.1, 0.5003), (0.5, 0.0, math.log(2)), (0.5, 0.1, 1.0828)],
)
def test_excess_leaves_out_the_floor_of_the_difficulty(keep: float, smoothing: float, floor: float):
    """The entropy of a label of 10 classes, smoothed and mixed with another class."""
    targets = torch.full((1, 10), smoothing / 10)
    targets[0, 0] += keep * (1 - smoothing)
    targets[0, 1] += (1 - keep) * (1 - smoothing)
    logits = torch.randn(1, 10)
    best = (targets + 1e-12).log()
    assert difficulty(best, targets).item() == pytest.approx(floor, abs=1e-4)
    assert 0 <= difficulty(best, targets, "excess").item() < 1e-6
    gap = difficulty(logits, targets) - difficulty(logits, targets, "excess")
    assert gap.item() == pytest.approx(floor, abs=1e-4)


def test_excess_is_the_divergence_of_each_sample_from_its_label():
    """sum of t (log t - log p), written out; a class that a label leaves out adds nothing."""
    logits = torch.randn(3, 4)
    targets = torch.tensor([[0.7, 0.2, 0.1, 0.0], [1.0, 0, 0, 0]])
    targets = torch.cat([targets, torch.full((1, 4), 0.25)])
    found = difficulty(logits, targets, "excess")
    for i in range(3):
        p = logits[i].exp() / logits[i].exp().sum()
        terms = [float(t * (t / q).log()) for t, q in zip(targets[i], p, strict=True) if t > 0]
        assert float(found[i]) == pytest.approx(sum(terms), abs=1e-5)


@pytest.mark.parametrize("pooling", ["attention", "average", "class_token"])
def test_scorenet_pools_as_named(pooling: Any):
    net = ScoreNet(8, 3, pooling)
    tokens = torch.randn(2, 5, 8)
    spatial = tokens[:, 1:]
    if net.pool is not None:
        pooled = (net.pool(spatial).softmax(dim=1) * spatial).sum(dim=1)
    else:
        pooled = spatial.mean(dim=1) if pooling == "average" else tokens[:, 0]
    torch.testing.assert_close(net(tokens, 1), net.head(pooled))
    if pooling == "class_token":
        with pytest.raises(ValueError, match="class token"):
            net(tokens)


def test_scorenet_has_the_published_size():
    assert sum(p.numel() for p in ScoreNet(256, 100).parameters()) == 25_957


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
    assert [x.tau for x in layered.by_layer.values()] == pytest.approx([tau, 4.0])
    rhos = [x.rho_for(num_tokens) for x in layered.by_layer.values()]
    assert rhos == pytest.approx([0.5, rho], abs=5e-5)


def test_salient_indices_leave_the_prefix_out():
    saliency = torch.tensor([[0.1, 0.5, 0.0, 0.3, 0.1], [0.9, 0.0, 0.0, 0.0, 0.8]])
    assert salient_indices(saliency, 2, num_prefix_tokens=2).tolist() == [[3, 5], [2, 6]]
    with pytest.raises(ValueError, match="kappa=6"):
        salient_indices(saliency, 6)


def manifold(seed: int, **settings: Any) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Returns the output of a pass, the kept share and the partners that its targets tell."""
    torch.manual_seed(0)
    module = attach(small_vit(depth=2), CLASSES, **settings).train()
    images = torch.randn(CLASSES, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(seed)
    output = module(images, torch.eye(CLASSES))
    share = output.targets.diagonal().min()  # that of a sample that is not its own partner
    partner = (output.targets - share * torch.eye(CLASSES)).argmax(dim=1)
    return output, images, share, partner


@pytest.mark.parametrize("layer", [0, 1])
def test_manifold_mixup_is_linear_in_the_tokens_of_the_drawn_block_and_the_targets(layer: int):
    settings = {"manifold_mixup": {"alpha": 1.0, "layers": [layer]}}
    output, images, share, partner = manifold(4, **settings)
    assert sorted(partner.tolist()) == [*range(CLASSES)]
    assert 0 < share < 1
    model: Any = small_vit(depth=2).train()

    def mixed(x: Tensor) -> Tensor:
        return share * x + (1 - share) * x[partner]

    model.blocks[layer].register_forward_pre_hook(lambda block, args: (mixed(args[0]),))
    torch.testing.assert_close(output.logits, model(images), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(output.targets, mixed(torch.eye(CLASSES)))
    assert output.stats["mixed_samples"] == 0
    # HTM at the same block mixes what manifold mixup leaves, and is measured by its targets.
    htm = {"layer": layer, "tau": INF, "rho": INF}
    both, *_ = manifold(4, htm=htm, **settings)
    torch.testing.assert_close(both.targets, output.targets)
    expected = F.cross_entropy(both.layers[0].score_logits, output.targets)
    torch.testing.assert_close(both.score_loss, expected)


@pytest.mark.parametrize("alpha", [0.2, 2.0])
def test_manifold_mixups_share_follows_the_beta_distribution(alpha: float):
    torch.manual_seed(0)
    module = attach(small_vit(depth=1), CLASSES, manifold_mixup={"alpha": alpha, "layers": [0]})
    images = torch.zeros(CLASSES, 3, 32, 32)
    shares = []
    for _ in range(400):
        targets = module.train()(images, torch.eye(CLASSES)).targets
        shares.append(float(targets.diagonal().min()))
    kept = torch.tensor([share for share in shares if share < 1])
    assert float(kept.mean()) == pytest.approx(0.5, abs=0.06)
    assert float(kept.var()) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.2)
