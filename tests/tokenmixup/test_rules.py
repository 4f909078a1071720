"""Ablations, detectors and published rules: each replaced rule alone, and nothing else moves."""

from itertools import permutations
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import CLASSES, settled, small_cct, small_vit
from tests.tokenmixup.test_horizontal import RHOS, Batch, batches, mix_easy
from tokenmixup import (
    HTM,
    HorizontalMix,
    Output,
    Rules,
    attach,
    attention_saliency,
    mix_horizontal,
)
from tokenmixup import settings as names
from tokenmixup.assignment import gain_matrix
from tokenmixup.detectors import DETECTORS, block_map
from tokenmixup.horizontal import PAPER
from tokenmixup.rules import CHOICES, MATCHINGS, ORDERS, rules_of
from tokenmixup.vertical import INDICES

FIXTURES = Path(__file__).parents[1] / "fixtures"
ALL: dict[str, Any] = {"tau": float("inf"), "rho": 0.002}  # every sample is mixed


def mix(batch: Batch, rho: float, **settings: Any) -> HorizontalMix:
    htm = HTM(layer=0, **settings)
    return ORDERS[htm.order](mix_easy(*batch[:4], rho, rules_of(htm)))


def paper_mix(batch: Batch, rho: float) -> HorizontalMix:
    return mix_easy(*batch[:4], rho)


def test_without_settings_the_rules_are_the_papers():
    assert rules_of(HTM(layer=0)) == PAPER


@pytest.mark.parametrize(
    ("choice", "table"),
    [
        *((get_type_hints(HTM)[option], table) for option, table in CHOICES.items()),
        (names.ClassTokenOffset, INDICES),
    ],
    ids=[*CHOICES, "class_token_offset"],
)
def test_every_name_has_its_rule(choice: Any, table: dict[str, Any]):
    hint = "settings.py and the table need the same names in the same order"
    assert get_args(choice) == tuple(table), hint


@pytest.mark.parametrize("detector", DETECTORS)
def test_saliency_is_a_share_of_each_spatial_token(detector: Any):
    """Rho is compared with the difference of two, and labels are shares of the sum."""
    found: list[torch.Tensor] = []

    def noted(entry: Any) -> torch.Tensor:
        found.append(DETECTORS[detector](entry))
        return found[-1]

    module = attach(small_vit(), CLASSES, htm={"layer": 1, "detector": detector})
    module.detect = noted
    module(torch.randn(3, 3, 32, 32), torch.eye(CLASSES)[:3])
    (saliency,) = found
    assert saliency.shape == (3, 16) and (saliency >= 0).all()
    assert (saliency.sum(dim=1) <= 1.001).all() and (saliency.sum(dim=1) > 0.1).all()


def test_mean_attention_is_the_mean_over_all_queries_also_with_a_class_token():
    def compare(entry: Any) -> torch.Tensor:
        found = DETECTORS["mean_attention"](entry)
        attn = block_map(entry.block, entry.tokens, entry.given)
        torch.testing.assert_close(found, attention_saliency(attn, 1, class_token=False))
        assert not torch.allclose(found, attention_saliency(attn, 1))
        return found

    module = attach(small_vit(), CLASSES, htm={"layer": 1, "detector": "mean_attention"})
    module.detect = compare
    module(torch.randn(3, 3, 32, 32), torch.eye(CLASSES)[:3])


def test_a_detector_that_keeps_the_prefix_is_refused():
    module = attach(small_vit(), CLASSES, htm={"layer": 1})
    module.detect = lambda entry: torch.ones(entry.tokens.shape[:2])
    with pytest.raises(ValueError, match=r"returns \[3, 17\], must be .*, \[3, 16\]"):
        module(torch.randn(3, 3, 32, 32), torch.eye(CLASSES)[:3])


@pytest.mark.parametrize(("tau", "easy"), [(2.0, [0, 1]), (float("inf"), [0, 1, 2, 3]), (0.0, [])])
def test_samples_easier_than_tau_are_mixed(tau: float, easy: list[int]):
    batch, difficulty = next_batch(), torch.tensor([0.1, 1.9, 2.0, 9.0])
    tokens, targets, saliency = (x[:4] for x in batch[:3])
    found = mix_horizontal(tokens, targets, saliency, difficulty, tau, 0.0)
    assert found.is_easy.nonzero().flatten().tolist() == easy


@pytest.mark.parametrize("matching", MATCHINGS)
@given(batches(), st.sampled_from(RHOS), st.integers(0, 2**31))
def test_hard_samples_are_their_own_donors(matching: str, batch: Batch, rho: float, seed: int):
    torch.manual_seed(seed)
    found = mix(batch, rho, matching=matching)
    easy = batch.is_easy
    places = torch.arange(len(easy))
    assert torch.equal(found.donor[~easy], places[~easy])
    taken = batch.saliency[found.donor]
    assert torch.equal(found.mask, easy[:, None] & (taken - batch.saliency > rho))


@pytest.mark.parametrize("matching", ["optimal", "random"])
@given(batches(), st.integers(0, 2**31))
def test_easy_samples_have_different_donors(matching: str, batch: Batch, seed: int):
    torch.manual_seed(seed)
    donor = mix(batch, 0.0, matching=matching).donor[batch.is_easy]
    assert donor.unique().numel() == int(batch.is_easy.sum())


@pytest.mark.parametrize("matching", MATCHINGS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gain_that_is_not_finite_is_refused(matching: str, value: float):
    batch = next_batch()
    batch.is_easy[0] = True
    batch.saliency[-1, 0] = value
    with pytest.raises(FloatingPointError, match="not finite"):
        mix(batch, 0.0, matching=matching)


def test_the_matching_of_the_library_page_finds_the_best_donors(documented_matching: Any):
    rules = rules_of(HTM(layer=0))._replace(match=documented_matching)
    batch = next_batch()
    for is_easy in (torch.zeros_like(batch.is_easy), batch.is_easy):
        found = mix_easy(*batch._replace(is_easy=is_easy)[:4], 0.0, rules)
        best = gain_matrix(batch.saliency, 0.0).argmax(dim=1)
        assert torch.equal(found.donor, torch.where(is_easy, best, torch.arange(len(best))))
    batch.is_easy[0], batch.saliency[-1, 0] = True, float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        mix_easy(*batch[:4], 0.0, rules)


def test_random_matching_draws_every_donor():
    torch.manual_seed(0)
    batch = next_batch()
    seen = {int(mix(batch, 0.0, matching="random").donor[0]) for _ in range(200)}
    assert seen == set(range(len(batch.tokens)))


@given(batches(), st.sampled_from(RHOS))
def test_random_tokens_keep_pairs_and_numbers_and_label_by_attention(batch, rho):
    torch.manual_seed(1)
    found, expected = mix(batch, rho, detector="random"), paper_mix(batch, rho)
    assert torch.equal(found.donor, expected.donor)
    assert torch.equal(found.mask.sum(dim=1), expected.mask.sum(dim=1))
    taken = batch.saliency[found.donor]
    kept_sum, taken_sum = (batch.saliency * ~found.mask).sum(1), (taken * found.mask).sum(1)
    ratio = torch.where(taken_sum > 0, kept_sum / (kept_sum + taken_sum), 1.0)
    torch.testing.assert_close(found.keep_ratio[:, 0], ratio, atol=1e-6, rtol=1e-5)


def test_random_tokens_are_spread_evenly():
    torch.manual_seed(0)
    batch = next_batch()
    expected = paper_mix(batch, 0.0).mask.float().mean(dim=1, keepdim=True)
    total = torch.stack([mix(batch, 0.0, detector="random").mask.float() for _ in range(500)])
    assert ((total.mean(dim=0) - expected).abs() < 0.12).all()  # 5 standard deviations


@given(batches(), st.sampled_from(RHOS))
def test_labels_by_count_ignore_saliency(batch: Batch, rho: float):
    found, expected = mix(batch, rho, labels="count"), paper_mix(batch, rho)
    assert torch.equal(found.tokens, expected.tokens)
    share = expected.mask.float().mean(dim=1, keepdim=True)
    targets = (1 - share) * batch.targets + share * batch.targets[expected.donor]
    torch.testing.assert_close(found.targets, targets)


@pytest.mark.parametrize("file", ["htm_seqpool", "htm_cls"])
@pytest.mark.parametrize("case", range(4))
def test_published_mask_and_order_reproduce_the_published_arrays(file: str, case: int):
    arrays = dict(np.load(FIXTURES / f"{file}.npz"))
    names = ("tokens", "targets", "saliency", "is_easy")
    tokens, targets, saliency, is_easy = (
        torch.from_numpy(arrays[f"case{case}/{name}"]) for name in names
    )
    batch = Batch(tokens, targets, saliency, is_easy, 0)
    rho = float(arrays[f"case{case}/rho"])
    found = mix(batch, rho, mask_rule="published", order="published")
    for ours, name in ((found.tokens, "out_tokens"), (found.targets, "out_targets")):
        expected = torch.from_numpy(arrays[f"case{case}/{name}"])
        assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
    mixed = float(found.mask.sum() / is_easy.sum())
    assert mixed == pytest.approx(float(arrays[f"case{case}/mean_tokens_mixed"]))


@given(batches(), st.sampled_from(RHOS))
def test_published_mask_compares_with_the_first_easy_sample(batch: Batch, rho: float):
    found, expected = mix(batch, rho, mask_rule="published"), paper_mix(batch, rho)
    assert torch.equal(found.donor, expected.donor)
    easy = batch.is_easy.nonzero()[:, 0].tolist()
    for i in range(len(batch.tokens)):
        if i in easy:
            gain = batch.saliency[found.donor[i]] - batch.saliency[easy[0]]
            assert torch.equal(found.mask[i], gain > rho)
        else:
            assert not found.mask[i].any()
    if easy:
        assert torch.equal(found.mask[easy[0]], expected.mask[easy[0]])


@given(batches(), st.sampled_from(RHOS))
def test_published_order_moves_easy_samples_to_the_front_and_nothing_else(batch, rho):
    found = mix(batch, rho, order="published")
    places = torch.arange(len(batch.is_easy))
    order = torch.cat([places[batch.is_easy], places[~batch.is_easy]])
    expected = paper_mix(batch, rho)
    assert torch.equal(found.tokens, expected.tokens[order])
    assert torch.equal(found.targets, expected.targets[order])
    assert torch.equal(found.donor, expected.donor) and torch.equal(found.mask, expected.mask)


@given(batches(), st.sampled_from(RHOS), st.sampled_from(["in_place", "published"]))
def test_the_exchange_does_to_others_what_was_done_to_the_tokens(batch, rho, order):
    found = mix(batch, rho, order=order)
    assert torch.equal(found.exchange(batch.tokens), found.tokens)
    assert torch.equal(found.exchange(batch.tokens[..., :1]), found.tokens[..., :1])


def top_tokens(own: Tensor, offered: Tensor, is_easy: Tensor, rho: float) -> Tensor:
    """The 3 tokens of the donor that gain most."""
    rank = (own - offered).argsort(dim=1).argsort(dim=1)
    return is_easy[:, None] & (rank < 3)


def top_gains(saliency: Tensor, rho: float) -> Tensor:
    """What a pair gains by `top_tokens`."""
    difference = saliency.double()[None] - saliency.double()[:, None]
    return difference.topk(3, dim=2).values.sum(dim=2).fill_diagonal_(0)


@given(st.integers(0, 2**31))
def test_a_mask_pairs_best_by_a_score_of_its_own(seed: int):
    generator = torch.Generator().manual_seed(seed)
    saliency = torch.randn(5, 8, generator=generator).softmax(dim=1)
    gained = []
    for rules in (Rules(choose=top_tokens, score=top_gains), Rules(choose=top_tokens)):
        found = mix_horizontal(
            saliency[..., None], torch.eye(5), saliency, torch.zeros(5), 1.0, 0.01, rules
        )
        gained.append(float(found.gain.sum()))
    pairs = torch.tensor([*permutations(range(5))])
    best = top_gains(saliency, 0.0)[torch.arange(5), pairs].sum(dim=1).max()
    assert gained[0] == pytest.approx(float(best), abs=1e-5)
    assert gained[1] <= gained[0] + 1e-5


def next_batch() -> Batch:
    generator = torch.Generator().manual_seed(3)
    return Batch(
        tokens=torch.randn(5, 8, 4, generator=generator),
        targets=torch.eye(5),
        saliency=torch.randn(5, 8, generator=generator).softmax(dim=1),
        is_easy=torch.ones(5, dtype=torch.bool),
        num_prefix_tokens=0,
    )


@pytest.mark.parametrize("layer", [1, [1, 2]])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("detector", DETECTORS)
def test_what_holds_beside_another_is_declared(
    detector: str, order: str, steps: int, layer: int | list[int]
):
    """Settings are refused by these rules alone, and valid without the choices that break one."""
    chosen = {"detector": detector, "order": order, "rollout_steps": steps, "layer": layer}
    valid = settled(chosen)
    HTM(**valid)
    if valid != chosen:
        with pytest.raises(
            ValueError, match=r"must be (0 unless|one layer with) (detector|order)="
        ):
            HTM(**chosen)


# Whole models

VARIANTS: list[dict[str, Any]] = [
    {"rollout_steps": 1},
    {"rollout_steps": 2},
    *(settled({option: name}) for option, table in CHOICES.items() for name in [*table][1:]),
]


def run(module: torch.nn.Module, batch: tuple[Tensor, Tensor], seed: int = 5) -> Output:
    torch.manual_seed(seed)
    output = module.train()(*batch)
    assert isinstance(output, Output)
    return output


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_every_variant_changes_training_and_leaves_evaluation_alone(build, batch, settings):
    module = attach(build(), CLASSES, htm={"layer": 1, **ALL, **settings}, vtm={"layer": 3})
    usual = attach(build(), CLASSES, htm={"layer": 1, **ALL}, vtm={"layer": 3})
    assert module.scorenet is not None and usual.scorenet is not None
    usual.scorenet.load_state_dict(module.scorenet.state_dict())
    ours, theirs = run(module, batch), run(usual, batch)
    if settings == {"order": "published"}:
        assert torch.equal(ours.targets, theirs.targets)  # all are easy, but not VTM's choice
        assert not torch.allclose(ours.logits, theirs.logits)
    else:
        changes = settings != {"detector": "mean_attention"} or usual.encoder.reads_class_token
        assert torch.allclose(ours.targets, theirs.targets) != changes
    assert torch.equal(module.eval()(batch[0]), build().eval()(batch[0]))


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_variants_without_anything_to_mix_are_the_plain_model(build, batch, settings):
    module = attach(build(), CLASSES, htm={"layer": 1, **settings, "tau": 0.0})
    output = run(module, batch)
    assert torch.equal(output.logits, build().train()(batch[0]))
    assert torch.equal(output.targets, batch[1])


def owners(order: str, rho: float) -> tuple[HorizontalMix, Tensor, list[Tensor], list[Tensor]]:
    """Payload: every token that enters blocks 0 to 2 carries the number of its sample.

    HTM mixes at block 2, VTM's block 3 attends. Returns the mix, the owner of each token after it
    (`b n`), and owners and places of the memory of each source block (`b kappa`).
    """
    images = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    targets = F.one_hot(torch.arange(6) % CLASSES, CLASSES).float()
    htm = {"layer": 2, "tau": 1.6, "rho": rho, "order": order}
    torch.manual_seed(0)
    module = attach(small_cct(), CLASSES, htm=htm, vtm={"layer": 3, "kappa": 2})
    blocks: Any = module.model.blocks
    seen: list[Tensor] = []

    def tag(tokens: Tensor) -> Tensor:
        return torch.cat([torch.arange(6.0)[:, None, None].expand(-1, 64, 1), tokens[..., 1:]], 2)

    blocks[0].register_forward_pre_hook(lambda block, args: (tag(args[0]),))
    for block in blocks[:2]:
        block.register_forward_hook(lambda block, args, out: tag(out))
    own = type(blocks[2]).forward
    blocks[2].forward = lambda x: (seen.append(x[..., 0]), own(blocks[2], x))[1]
    with torch.no_grad():
        state = module.traced(images, targets)
    mix, memory = state.mixes[2], state.memories[3]
    assert 0 < mix.is_easy.sum() < 6
    return mix, seen[0], [tokens[..., 0] for tokens in memory.tokens], memory.indices


@pytest.mark.parametrize("order", ["in_place", "published"])
def test_vtm_chooses_at_the_block_of_htm_by_saliency_that_moves_with_its_token(order: str):
    """But for the published order, which chooses by the saliency from before mixing."""
    images = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    htm = {"layer": 1, **ALL, "order": order}
    module = attach(small_cct(), CLASSES, htm=htm, vtm={"layer": 2, "kappa": 5})
    detect, seen = module.detect, []
    module.detect = lambda entry: seen.append(detect(entry)) or seen[0]
    with torch.no_grad():
        state = module.traced(images, F.one_hot(torch.arange(6) % CLASSES, CLASSES).float())
    (saliency,) = seen
    moved = torch.where(state.mixes[1].mask, saliency[state.mixes[1].donor], saliency)
    expected = moved if order == "in_place" else saliency
    assert not torch.equal(moved, saliency)
    assert torch.equal(state.memories[2].indices[1], expected.topk(5, dim=1).indices)


def test_memory_belongs_to_the_sample_that_reads_it():
    mix, tokens, memory, places = owners("in_place", rho=0.002)
    own = torch.arange(6.0)[:, None]
    expected = torch.where(mix.mask, mix.donor[:, None].float(), own)
    assert mix.mask.any()
    assert torch.equal(tokens, expected)  # HTM's own exchange, nothing else
    assert all(torch.equal(of_block, own.expand(-1, 2)) for of_block in memory[:2])
    assert torch.equal(memory[2], expected.take_along_dim(places[2], dim=1))


def test_published_order_leaves_the_memory_of_other_samples():
    _, tokens, memory, _ = owners("published", rho=float("inf"))
    rows = tokens[:, :1]  # nothing is replaced, so a row has one owner
    assert sorted(rows[:, 0].tolist()) == [0, 1, 2, 3, 4, 5]
    assert not torch.equal(rows, torch.arange(6.0)[:, None])
    assert all((of_block != rows).any() for of_block in memory[:2])
    assert torch.equal(memory[2], rows.expand(-1, 2))


@pytest.mark.parametrize("rule", ["paper", "published"])
def test_the_class_token_is_selected_by_the_published_offset_only(rule: str):
    torch.manual_seed(0)
    module = attach(small_vit(), CLASSES, vtm={"layer": 3, "kappa": 4, "class_token_offset": rule})
    found = []
    for seed in range(8):
        images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            state = module.traced(images, torch.eye(CLASSES)[torch.arange(8) % CLASSES])
        found.append(torch.cat(state.memories[3].indices, dim=1))
    places = torch.cat(found)
    if rule == "paper":
        assert places.min() == 1 and places.max() == 16
    else:
        assert places.min() == 0 and places.max() == 15
