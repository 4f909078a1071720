"""TokenMixup on whole models, against identities and the oracle."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

from tests.conftest import CLASSES, sharpened, small_cct, small_vit, small_vit_lite
from tests.oracle import Oracle
from tokenmixup import HTM, VTM, Output, attach, training_loss

NAN = float("nan")
EVERYTHING = {"tau": float("inf"), "rho": 0.002}  # every sample is mixed
HTM1, VTM1 = {"htm": {"layer": 1}}, {"vtm": {"layer": 1}}
RERUN = {"checkpoint_blocks": True}
BY_TOKEN, PUBLISHED = {"pooling": "class_token"}, {"class_token_offset": "published"}


def train_output(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Output:
    output = module.train()(*batch)
    assert isinstance(output, Output)
    return output


def test_evaluation_is_the_plain_model_bit_for_bit(build, batch):
    plain = build().eval()
    module = attach(build(), CLASSES, htm={"layer": 1}, vtm={"layer": 2}).eval()
    assert torch.equal(module(batch[0]), plain(batch[0]))
    train_output(module, batch)
    assert torch.equal(module.eval()(batch[0]), plain(batch[0]))


@pytest.mark.parametrize("settings", [{"tau": 0.0}, {"tau": float("inf"), "rho": float("inf")}])
def test_htm_that_mixes_nothing_is_the_plain_model_bit_for_bit(build, batch, settings):
    plain = build().train()
    output = train_output(attach(build(), CLASSES, htm={"layer": 1, **settings}), batch)
    assert torch.equal(output.logits, plain(batch[0]))
    assert torch.equal(output.targets, batch[1])
    assert output.stats["mixed_tokens"] == 0


def test_without_settings_training_is_the_plain_model(build, batch):
    output = train_output(attach(build(), CLASSES), batch)
    assert torch.equal(output.logits, build().train()(batch[0]))
    assert output.score_loss is None and output.layers == ()
    assert output.stats["mixed_samples"] == 0
    expected = F.cross_entropy(output.logits, batch[1])
    assert torch.equal(training_loss(output, 0.5), expected)


@pytest.mark.parametrize("layers", [(1, 2), (2, 2), (3, 1)])
def test_htm_with_infinite_rho_beside_vtm_is_vtm_alone(build, batch, layers):
    htm, vtm = {"layer": layers[0], "tau": 9.0, "rho": float("inf")}, {"layer": layers[1]}
    both = train_output(attach(build(), CLASSES, htm=htm, vtm=vtm), batch)
    alone = train_output(attach(build(), CLASSES, vtm=vtm), batch)
    assert torch.equal(both.logits, alone.logits)


@pytest.mark.parametrize(
    ("htm", "vtm"),
    [
        *(({"layer": m}, {"layer": v, "kappa": 2}) for m, v in ((1, 2), (2, 2), (3, 1))),
        *(({"layer": 1}, None), (None, {"layer": 2, "kappa": 4})),
        ({"layer": 0, "tau": 1.65}, {"layer": 3}),
        ({"layer": [0, 2], "rho": [0.002, 0.001]}, {"layer": [1, 3], "kappa": [2, 3]}),
        ({"layer": [1, 2, 3]}, {"layer": [1, 2]}),
        ({"layer": [1, 3], "tau": [1.6, float("inf")]}, {"layer": [2, 3], "stop_gradient": True}),
        ({"layer": [1, 3]}, None),
        (None, {"layer": [1, 2, 3], "kappa": 2}),
    ],
)
def test_training_equals_the_forward_pass_written_out(build, batch, htm, vtm):
    htm = {**EVERYTHING, **htm} if htm else None
    module = attach(build(), CLASSES, htm=htm, vtm=vtm)
    twin = copy.deepcopy(module)
    output = train_output(module, batch)
    expected = Oracle(twin)(*batch)
    training_loss(output, 0.5).backward()
    training_loss(expected, 0.5).backward()
    torch.testing.assert_close(output.logits, expected.logits, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(output.targets, expected.targets, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(output.score_loss, expected.score_loss)
    torch.testing.assert_close(output.stats, expected.stats)
    assert (output.stats["mixed_tokens"] > 0) == (htm is not None)
    for (name, ours), theirs in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None, name
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-3)


def test_a_list_of_one_layer_is_that_layer_bit_for_bit(build, batch):
    htm, vtm = {"layer": 1, **EVERYTHING}, {"layer": 2, "kappa": 2}
    listed = {"layer": [1], "tau": [EVERYTHING["tau"]], "rho": [EVERYTHING["rho"]]}
    outputs = []
    for settings in ((htm, vtm), (listed, {"layer": (2,), "kappa": [2]})):
        torch.manual_seed(0)
        module = attach(build(), CLASSES, *settings)
        outputs.append(train_output(module, batch))
    first, second = outputs
    assert torch.equal(first.logits, second.logits) and torch.equal(first.targets, second.targets)
    assert first.stats == second.stats and first.stats.keys() == second.stats.keys()


def test_several_layers_count_what_any_of_them_mixed(build, batch):
    taus = [1.6, 1.62]
    module = attach(build(), CLASSES, htm={"layer": [1, 3], "tau": taus, "rho": 0.002})
    output = train_output(module, batch)
    stats, (first, second) = output.stats, output.layers
    for mix, tau in zip(output.layers, taus, strict=True):
        assert torch.equal(mix.is_easy, mix.difficulty < tau)
        assert stats[f"mixed_samples/{mix.layer}"] == mix.is_easy.sum()
        assert stats[f"mixed_tokens/{mix.layer}"] * mix.is_easy.sum() == mix.mask.sum()
        gains = mix.gain[mix.mask]
        assert stats[f"gain_max/{mix.layer}"] == gains.max() > gains.min() > 0.002
        torch.testing.assert_close(stats[f"gain_mean/{mix.layer}"], gains.mean())
        assert not mix.gain[~mix.mask].any()
    assert not torch.equal(first.is_easy, second.is_easy)
    assert stats["mixed_samples"] == (first.is_easy | second.is_easy).sum()
    tokens = (first.mask | second.mask).sum()
    torch.testing.assert_close(stats["mixed_tokens"] * stats["mixed_samples"], tokens.float())
    assert output.score_loss is not None
    torch.testing.assert_close(
        output.score_loss, first.difficulty.mean() + second.difficulty.mean()
    )


def test_vtms_memory_can_be_kept_from_teaching_its_sources(batch):
    """With attention to nothing but the memory's tokens detached, projections still learn."""
    images, targets = torch.randn(4, 3, 16, 16), torch.eye(CLASSES)[:4]
    gradients = {}
    for stops in (False, True):
        torch.manual_seed(0)
        module = attach(small_cct(), CLASSES, vtm={"layer": 2, "stop_gradient": stops}).train()
        tokens = module.traced(images, targets).memories[2].tokens
        assert all(kept.requires_grad != stops for kept in tokens)
        training_loss(train_output(module, (images, targets)), 0.1).backward()
        blocks: Any = module.model.blocks
        gradients[stops] = [blocks[i].attn.qkv.weight.grad for i in (0, 2)]
    assert not torch.allclose(gradients[False][0], gradients[True][0])
    torch.testing.assert_close(gradients[False][1], gradients[True][1])


def test_score_loss_uses_the_targets_that_entered(build, batch):
    htm = {"layer": 1, "score_loss_weight": 0.25, **EVERYTHING}
    output = train_output(attach(build(), CLASSES, htm=htm), batch)
    assert output.score_loss is not None
    assert not torch.equal(output.targets, batch[1])
    score_logits = output.layers[0].score_logits
    torch.testing.assert_close(output.score_loss, F.cross_entropy(score_logits, batch[1]))
    torch.testing.assert_close(output.stats["difficulty"], output.score_loss.detach())
    expected = F.cross_entropy(output.logits, output.targets) + 0.25 * output.score_loss
    torch.testing.assert_close(training_loss(output), expected)
    assert training_loss(output, 0.5) > training_loss(output)


def test_a_model_that_repeats_a_block_is_refused():
    class Flipped(VisionTransformer):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) + super().forward(x.flip(-1))) / 2

    options: Any = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}
    images, targets = torch.randn(2, 3, 16, 16), torch.eye(CLASSES)[:2]
    settings: Any
    for settings in ({"htm": {"layer": 1}}, {"vtm": {"layer": 1}}):
        module = attach(Flipped(num_classes=CLASSES, **options), CLASSES, **settings)
        with pytest.raises(ValueError, match=r"block \d runs again"):
            module(images, targets)


def test_stats_count_easy_samples_and_replaced_tokens(build, batch):
    output = train_output(attach(build(), CLASSES, htm={"layer": 1}), batch)
    score_logits = output.layers[0].score_logits
    difficulty = F.cross_entropy(score_logits, batch[1], reduction="none").detach()
    tau = float(difficulty.median())  # not easy itself: 2 of 6 are easier
    torch.manual_seed(0)
    module = attach(build(), CLASSES, htm={"layer": 1, "tau": tau, "rho": 0.002})
    output = train_output(module, batch)
    mix = module.mixed_pairs(*batch)
    assert mix is not None
    assert output.stats["mixed_samples"] == 2
    assert torch.equal(mix.mask.any(dim=1) | (difficulty < tau), difficulty < tau)
    torch.testing.assert_close(output.stats["mixed_tokens"], mix.mask.sum() / 2)


def test_the_model_is_untouched_after_a_pass_and_after_a_failed_one(build, batch):
    model = build()
    module = attach(model, CLASSES, htm={"layer": 1, **EVERYTHING}, vtm={"layer": 2})
    train_output(module, batch)
    broken = batch[0].clone()
    broken[0] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        module(broken, batch[1])
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize("vtm", [None, {"layer": 2}, {"layer": 1}])
def test_projections_that_move_train_as_those_of_mixed_tokens_would(
    vtm: dict[str, int] | None, autocasts: bool, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def unknown(attn: Any, x: Tensor) -> list[Tensor]:
        asked.append(x)
        return []

    model = small_cct(attn_drop=0.1, drop_path=0.1)
    module = attach(model, CLASSES, htm={"layer": 1, **EVERYTHING}, vtm=vtm).train()
    images = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            output = module(images, torch.eye(CLASSES)[torch.arange(6) % CLASSES])
        assert output.stats["mixed_tokens"] > 0
        training_loss(output, 0.5).backward()
        found.append([output.logits, *(p.grad for p in module.parameters())])
        monkeypatch.setattr("tokenmixup.module.projections", unknown)
    assert len(asked) == 1
    close = {"rtol": 2**-6, "atol": 1e-4} if autocasts else {"rtol": 1e-5, "atol": 1e-7}
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, **close)


@pytest.mark.parametrize(("htm_layer", "steps"), [(1, 0), (2, 0), (1, 1)])
def test_autocast_loses_no_gradient_to_the_saliency_pass(build, batch, htm_layer, steps):
    """Casts that autocast cached without gradient would leave the block's weights without one."""
    htm = {"layer": htm_layer, "rollout_steps": steps}
    module = attach(build(), CLASSES, htm=htm, vtm={"layer": 2}).train()
    with torch.autocast("cpu", torch.bfloat16):
        output = module(*batch)
    assert isinstance(output, Output)
    training_loss(output, 1.0).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
    for block in module.model.blocks:  # type: ignore[union-attr, operator]
        for layer in (block.attn.qkv, block.attn.proj, block.mlp.fc1):
            assert layer.weight.grad.abs().sum() > 0


def test_vit_lites_scorenet_pools_the_class_token_as_the_model_does():
    scorenet = attach(small_vit_lite(), CLASSES, htm={"layer": 1}).scorenet
    assert scorenet is not None and scorenet.pooling == "class_token"


def with_head_behind(model: Any) -> Any:
    model.reset_classifier(0)  # another head follows outside the model
    return model


def timms(name: str, **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        with torch.device("meta"):
            return timm.create_model(name, num_classes=CLASSES, **options)

    return build


def torchvisions() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 3, 2, 32, 64, num_classes=CLASSES)


def sharing() -> nn.Module:
    model = small_vit()
    model.blocks = nn.Sequential(*[model.blocks[0]] * 3)
    return model


# what `attach` refuses: a model, and settings and other arguments
REFUSED: list[tuple[str, Any, dict[str, Any]]] = [
    ("vtm.layer=1: .*SwinTransformer", timms("swin_tiny_patch4_window7_224"), VTM1),
    ("block 0 is XCABlock, not pre-norm", timms("xcit_nano_12_p16_224"), HTM1),
    ("ResPostBlock, not pre-norm", timms("vit_base_patch16_rpn_224"), HTM1),
    ("does not support this model: EfficientNet", timms("efficientnet_b0"), RERUN),
    ("VisionTransformer has patch dropout", lambda: small_vit(patch_drop_rate=0.5), HTM1),
    ("holds one block more than once", sharing, {"manifold_mixup": {"layers": [1]}}),
    ("is already compiled", lambda: torch.compile(small_cct(), backend="eager"), HTM1),
    ("is in a DataParallel: attach first", lambda: nn.DataParallel(small_cct()), HTM1),
    ("TokenMixup is already attached", lambda: attach(small_cct(), CLASSES), HTM1),
    ("needs a class token", timms("cait_xxs24_224"), {"htm": {"layer": 1, **BY_TOKEN}}),
    ("needs a class token", timms("cait_xxs24_224"), {"vtm": {"layer": 1, **PUBLISHED}}),
    ("class token", small_cct, {"htm": {"layer": 1, **BY_TOKEN}}),
    ("layr", small_cct, {"htm": {"layr": 1}}),
    ("htm.layer=1.0", small_cct, {"htm": {"layer": 1.0}}),
    ("htm.layer=4: CCT has blocks 0..3", small_cct, {"htm": {"layer": 4}}),
    ("htm.layer=9: .* has blocks 0..3", small_cct, {"htm": {"layer": [1, 9]}}),
    ("must be in rising order", small_cct, {"htm": {"layer": [1, 1]}}),
    ("htm.layer=.*, or several in rising order", small_cct, {"htm": {"layer": []}}),
    ("htm.tau='2': must be auto, a number", small_cct, {"htm": {"layer": 1, "tau": "2"}}),
    ("one for each of htm.layer", small_cct, {"htm": {"layer": [1, 2], "tau": [1, 2, 3]}}),
    ("one for each of htm.layer=1", small_cct, {"htm": {"layer": 1, "rho": [0.1, 0.2]}}),
    ("one layer with order=published", small_cct, {"htm": {"layer": [1, 2], "order": "published"}}),
    ("one layer with detector=gr", small_cct, {"htm": {"layer": [1, 2], "detector": "gradient"}}),
    ("htm.stop_gradient='no'", small_cct, {"htm": {"layer": 1, "stop_gradient": "no"}}),
    ("htm=True: must be a mapping of settings, or HTM", small_cct, {"htm": True}),
    ("must be a mapping of settings, or HTM", small_cct, {"htm": VTM(layer=1)}),
    ("vtm.kappa=2.5", small_cct, {"vtm": {"layer": 1, "kappa": 2.5}}),
    ("vtm.kappa=.*: must be an integer", small_cct, {"vtm": {"layer": [1, 2], "kappa": [3, 0]}}),
    ("vtm.layer=4", small_cct, {"vtm": {"layer": 4}}),
    ("vtm.layer=0", small_cct, {"vtm": {"layer": 0}}),
    ("vtm.layer=.*an integer >= 1", small_cct, {"vtm": {"layer": [0, 2]}}),
    ("manifold_mixup.layers=1", small_cct, {"manifold_mixup": {"layers": 1}}),
    ("manifold_mixup.layers=.*: must be different", small_cct, {"manifold_mixup": {"layers": []}}),
    ("must be different integers", small_cct, {"manifold_mixup": {"layers": [1, 1]}}),
    ("manifold_mixup.layers=9: CCT has", small_cct, {"manifold_mixup": {"layers": [9]}}),
    ("manifold_mixup.alpha=0.0: must be", small_cct, {"manifold_mixup": {"alpha": 0.0}}),
    ("manifold_mixup.alpha='1'", small_cct, {"manifold_mixup": {"alpha": "1"}}),
    ("checkpoint_blocks='no': must be True or False", small_cct, {"checkpoint_blocks": "no"}),
    *(
        (f"htm.{option}={value!r}: must be ", small_cct, {"htm": {"layer": 1, option: value}})
        for option, value in (
            *(("tau", -1.0), ("tau", NAN), ("rho", -0.1), ("rho", 1.5), ("rho", NAN)),
            *(("score_loss_weight", -1.0), ("pooling", "max"), ("detector", "salient")),
            *(("matching", "best"), ("labels", "all"), ("mask_rule", "own"), ("order", "front")),
            ("rollout_steps", -1),
        )
    ),
    *(
        (f"num_classes={number!r}: must be an int", small_cct, {"num_classes": number})
        for number in (0, -1, "10", 2.0, True)
    ),
    *(
        (f"num_classes=7: the head of .* has {CLASSES} outputs", build, {"num_classes": 7})
        for build in (
            *map(timms, ("vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "resnet18")),
            *(small_cct, torchvisions, timms("swin_tiny_patch4_window7_224")),
        )
    ),
]


@pytest.mark.parametrize(("message", "build", "told"), REFUSED)
def test_attach_refuses_what_it_cannot_serve(message: str, build: Any, told: dict[str, Any]):
    with pytest.raises(ValueError, match=message) as error:
        attach(build(), **{"num_classes": CLASSES, **told})
    assert "\n" not in str(error.value)


def test_what_does_not_matter_is_not_refused():
    assert attach(timms("resnet18")(), CLASSES)
    assert attach(with_head_behind(small_vit()), 100)


def test_settings_hold_from_attach_on(build, batch):
    layers = [1]
    gradient = {"htm": {"layer": 1, "detector": "gradient", **EVERYTHING}}
    mixed = {"manifold_mixup": {"layers": layers}}
    modules = [attach(build(), CLASSES, **settings) for settings in (gradient, mixed) * 2]
    layers[0] = 99
    modules[2].htm = HTM(layer=2)
    modules[3].manifold_mixup = None
    outputs = []
    for module in modules:
        torch.manual_seed(0)
        outputs.append(train_output(module, batch).logits)
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])


def test_logits_of_another_number_of_classes_are_refused():
    model = small_cct()
    model.head = nn.Sequential(model.head, nn.Identity())  # type: ignore  # its size is not known
    module = attach(model, CLASSES + 2, htm={"layer": 1}).train()
    with pytest.raises(ValueError, match=rf"returned \[2, {CLASSES}\], not one"):
        module(torch.randn(2, 3, 16, 16), torch.eye(CLASSES + 2)[:2])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0.5, 0.2, 0, 0, 0], r"targets\[1\]: must be probabilities.* sums to 0.7"),
        ([1, 1, 0, 0, 0], r"targets\[1\]: .* sums to 2"),
        ([1.5, -0.5, 0, 0, 0], r"targets\[1\]: .* its lowest value is -0.5"),
        ([0.5, float("nan"), 0.5, 0, 0], r"targets\[1\]: .* sums to nan"),
        ([float("inf"), 0, 0, 0, 0], r"targets\[1\]: .* sums to inf"),
    ],
)
def test_training_refuses_targets_that_are_no_distribution(row: list[float], message: str):
    module = attach(small_cct(), CLASSES).train()
    targets = torch.eye(CLASSES)[:3]
    targets[1] = torch.tensor(row)
    with pytest.raises(ValueError, match=message):
        module(torch.zeros(3, 3, 16, 16), targets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_smoothed_probabilities_are_targets_in_any_precision(dtype: torch.dtype):
    model = small_cct()
    model.head = nn.Linear(32, 1000)
    targets = torch.full((2, 1000), 0.1 / 1000)
    targets[:, 0] += 0.9
    output = train_output(attach(model, 1000), (torch.zeros(2, 3, 16, 16), targets.to(dtype)))
    assert output.targets.dtype == dtype


def test_the_gradient_detector_is_refused_where_there_are_no_gradients(build, batch):
    module = attach(build(), CLASSES, htm={"layer": 1, "detector": "gradient"}).train()
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match=r"detector=gradient: .*no gradient"),
    ):
        module.mixed_pairs(*batch)
    with torch.no_grad():
        assert module.mixed_pairs(*batch) is not None


@pytest.mark.parametrize(
    ("enters", "found"),
    [(lambda x: x.unflatten(1, (4, 4)), r"\[2, 4, 4, 16\]"), (lambda x: (x, x), "tuple")],
    ids=["grid", "pair"],
)
def test_a_block_that_gets_no_sequence_of_tokens_is_refused(enters: Any, found: str):
    class Other(VisionTransformer):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](enters(self.patch_embed(x)))

    options: Any = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    model = Other(num_classes=CLASSES, class_token=False, global_pool="avg", **options)
    for settings in (
        {"htm": {"layer": 0}},
        {"vtm": {"layer": 1}},
        {"manifold_mixup": {"layers": [0]}},
    ):
        module = attach(model, CLASSES, **settings).train()  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"block 0 gets {found}: must be tokens b n d"):
            module(torch.randn(2, 3, 16, 16), torch.eye(CLASSES)[:2])


def test_what_is_put_on_an_attention_of_the_rollout_later_is_refused(batch):
    module = attach(small_cct(), CLASSES, htm={"layer": 1, "rollout_steps": 1}).train()
    blocks: Any = module.model.blocks
    blocks[2].attn.qkv = nn.Sequential(blocks[2].attn.qkv)
    with pytest.raises(
        ValueError, match=r"no longer supports .*: block 2 is CCTBlock, whose qkv is Sequential"
    ):
        module(*batch)


def test_a_model_of_another_precision_is_served_as_it_is():
    module = attach(small_cct().double(), CLASSES, htm={"layer": 1, **EVERYTHING}).train()
    images, targets = torch.randn(4, 3, 16, 16).double(), torch.eye(CLASSES)[:4].double()
    output = module(images, targets)
    assert isinstance(output, Output) and output.logits.dtype == torch.float64
    training_loss(output, 0.5).backward()
    assert all(p.grad is not None for p in module.parameters())


def test_a_replica_of_data_parallel_is_refused(batch):
    module = attach(small_cct(), CLASSES, htm={"layer": 1}).train()
    replica = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        replica(*batch)


def test_training_needs_targets(batch):
    with pytest.raises(TypeError, match="targets"):
        attach(small_cct(), CLASSES, htm={"layer": 1}).train()(batch[0])


@pytest.mark.parametrize(
    ("build", "size"),
    [
        (lambda: small_cct(0.1, 0.1, depth=5), 16),
        (lambda: small_vit(attn_drop_rate=0.1, drop_path_rate=0.1, depth=5), 32),
    ],
    ids=["cct", "vit"],
)
@pytest.mark.parametrize("settings", [{"htm": HTM(layer=1, **EVERYTHING), "vtm": VTM(layer=2)}, {}])
def test_blocks_that_run_twice_have_the_same_gradients(build, size, settings):
    images = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(1))
    gradients, runs = [], []
    for checkpoint_blocks in (False, True):
        torch.manual_seed(0)
        module = attach(build(), CLASSES, checkpoint_blocks=checkpoint_blocks, **settings).train()
        counts = [0] * 5
        for index, block in enumerate(module.model.blocks):  # type: ignore[arg-type]
            block.norm1.register_forward_pre_hook(
                lambda *_, i=index, n=counts: n.__setitem__(i, n[i] + 1)
            )
        torch.manual_seed(2)
        training_loss(train_output(module, (images, torch.eye(CLASSES)[:4])), 0.5).backward()
        gradients.append([p.grad for p in module.parameters()])
        runs.append(counts)
        assert all("forward" not in vars(block) for block in module.model.blocks)  # type: ignore
    assert all(map(torch.equal, *gradients))
    assert [again - once for once, again in zip(*runs, strict=True)] == (
        [0, 0, 0, 1, 1] if settings else [1] * 5
    )


def test_attention_to_the_memory_is_dropped_out_as_the_block_would():
    model = small_cct()
    module = attach(model, CLASSES, vtm={"layer": 2}).train()
    images, targets = torch.randn(4, 3, 16, 16), torch.eye(CLASSES)[:4]
    first, second = (module(images, targets).logits for _ in range(2))
    assert torch.equal(first, second)
    model.blocks[2].attn.attn_drop.p = 0.3  # type: ignore[union-attr]
    first, second = (module(images, targets).logits for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("stop", [True, False])
def test_stop_gradient_keeps_the_score_loss_from_the_model(build, batch, stop):
    module = attach(build(), CLASSES, htm={"layer": 1, "stop_gradient": stop})
    output = train_output(module, batch)
    assert output.score_loss is not None and module.scorenet is not None
    output.score_loss.backward()
    assert module.scorenet.head.weight.grad is not None
    trained = [p for p in module.model.parameters() if p.grad is not None]
    assert (trained == []) == stop


def test_targets_may_be_integers(build, batch):
    module = attach(build(), CLASSES, htm={"layer": 1, **EVERYTHING})
    labels = torch.arange(6) % CLASSES
    whole = train_output(module, (batch[0], F.one_hot(labels, CLASSES)))
    soft = train_output(module, (batch[0], F.one_hot(labels, CLASSES).float()))
    assert torch.equal(whole.targets, soft.targets)


def test_weight_decay_spares_what_the_model_exempts():
    module = attach(small_vit(), CLASSES, htm={"layer": 1})
    assert module.no_weight_decay() >= {"model.pos_embed", "model.cls_token"}
    assert attach(small_cct(), CLASSES).no_weight_decay() == set()


def factors(model: nn.Module, **options: Any) -> dict[str, tuple[float, float]]:
    """Learning rate factor and weight decay of each parameter, by name, with timm's optimiser."""
    optimizer = create_optimizer_v2(model, opt="sgd", lr=1.0, weight_decay=0.05, **options)
    of = {
        id(parameter): (group.get("lr_scale", 1.0), group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {name: of[id(parameter)] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("options", [{"layer_decay": 0.5}, {}], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "naflexvit_base_patch16_gap",
        "cait_xxs24_224",  # its groups are a function, not patterns
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "deit_tiny_distilled_patch16_224",
                "eva02_tiny_patch14_224",
                "beit_base_patch16_224",
                "vit_relpos_small_patch16_224",
                "vit_base_patch16_rope_reg1_gap_256",
                "vit_small_r26_s32_224",
            )
        ),
    ],
)
def test_parameters_learn_at_the_rates_of_the_plain_model(name: str, options: dict[str, float]):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=CLASSES)
        plain = factors(model, **options)
        ours = factors(attach(model, CLASSES, htm={"layer": [0, 1]}), **options)
    scorenets = {key: ours.pop(key) for key in [*ours] if key.startswith("scorenets.")}
    assert ours == {f"model.{key}": value for key, value in plain.items()}
    assert len(scorenets) >= 4 and {rate for rate, _ in scorenets.values()} == {1.0}
    assert len({rate for rate, _ in plain.values()}) > (10 if options else 0)


def test_scorenets_learn_at_the_highest_rate_of_a_model_without_a_head():
    model: Any = small_vit()
    model.reset_classifier(0)
    module = attach(model, CLASSES, htm={"layer": 1})
    plain, ours = (factors(x, layer_decay=0.5) for x in (model, module))
    assert ours["scorenets.1.head.weight"][0] == max(rate for rate, _ in plain.values()) == 1
    assert {f"model.{key}": value for key, value in plain.items()}.items() <= ours.items()


@pytest.mark.parametrize("options", [{"layer_decay": 0.5}, {}], ids=str)
def test_a_model_without_layer_groups_learns_at_one_rate(options: dict[str, float]):
    plain, ours = (factors(x, **options) for x in (small_cct(), attach(small_cct(), CLASSES)))
    assert ours == {f"model.{key}": value for key, value in plain.items()}
    assert not hasattr(attach(small_cct(), CLASSES), "group_matcher")


def test_training_refuses_what_is_no_batch_of_images():
    module = attach(small_cct(), CLASSES, htm={"layer": 1}).train()
    for images in ({"patches": torch.zeros(2, 4, 8)}, torch.zeros(3, 16, 16)):
        with pytest.raises(ValueError, match="images of one size, as a tensor b 3 h w"):
            module(images, torch.eye(CLASSES)[:2])


@pytest.mark.parametrize(
    "targets",
    [
        torch.arange(2),
        torch.eye(7)[:2],
        torch.eye(CLASSES)[:3],
        [[1.0, 0, 0, 0, 0]] * 2,
        np.eye(CLASSES)[:2],
    ],
)
def test_training_refuses_what_are_no_probabilities(targets):
    module = attach(small_cct(), CLASSES, **HTM1).train()
    with pytest.raises(ValueError, match=rf"must be probabilities b c .*, here \(2, {CLASSES}\)"):
        module(torch.zeros(2, 3, 16, 16), targets)


def test_the_gradient_detector_takes_images_of_autocasts_precision(batch):
    htm = {"layer": 1, "detector": "gradient", **EVERYTHING}
    module = attach(small_vit(), CLASSES, htm=htm).train()
    images = torch.randn(4, 3, 32, 32).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        output = module(images, torch.eye(CLASSES)[:4])
    assert output.mask is not None and output.mask.any()


def test_copies_run_their_own_parts(build, batch):
    module = attach(build(), CLASSES, htm={"layer": 1, **EVERYTHING}).train()
    twin = copy.deepcopy(module)
    assert twin.scorenet is not None
    with torch.no_grad():
        for parameter in twin.scorenet.parameters():
            parameter.zero_()
    output = train_output(twin, batch)
    assert (output.layers[0].score_logits == 0).all()


@pytest.mark.parametrize("settings", [{"detector": "gradient"}, {"rollout_steps": 1}])
def test_vtm_chooses_by_the_blocks_own_map_whatever_htms_detector(build, batch, settings):
    """With nothing replaced, HTM's detector must not show in VTM."""
    htm = {"layer": 1, "tau": 9.0, "rho": float("inf"), **settings}
    both = train_output(attach(build(), CLASSES, htm=htm, vtm={"layer": 3}), batch)
    alone = train_output(attach(build(), CLASSES, vtm={"layer": 3}), batch)
    torch.testing.assert_close(both.logits, alone.logits)


def test_the_gradient_detector_pools_to_the_models_own_grid():
    model = small_vit(img_size=64, patch_size=(8, 32))
    module = attach(model, CLASSES, htm={"layer": 1, "detector": "gradient", **EVERYTHING}).train()
    entries = []
    detect = module.detect
    module.detect = lambda entry: entries.append(entry) or detect(entry)
    module(torch.randn(2, 3, 64, 64), torch.eye(CLASSES)[:2])
    (entry,) = entries
    assert entry.grid == (8, 2)
    pooled = F.adaptive_avg_pool2d(entry.pixels[:, None], (8, 2)).flatten(1)
    expected = pooled / pooled.sum(dim=1, keepdim=True)
    torch.testing.assert_close(detect(entry), expected)


@pytest.mark.parametrize(
    ("num_classes", "patch", "tau", "rho"), [(100, 2, 2.0, 0.005), (10, 4, 1.0, 0.02)]
)
def test_auto_thresholds_of_a_timm_vit_equal_their_numbers(
    num_classes: int, patch: int, tau: float, rho: float
):
    """256 and 64 tokens; the class token does not count."""
    vit = {"img_size": 32, "patch_size": patch, "num_classes": num_classes, "depth": 2}
    outputs = []
    for thresholds in ({}, {"tau": tau, "rho": rho}):
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", embed_dim=24, num_heads=3, **vit)
        module = attach(sharpened(model), num_classes, htm={"layer": 1, **thresholds}).train()
        assert module.htm is not None and module.htm.tau == tau
        module.scorenets["1"].head.bias.data[0] = 5  # some samples are easy
        images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        targets = torch.eye(num_classes)[[0, 0, 0, 0, 1, 2, 3, 4]]
        outputs.append(module(images, targets))
    auto, given = outputs
    assert auto.stats["mixed_samples"] == 4 and auto.stats["mixed_tokens"] > 0
    assert torch.equal(auto.mask, given.mask) and torch.equal(auto.logits, given.logits)
