"""What `attach` makes of a model: the plain one where nothing mixes, a loss, figures, groups."""

import copy
import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from timm.data import resolve_model_data_config
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

from tests.conftest import CLASSES, small_cct, small_vit, small_vit_lite
from tokenmixup import HTM, VTM, Output, attach, training_loss

INF = math.inf
ALL: dict[str, Any] = {"tau": INF, "rho": 0.002}  # every sample is mixed
BOTH: dict[str, Any] = {"htm": {"layer": 1, **ALL}, "vtm": {"layer": 2}}


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    """Images and soft targets of `small_vit`."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randn(6, CLASSES, generator=generator).softmax(dim=1)
    return torch.randn(6, 3, 32, 32, generator=generator), targets


def attached(model: nn.Module | None = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    return attach(model or small_vit(), CLASSES, **settings).train()


# Where nothing mixes


def test_evaluation_is_the_plain_model_bit_for_bit(batch):
    plain = small_vit().eval()
    module = attached(**BOTH)
    for _ in range(2):
        assert torch.equal(module.eval()(batch[0]), plain(batch[0]))
        assert isinstance(module.train()(*batch), Output)


@pytest.mark.parametrize("settings", [{"tau": 0.0}, {"tau": INF, "rho": INF}])
def test_htm_that_mixes_nothing_is_the_plain_model_bit_for_bit(batch, settings):
    output = attached(htm={"layer": 1, **settings})(*batch)
    assert torch.equal(output.logits, small_vit().train()(batch[0]))
    assert torch.equal(output.targets, batch[1])
    assert output.stats["mixed_tokens"] == 0


def test_without_settings_training_is_the_plain_model(batch):
    output = attached()(*batch)
    assert torch.equal(output.logits, small_vit().train()(batch[0]))
    assert output.score_loss is None
    assert output.layers == ()
    assert output.stats["mixed_samples"] == 0
    assert torch.equal(training_loss(output, 0.5), F.cross_entropy(output.logits, batch[1]))


@pytest.mark.parametrize("more", [{}, {"detector": "gradient"}, {"rollout_steps": 1}], ids=str)
@pytest.mark.parametrize("layers", [(1, 2), (2, 2), (2, 1)])
def test_htm_that_replaces_nothing_beside_vtm_is_vtm_alone(batch, layers, more):
    """Whatever its detector: VTM chooses by the blocks' own maps."""
    htm = {"layer": layers[0], "tau": 9.0, "rho": INF, **more}
    vtm = {"layer": layers[1]}
    both = attached(htm=htm, vtm=vtm)(*batch)
    alone = attached(vtm=vtm)(*batch)
    torch.testing.assert_close(both.logits, alone.logits, atol=1e-6, rtol=1e-5)


def test_a_list_of_one_layer_is_that_layer_bit_for_bit(batch):
    expected = attached(**BOTH)(*batch)
    htm = {"layer": [1], "tau": [INF], "rho": [0.002]}
    output = attached(htm=htm, vtm={"layer": (2,)})(*batch)
    assert torch.equal(output.logits, expected.logits)
    assert torch.equal(output.targets, expected.targets)
    assert output.stats == expected.stats


def test_after_the_end_of_mixing_training_is_the_plain_model(batch):
    module = attached(**BOTH, manifold_mixup={"layers": [0]})
    module.stop_mixing()
    output = module(*batch)
    assert torch.equal(output.logits, small_vit().train()(batch[0]))
    assert output.score_loss is None
    assert not any(p.requires_grad for p in module.scorenets.parameters())


# Loss and figures


def test_score_loss_uses_the_targets_that_entered(batch):
    output = attached(htm={"layer": 1, "score_loss_weight": 0.25, **ALL})(*batch)
    assert not torch.equal(output.targets, batch[1])
    expected = F.cross_entropy(output.layers[0].score_logits, batch[1])
    torch.testing.assert_close(output.score_loss, expected)
    torch.testing.assert_close(output.stats["difficulty"], output.score_loss.detach())
    loss = F.cross_entropy(output.logits, output.targets)
    torch.testing.assert_close(training_loss(output), loss + 0.25 * output.score_loss)
    torch.testing.assert_close(training_loss(output, 2), loss + 2 * output.score_loss)


@pytest.mark.parametrize("stop", [True, False])
def test_stop_gradient_keeps_the_score_loss_from_the_model(batch, stop):
    module = attached(htm={"layer": 1, "stop_gradient": stop})
    module(*batch).score_loss.backward()
    assert module.scorenets["1"].head.weight.grad is not None
    trained = [p for p in module.model.parameters() if p.grad is not None]
    assert (trained == []) == stop


def test_figures_count_easy_samples_and_replaced_tokens(batch):
    """Of each layer, and of what any of them mixed."""
    unmixed = attached(htm={"layer": [1, 3], "tau": 0.0})(*batch)
    tau = [float(mix.difficulty.median()) for mix in unmixed.layers]
    htm = {"layer": [1, 3], "tau": tau, "rho": 0.002}
    output = attached(htm=htm)(*batch)
    stats = output.stats
    for mix, tau in zip(output.layers, htm["tau"], strict=True):
        gains = mix.gain[mix.mask]
        assert torch.equal(mix.is_easy, mix.difficulty < tau)
        assert 0 < mix.is_easy.sum() < 6
        assert stats[f"mixed_samples/{mix.layer}"] == mix.is_easy.sum()
        assert stats[f"mixed_tokens/{mix.layer}"] == mix.mask.sum() / mix.is_easy.sum()
        assert stats[f"gain_max/{mix.layer}"] == gains.max() > gains.min() > 0.002
        torch.testing.assert_close(stats[f"gain_mean/{mix.layer}"], gains.mean())
        assert not mix.gain[~mix.mask].any()
        assert not mix.mask[~mix.is_easy].any()
    first, second = output.layers
    easy = first.is_easy | second.is_easy
    assert stats["mixed_samples"] == easy.sum()
    assert torch.equal(output.is_easy, easy)
    tokens = (first.mask | second.mask).sum()
    torch.testing.assert_close(stats["mixed_tokens"], tokens / easy.sum())
    both = first.difficulty.mean() + second.difficulty.mean()
    torch.testing.assert_close(output.score_loss, both)


def test_a_difficulty_of_tau_is_not_easy(batch):
    hard = attached(htm={"layer": 1})(*batch).layers[0].difficulty.detach()
    module = attached(htm={"layer": 1, "tau": float(hard.median()), "rho": 0.002})
    output = module(*batch)
    pairs = module.mixed_pairs(*batch)
    assert output.stats["mixed_samples"] == (hard < hard.median()).sum() == 2
    assert torch.equal(pairs.mask, output.mask)
    assert torch.equal(pairs.is_easy, output.is_easy)
    assert torch.equal(pairs.donor, output.layers[0].donor)
    mixed = batch[1][pairs.donor].lerp(batch[1], pairs.keep_ratio)
    torch.testing.assert_close(output.targets, mixed)


def test_auto_thresholds_are_those_of_the_classes_and_the_spatial_tokens(batch):
    module = attached(htm={"layer": 1})
    module.scorenets["1"].head.bias.data[0] = 9  # some samples are easy
    batch = batch[0], torch.eye(CLASSES)[[0, 0, 0, 1, 2, 3]]
    output = module(*batch)
    assert output.stats["mixed_samples"] == 3
    told = attached(htm={"layer": 1, "tau": math.log10(CLASSES), "rho": 1.28 / 16})
    told.load_state_dict(module.state_dict())
    assert output.mask.any()
    assert torch.equal(output.mask, told(*batch).mask)


def test_scorenet_pools_what_the_model_reads():
    for model in (small_vit(), small_vit_lite()):
        assert attached(model, htm={"layer": 1}).scorenets["1"].pooling == "class_token"
    for model in (small_cct(), small_vit(global_pool="avg")):
        assert attached(model, htm={"layer": 1}).scorenets["1"].pooling == "attention"


# Precision, dropout, checkpointing


@pytest.mark.parametrize(("htm_layer", "steps"), [(1, 0), (2, 0), (1, 1)])
def test_autocast_loses_no_gradient_to_the_saliency_pass(batch, htm_layer, steps):
    """Casts that autocast cached without gradient would leave the block's weights without one."""
    module = attached(htm={"layer": htm_layer, "rollout_steps": steps}, vtm={"layer": 2})
    with torch.autocast("cpu", torch.bfloat16):
        output = module(*batch)
    training_loss(output, 1.0).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    "more", [{}, {"detector": "mean_attention"}, {"detector": "random"}, {"rollout_steps": 1}]
)
def test_scores_that_float16_cannot_hold_mix_as_the_fused_attention_runs(batch, more):
    """q and k of one block times 1,000: fused attention computes its scores in float32."""
    model: Any = small_vit()
    with torch.no_grad():
        for parameter in model.blocks[1].attn.qkv.parameters():
            parameter[: 2 * model.embed_dim] *= 1000
    module = attached(model, htm={"layer": 1, "tau": INF, "rho": 0.0, **more}, vtm={"layer": 2})
    with torch.autocast("cpu", torch.float16):
        output = module(*batch)
    assert output.logits.isfinite().all()
    assert output.gain.isfinite().all()
    assert output.stats["mixed_tokens"] > 1


def test_other_precisions_are_served_as_they_are(batch):
    images, targets = (x.double() for x in batch)
    module = attached(small_vit().double(), **BOTH)
    output = module(images, targets)
    assert output.logits.dtype == torch.float64
    training_loss(output, 0.5).backward()
    assert all(p.grad is not None for p in module.parameters())
    whole = F.one_hot(torch.arange(6) % CLASSES, CLASSES)  # int64
    mixed = attached(**BOTH)(batch[0], whole).targets
    assert torch.equal(mixed, attached(**BOTH)(batch[0], whole.float()).targets)
    module = attached(htm={"layer": 1, "detector": "gradient", **ALL})
    with torch.autocast("cpu", torch.bfloat16):
        assert module(batch[0].bfloat16(), batch[1]).mask.any()
    for dtype in (torch.bfloat16, torch.float16):  # in which a sum of many is not quite 1
        smooth = torch.full((2, 1000), 0.1 / 1000) + 0.9 * torch.eye(1000)[:2]
        model: Any = small_vit(depth=1)
        model.reset_classifier(1000)
        module = attach(model, 1000).train()
        assert module(batch[0][:2], smooth.to(dtype)).targets.dtype == dtype


def test_attention_to_the_memory_is_dropped_out_as_the_block_would(batch):
    module = attached(vtm={"layer": 2})
    assert torch.equal(module(*batch).logits, module(*batch).logits)
    module.model.blocks[2].attn.attn_drop.p = 0.3
    assert not torch.equal(module(*batch).logits, module(*batch).logits)


@pytest.mark.parametrize("settings", [{"htm": HTM(layer=1, **ALL), "vtm": VTM(layer=2)}, {}])
def test_blocks_that_run_twice_have_the_same_gradients(batch, settings):
    """All but those that something touches run again in the backward pass."""
    gradients = []
    runs = []
    for checkpoint_blocks in (False, True):
        model: Any = small_vit(attn_drop_rate=0.1, drop_path_rate=0.1, depth=5)
        module = attached(model, checkpoint_blocks=checkpoint_blocks, **settings)
        counts = [0] * 5
        for index, block in enumerate(model.blocks):
            block.norm1.register_forward_pre_hook(
                lambda *_, i=index, n=counts: n.__setitem__(i, n[i] + 1)
            )
        torch.manual_seed(2)
        training_loss(module(*batch), 0.5).backward()
        gradients.append([p.grad for p in module.parameters()])
        runs.append(counts)
    assert all(map(torch.equal, *gradients))
    again = [twice - once for once, twice in zip(*runs, strict=True)]
    assert again == ([0, 0, 0, 1, 1] if settings else [1] * 5)


# The module around the model


def test_the_model_is_untouched_after_a_pass_and_after_a_failed_one(batch):
    module = attached(**BOTH, checkpoint_blocks=True)
    module(*batch)
    broken = batch[0].clone()
    broken[2] = float("nan")
    with pytest.raises(FloatingPointError, match=r"images\[2\]: not finite") as error:
        module(broken, batch[1])
    assert "\n" not in str(error.value)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())
    assert not any("forward" in vars(m) for m in module.modules())


def test_copies_run_their_own_parts_and_are_saved_whole(batch, tmp_path: Path):
    module = attached(**BOTH)
    expected = module(*batch)
    torch.save(module, tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    for other in (copy.deepcopy(module), loaded):
        assert torch.equal(other(*batch).logits, expected.logits)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert (other(*batch).layers[0].score_logits == 0).all()
    assert torch.equal(module(*batch).logits, expected.logits)


def test_what_a_model_loses_is_freed(batch):
    module = attached(**BOTH)
    module(*batch)
    gone = weakref.ref(module.model.blocks[1])
    module.model.blocks[1] = small_vit().blocks[0]  # type: ignore
    module(*batch)
    assert gone() is None
    whole = weakref.ref(module.model)
    del module  # at once, without the collector
    assert whole() is None


def factors(model: nn.Module, **options: Any) -> dict[str, tuple[float, float]]:
    """Learning rate factor and weight decay of each parameter, by name, with timm's optimiser."""
    optimizer = create_optimizer_v2(model, opt="sgd", lr=1.0, weight_decay=0.05, **options)
    of = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            of[parameter] = (group.get("lr_scale", 1.0), group["weight_decay"])
    return {name: of[parameter] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("options", [{"layer_decay": 0.5}, {}], ids=str)
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "cait_xxs24_224"])
def test_parameters_learn_at_the_rates_of_the_plain_model(name: str, options: dict[str, float]):
    """Whose groups are told by patterns, or by a function."""
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=CLASSES)
        plain = factors(model, **options)
        ours = factors(attach(model, CLASSES, htm={"layer": [0, 1]}), **options)
    scorenets = {key: ours.pop(key) for key in list(ours) if key.startswith("scorenets.")}
    assert ours == {f"model.{key}": value for key, value in plain.items()}
    assert len(scorenets) >= 4
    assert {rate for rate, _ in scorenets.values()} == {1.0}
    assert len({rate for rate, _ in plain.values()}) > (10 if options else 0)


def test_models_without_groups_or_heads_learn_as_well():
    for options in ({"layer_decay": 0.5}, {}):
        plain = factors(small_cct(), **options)
        ours = factors(attached(small_cct()), **options)
        assert ours == {f"model.{key}": value for key, value in plain.items()}
    model: Any = small_vit()
    model.reset_classifier(0)
    plain = factors(model, layer_decay=0.5)
    ours = factors(attached(model, htm={"layer": 1}), layer_decay=0.5)
    assert ours["scorenets.1.head.weight"][0] == max(rate for rate, _ in plain.values()) == 1
    assert attached(small_cct()).no_weight_decay() == set()
    assert resolve_model_data_config(attached()) == resolve_model_data_config(small_vit())


# What is no batch


def row(*values: float) -> Tensor:
    targets = torch.eye(CLASSES)[:2]
    targets[1] = torch.tensor(values)
    return targets


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        (None, "targets"),
        (torch.arange(2), "targets"),
        (torch.eye(7)[:2], "targets"),
        (torch.eye(5)[:3], "targets"),
        ([[1.0, 0, 0, 0, 0]] * 2, "targets"),
        (np.eye(CLASSES)[:2], "targets"),
        (row(0.5, 0.2, 0, 0, 0), r"targets[1]"),
        (row(1.5, -0.5, 0, 0, 0), r"targets[1]"),
        (row(0.5, math.nan, 0.5, 0, 0), r"targets[1]"),
        (row(INF, 0, 0, 0, 0), r"targets[1]"),
    ],
)
def test_targets_that_are_no_probabilities_are_refused(targets: Any, told: str):
    kind = TypeError if targets is None else ValueError
    with pytest.raises(kind) as error:
        attached(htm={"layer": 1})(torch.zeros(2, 3, 32, 32), targets)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_other_mistakes_are_told_in_one_line(batch):
    images, targets = batch
    module = attached(htm={"layer": 1})
    for wrong in ({"patches": images}, images[:, 0]):
        with pytest.raises(ValueError, match="images"):
            module(wrong, targets)
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        module._replicate_for_data_parallel()(images, targets)
    with pytest.raises(TypeError, match="Output"):
        training_loss(module.eval()(images))
    model: Any = small_vit()
    model.head = nn.Sequential(model.head, nn.Identity())  # its size is not known
    with pytest.raises(ValueError, match=rf"\[6, {CLASSES}\]"):
        attach(model, CLASSES + 2, htm={"layer": 1}).train()(images, torch.eye(CLASSES + 2)[:6])
