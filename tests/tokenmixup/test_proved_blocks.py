"""Whatever a block consists of, HTM and VTM are right, or it is refused in one line."""

import copy
import itertools
import random
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from tests.conftest import (
    CLASSES,
    drawn_batch,
    gradients_of,
    refused,
)
from tests.tokenmixup.blocks import CASES, TOKENS, WIDTH, Block, Random, SequenceFirst
from tokenmixup import Adapter, attach, mix_horizontal, training_loss
from tokenmixup.saliency import by_attention
from tokenmixup.watch import Sight

LAYER = 2
KAPPA = 2
HTM: dict[str, Any] = {"layer": LAYER, "tau": float("inf"), "rho": 0.0}
VTM: dict[str, Any] = {"layer": LAYER, "kappa": KAPPA}
BATCH = drawn_batch(4, 16)
ADAPTER = Adapter(blocks="blocks", embed_dim=WIDTH, patch_embed="stem")
RANDOM = [name for name, case in CASES.items() if issubclass(case.build, Random)]
MAPPED = [name for name, case in CASES.items() if case.htm and name not in RANDOM]
WITH_MEMORY = [name for name, case in CASES.items() if case.vtm]
REFUSED = [(name, {"htm": HTM}) for name, case in CASES.items() if not case.htm]
REFUSED += [(name, {"vtm": VTM}) for name, case in CASES.items() if not case.vtm]
EACH = pytest.mark.parametrize("settings", [{"htm": HTM}, {"vtm": VTM}], ids=["htm", "vtm"])


class Model(nn.Module):
    """Patches, three blocks, the mean of the tokens."""

    def __init__(self, build: Callable[[], Any]):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(build() for _ in range(3))
        self.is_sequence_first = build is SequenceFirst

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        for block in self.blocks:
            x = self.run(block, x)
        return self.classified(x)

    def run(self, block: Any, x: Tensor) -> Tensor:
        if self.is_sequence_first:
            return block(x.transpose(0, 1)).transpose(0, 1)
        return block.tokens(block(x))

    def patches(self, images: Tensor) -> Tensor:
        return self.stem(images).flatten(2).mT

    def classified(self, x: Tensor) -> Tensor:
        return self.head(x.mean(dim=1))


def model_of(build: Callable[[], Any], kind: type = Model) -> Any:
    """With random parameters, but for gates, which begin at 0."""
    torch.manual_seed(0)
    model = kind(build)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate" not in name and "up.weight" not in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch_of(name: str) -> tuple[Tensor, Tensor]:
    return drawn_batch(CASES[name].samples, 16)


def attached(build: Callable[[], Any], kind: type = Model, **settings: Any) -> Any:
    told = {"adapter": ADAPTER, **settings}
    return attach(model_of(build, kind), CLASSES, **told).train()


def gradients_by(model: nn.Module, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    F.cross_entropy(logits, targets).backward()
    return gradients_of(model)


def by_hand(block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """What a block makes of tokens without a memory, and their saliency."""
    nothing = x[:, :0]
    out, attn = block.by_hand(x, nothing)
    return out, attn.mean(dim=(1, 2)).detach()


@pytest.mark.parametrize("name", MAPPED)
def test_htm_mixes_by_the_map_that_a_block_computes(name: str):
    images, targets = batch_of(name)
    module = attached(CASES[name].build, htm=HTM)
    output = module(images, targets)
    (mix,) = output.layers
    model: Any = model_of(CASES[name].build)
    x = model.patches(images)
    for block in model.blocks[:LAYER]:
        x, _ = by_hand(block, x)
    _, saliency = by_hand(model.blocks[LAYER], x)
    assert_close(mix.saliency, saliency, rtol=1e-4, atol=1e-6)
    easy = torch.zeros(len(x))
    mixed = mix_horizontal(x, targets, mix.saliency, easy, 1.0, 0.0)
    assert torch.equal(output.mask, mixed.mask)
    assert mixed.mask.any()
    out, _ = by_hand(model.blocks[LAYER], mixed.tokens)
    logits = model.classified(out)
    assert_close(output.logits, logits, rtol=1e-4, atol=1e-5)
    ours = gradients_by(module.model, output.logits, output.targets)
    theirs = gradients_by(model, logits, mixed.targets)
    assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", RANDOM)
def test_htm_mixes_before_a_block_that_draws(name: str):
    output = attached(CASES[name].build, htm=HTM)(*batch_of(name))
    assert output.mask.any()
    assert training_loss(output).isfinite()


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_vtm_gives_a_block_keys_and_values_and_nothing_else(name: str):
    images, targets = batch_of(name)
    module = attached(CASES[name].build, vtm=VTM)
    model: Any = model_of(CASES[name].build).train()
    torch.manual_seed(2)
    output = module(images, targets)
    torch.manual_seed(2)
    x = model.patches(images)
    memory = []
    for block in model.blocks[:LAYER]:
        out, saliency = by_hand(block, x)
        places = saliency.topk(KAPPA).indices
        memory.append(x.take_along_dim(places[..., None], dim=1))
        x = out
    out, _ = model.blocks[LAYER].by_hand(x, torch.cat(memory, dim=1))
    logits = model.classified(out)
    assert_close(output.logits, logits, rtol=1e-4, atol=1e-5)
    ours = gradients_by(module.model, output.logits, targets)
    theirs = gradients_by(model, logits, targets)
    assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("name", "settings"), REFUSED)
def test_a_block_that_would_be_misread_is_refused(name: str, settings: Any):
    """By HTM for its map, by VTM for its keys and values."""
    module = attached(CASES[name].build, **settings)
    with refused("block "):
        module(*batch_of(name))


# What a proof leaves behind, and when it is made again


def counted(module: Any) -> Callable[[], list[int]]:
    """How often the first norm of each block has run; a proof cannot take these numbers back."""
    counters = [itertools.count() for _ in module.model.blocks]

    def count(counter: Any, *_: Any) -> None:
        next(counter)

    for block, counter in zip(module.model.blocks, counters, strict=True):
        block.norm1.register_forward_hook(partial(count, counter))
    return lambda: [next(copy.copy(counter)) for counter in counters]


@pytest.mark.parametrize("name", ["map: Multihead", "map: Tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_proof_changes_nothing_of_the_model(name: str, dtype: torch.dtype):
    """Parameters, also those at two places; buffers, modes, generators, gradients, hooks."""
    module = attached(CASES[name].build, htm=HTM, vtm={"layer": 1}).to(dtype)
    module.model.blocks[1].eval()
    runs = counted(module)
    hooks = [dict(part._forward_pre_hooks) for part in module.modules()]
    modes = [part.training for part in module.modules()]
    parameters = [id(p) for p in module.parameters()]
    before = copy.deepcopy(module.state_dict())
    images, targets = BATCH
    state = torch.get_rng_state()
    module(images.to(dtype), targets.to(dtype))
    assert min(runs()) > 3  # so that each was proved
    assert torch.equal(torch.get_rng_state(), state)
    assert [dict(part._forward_pre_hooks) for part in module.modules()] == hooks
    assert [part.training for part in module.modules()] == modes
    assert [id(p) for p in module.parameters()] == parameters
    assert not gradients_of(module)
    assert_close(module.state_dict(), before, rtol=0, atol=0)
    proved = runs()
    module(images.to(dtype), targets.to(dtype))
    assert np.subtract(runs(), proved).tolist() == [1, 2, 2]  # those of VTM and HTM run twice


LOSSES: list[Tensor] = []
KEPT: list[Tensor] = []


class Leaving(Block):
    """Changes all that a block may change as it runs, behind its attention."""

    seen = []  # noqa: RUF012 of the class
    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(0)
        self.plain = torch.zeros(2)
        self.runs = 0
        self.inner: dict[str, Any] = {"list": [], "set": set(), "deque": deque(maxlen=9)}
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        self.last = x  # in front, where the last run counts
        out = super().forward(x)
        drawn = torch.rand((), generator=self.own)
        self.leave(out, drawn + random.random() + np.random.random())
        return out

    def leave(self, x: Tensor, drawn: Tensor, *, kept: list[Tensor] = KEPT) -> None:
        loss = x.square().mean()
        kept.append(loss)
        with torch.no_grad():
            self.plain[0] += drawn
            self.mean += x.mean(dim=(0, 1)).detach()
        self.runs += 1
        self.last = loss
        self.inner["list"].append(loss)
        self.inner["set"].add(float(drawn))
        self.inner["deque"].append(loss)
        self.seen.append(loss)
        Leaving.count += 1
        LOSSES.append(loss)

    def left(self) -> list[Any]:
        several = (self.inner["list"], self.inner["deque"], self.seen, LOSSES, KEPT)
        states = [self.own.get_state(), random.getstate(), np.random.get_state()[2]]
        numbers = [self.plain, self.mean, self.runs, Leaving.count, sorted(self.inner["set"])]
        return [*states, *numbers, *map(len, several)]


def test_a_proof_leaves_nothing_of_its_runs(monkeypatch: pytest.MonkeyPatch):
    """A step that proves leaves what one leaves that does not."""
    left = []
    for is_proved in (True, False):
        module = attached(Leaving, vtm=VTM)
        runs = counted(module)
        blocks = module.model.blocks
        noted: list[Tensor] = []
        blocks[1].norm2.register_forward_hook(lambda *given, noted=noted: noted.append(given[2]))
        for each in (Leaving.seen, LOSSES, KEPT):
            each.clear()
        Leaving.count = 0
        random.seed(0)
        np.random.seed(0)
        if not is_proved:
            monkeypatch.setattr("tokenmixup.prove.prove_block", lambda *_: Sight())
        module(*BATCH)
        assert (min(runs()) > 3) == is_proved
        left.append([[block.left() for block in blocks], len(noted)])
    assert_close(left[0], left[1], rtol=0, atol=0)


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def mlp(self, x: Tensor) -> Tensor:
        self.runs += 1
        return super().mlp(x)


def test_a_proof_by_rollout_leaves_later_blocks_as_they_were():
    model = model_of(Block)
    later = model.blocks[2] = Counting()
    htm = {**HTM, "layer": 1, "rollout_steps": 1}
    module = attach(model, CLASSES, adapter=ADAPTER, htm=htm).train()
    module(*BATCH)
    assert later.runs == 2  # by rollout, and itself


def test_a_proof_takes_no_notice_of_the_default_device():
    module = attached(Block, htm=HTM)
    with torch.device("meta"):
        assert module(*BATCH).mask.any()


class Averaging(Block):
    """Averages behind its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def mlp(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean += x.mean(dim=(0, 1))
        return super().mlp(x)


def test_what_proves_a_compiled_module_leaves_nothing():
    means = []
    for compiles in (False, True):
        module = attached(Averaging, vtm=VTM)
        if compiles:
            module.compile(backend="eager")
        state = torch.get_rng_state()
        module(*BATCH)
        assert torch.equal(torch.get_rng_state(), state)
        means.append([block.mean for block in module.model.blocks])
    assert_close(means[0], means[1], rtol=0, atol=0)


class Given(Model):
    """Gives its blocks something beside their tokens."""

    given: Any = None

    def run(self, block: Any, x: Tensor) -> Tensor:
        return block(x, self.given)


class StateInFront(Block):
    """Changes in front of its attention what `change` says."""

    ever = 0
    change: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.cached: int | None = None
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, given: Any = None) -> Any:
        StateInFront.change(self, x, given)
        return super().forward(x)


def lose(block: Any, x: Tensor, given: Any) -> None:
    block.losses.append(x.square().mean())


def average(block: Any, x: Tensor, given: Any) -> None:
    block.mean.lerp_(x.detach().mean(dim=(0, 1)), 0.1)


def count_ever(block: Any, x: Tensor, given: Any) -> None:
    StateInFront.ever += 1


def cache(block: Any, x: Tensor, given: Any) -> None:
    block.cached = block.cached or x.shape[1]


def add_to_list(block: Any, x: Tensor, given: Any) -> None:
    given.append(x.shape[1])


def add_to_tensor(block: Any, x: Tensor, given: Any) -> None:
    given.add_(1)


def add_to_tokens(block: Any, x: Tensor, given: Any) -> None:
    x.add_(1)


def overwrite(block: Any, x: Tensor, given: Any) -> None:
    block.last = [x]
    given.zero_()


def change_in_evaluation(block: Any, x: Tensor, given: Any) -> None:
    if not block.training:
        lose(block, x, given)


TWICE = "front of its attention"
IN_FRONT: list[tuple[str, Any, Any]] = [
    (f"block 2 .*losses.* in {TWICE}", lose, None),
    (f"block 2 .*mean.* in {TWICE}", average, None),
    (f"block 2 .*ever in {TWICE}", count_ever, None),
    (f"block 2 .*{TWICE}", add_to_list, []),
    (f"block 2 .*{TWICE}", add_to_tensor, torch.zeros(3)),
    ("block [02] .*tokens that it gets in place", add_to_tokens, None),
    ("", overwrite, torch.zeros(3)),
    ("", change_in_evaluation, None),
]
ALL_IN_FRONT = [(*row, settings) for row in IN_FRONT for settings in ({"htm": HTM}, {"vtm": VTM})]
ALL_IN_FRONT += [("", cache, None, {"htm": HTM})]
ALL_IN_FRONT += [(f"block 2 .*cached in {TWICE}", cache, None, {"vtm": VTM})]


@pytest.mark.parametrize(("told", "change", "given", "settings"), ALL_IN_FRONT)
def test_what_a_block_changes_in_front_of_its_attention_changes_once(
    told: str, change: Any, given: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
):
    """A memory has other numbers of tokens, which a block would cache."""
    monkeypatch.setattr(StateInFront, "change", change)
    module = attached(StateInFront, Given, **settings)
    module.model.given = given
    with refused(told) if told else nullcontext():
        assert training_loss(module(*BATCH)).isfinite()


class Renamed(StateInFront):
    """Has the name of the class that it comes from, and an attribute of its own."""

    count = 0


Renamed.__name__ = StateInFront.__name__


def count_of_class(block: Any, x: Tensor, given: Any) -> None:
    type(block).count += 1


def delete_of_class(block: Any, x: Tensor, given: Any) -> None:
    if "count" in vars(type(block)):
        del type(block).count


@EACH
@pytest.mark.parametrize(
    ("told", "change"), [(f"block 2 .*count in {TWICE}", count_of_class), ("", delete_of_class)]
)
def test_what_a_block_changes_of_its_class_changes_once(
    told: str, change: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(StateInFront, "change", change)
    monkeypatch.setattr(Renamed, "count", 0)
    module = attached(Renamed, Given, **settings)
    with refused(told) if told else nullcontext():
        assert training_loss(module(*BATCH)).isfinite()


class Outside:
    """No module: what it holds is not the block's."""


class FromOutside(Block):
    """Uses a parameter that another object holds, and a graph that its model has made."""

    outside = Outside()
    made: Tensor

    def projected(self, x: Tensor) -> Tensor:
        return super().projected(x * self.outside.scale + self.made)


class Making(Model):
    def patches(self, images: Tensor) -> Tensor:
        for block in self.blocks:
            block.made = self.head.weight[torch.tensor([0]), :]
        return super().patches(images)


def test_a_proof_has_gradients_of_nothing_but_what_it_gives():
    FromOutside.outside.scale = nn.Parameter(torch.ones(WIDTH))
    module = attached(FromOutside, Making, vtm=VTM)
    module.scale = FromOutside.outside.scale
    gradients = []
    for _ in range(2):
        module.zero_grad()
        training_loss(module(*BATCH)).backward()
        gradients.append(gradients_of(module))
    assert_close(gradients[0], gradients[1], rtol=0, atol=0)


class Merging(nn.Linear):
    """Merges other weights into its own in evaluation, as loralib does."""

    merged = False

    def train(self, mode: bool = True) -> Any:
        self.merged = self.merged or not mode
        return super().train(mode)


class Merged(Block):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = Merging(WIDTH, 3 * WIDTH)


@pytest.mark.parametrize("more", [{"detector": "gradient"}, {"rollout_steps": 1}])
def test_evaluation_for_a_while_merges_no_weights(more: dict[str, Any]):
    module = attached(Merged, htm={**HTM, "layer": 1, **more})
    assert module(*BATCH).mask.any()
    assert not any(block.qkv.merged for block in module.model.blocks)
    assert all(part.training for part in module.modules())


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.utils.parametrizations.weight_norm(self.qkv)


@EACH
def test_a_proof_leaves_no_weight_in_a_cache(settings: Any):
    module = attached(Normed, **settings)
    with nn.utils.parametrize.cached():
        proved = module(*BATCH).logits
    with nn.utils.parametrize.cached():
        assert torch.equal(module(*BATCH).logits, proved)


class Streams(Block):
    def forward(self, x: Tensor, given: Any) -> Any:
        return super().forward(x + given)


class Masked(Block):
    """Gets a mask of each sample."""

    def forward(self, x: Tensor, given: Any) -> Any:
        self.mask = given[:, None]
        return super().forward(x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.mask)


POSITIONS = torch.randn(1, TOKENS, WIDTH).expand(4, -1, -1)
SECOND_STREAM = "block 2 .*second stream"


@pytest.mark.parametrize(
    ("kind", "given", "told"),
    [
        (Masked, torch.randn(4, TOKENS, TOKENS), ""),
        (Streams, POSITIONS, ""),
        (Streams, torch.randn(4, TOKENS, WIDTH), SECOND_STREAM),
    ],
    ids=["masks", "positions", "tokens"],
)
@pytest.mark.parametrize(
    "settings",
    [
        {"htm": HTM},
        {"htm": {**HTM, "detector": "gradient"}},
        {"manifold_mixup": {"layers": [2]}},
    ],
    ids=["attention", "gradient", "manifold_mixup"],
)
def test_a_stream_that_would_not_be_mixed_is_refused(
    kind: Any, given: Tensor, told: str, settings: Any
):
    module = attached(kind, Given, **settings)
    module.model.given = given
    with refused(told) if told else nullcontext():
        assert not torch.equal(module(*BATCH).targets, BATCH[1])


class Late(Block):
    """Attends to something of the shape of its tokens, and scores by a softmax, from a day on."""

    scores_now = False
    crosses_now = False

    def forward(self, x: Tensor) -> Any:
        if self.scores_now:
            x = x * (1 + self.up(x)[..., :3].softmax(dim=-1).amax(dim=-1, keepdim=True))
        if self.crosses_now:
            q, k, v = self.projected(x)
            keys = self.qkv.weight[:TOKENS, : WIDTH // 4].expand_as(k)
            x = x + self.merged(self.attend(q, keys, v))
        return super().forward(x)


@EACH
def test_which_call_is_attention_is_told_by_its_shape_and_by_how_many_there_are(
    settings: Any, monkeypatch: pytest.MonkeyPatch
):
    module = attached(Late, **settings)
    module(*BATCH)
    monkeypatch.setattr(Late, "scores_now", True)
    changed = module(*BATCH).logits
    assert torch.equal(changed, attached(Late, **settings)(*BATCH).logits)
    monkeypatch.setattr(Late, "crosses_now", True)
    with refused("block [02] .*computes 2 attention maps"):
        module(*BATCH)


class Halving(Model):
    """Leaves out every second token in front of the last block."""

    def run(self, block: Any, x: Tensor) -> Tensor:
        if block is self.blocks[2]:
            x = x[:, ::2]
        return super().run(block, x)


def test_sources_of_vtm_have_the_tokens_of_its_layer():
    module = attached(Block, Halving, adapter=replace(ADAPTER, patch_embed=None), vtm=VTM)
    with refused(r"block 2 .*tokens \[8, 64\], a source of VTM with \[16, 64\]"):
        module(*BATCH)


class Adding(Model):
    """Adds to the tokens of a block in place, once that has run."""

    def run(self, block: Any, x: Tensor) -> Tensor:
        out = super().run(block, x)
        x.add_(1)
        return out


@pytest.mark.parametrize("compiles", [False, True])
def test_a_source_whose_tokens_are_changed_in_place_is_refused(compiles: bool):
    """Nothing of a frozen model tells autograd of it."""
    module = attached(Block, Adding, vtm=VTM)
    module.model.requires_grad_(False)
    if compiles:
        module.compile(backend="eager")
    with refused("block [12] .*changed in place"):
        module(*BATCH)


class DroppingTokens(Block):
    def projected(self, x: Tensor) -> Tensor:
        return super().projected(x * (torch.rand(*x.shape[:2], 1) > 0.2))


@EACH
def test_a_verdict_is_no_matter_of_chance(settings: Any):
    found = set()
    for seed in range(8):
        module = attached(DroppingTokens, **settings)
        torch.manual_seed(seed)
        try:
            module(*BATCH)
            found.add("served")
        except ValueError as error:
            found.add(str(error))
    assert len(found) == 1


class Rounding:
    """Hooks in pairs: weights are rounded while a module runs (DoReFa)."""

    def __init__(self, weight: Any):
        self.weight = weight

    def begin(self, *_: Any) -> None:
        self.kept = self.weight.data
        self.weight.data = (self.kept * 8).round() / 8

    def end(self, *_: Any) -> None:
        self.weight.data = self.kept


class Attending(Block):
    """Attention is a part of its own, with a pair of hooks around it; and a flag says it runs."""

    running = False

    def __init__(self) -> None:
        super().__init__()
        self.around = nn.Identity()
        self.around.forward = super().attention
        rounding = Rounding(self.qkv.weight)
        self.around.register_forward_pre_hook(rounding.begin)
        self.around.register_forward_hook(rounding.end)

    def attention(self, x: Tensor) -> Tensor:
        assert not self.running
        self.running = True
        out = self.around(x)
        self.running = False
        return out


@pytest.mark.parametrize("settings", [{"htm": HTM}, {"vtm": VTM}, {"htm": HTM, "vtm": VTM}])
def test_what_a_block_puts_back_behind_its_attention_is_put_back(settings: dict[str, Any]):
    module = attached(Attending, **settings)
    before = copy.deepcopy(module.model.state_dict())
    for _ in range(2):
        training_loss(module(*BATCH)).backward()
    assert_close(module.model.state_dict(), before, rtol=0, atol=0)
    assert not any(block.running for block in module.model.blocks)


class Hooking(Block):
    """Scales gradients by a hook on its tokens, as it trains."""

    def forward(self, x: Tensor) -> Any:
        x = x + 0.1 * self.up(x)
        if self.training:
            x.register_hook(lambda gradient: 0.5 * gradient)
        return super().forward(x)


class Casting(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.to(torch.bfloat16))


@pytest.mark.parametrize(("kind", "dtype"), [(Hooking, torch.float32), (Casting, torch.bfloat16)])
def test_a_block_is_proved_as_it_trains(kind: Any, dtype: torch.dtype):
    """With gradients, and in the dtype of the model, which may be the default one."""
    images, targets = BATCH
    torch.set_default_dtype(dtype)
    try:
        module = attached(kind, htm=HTM, vtm={"layer": 1, "kappa": 2})
        output = module(images.to(dtype), targets)
        assert output.mask.any()
        assert training_loss(output).isfinite()
    finally:
        torch.set_default_dtype(torch.float32)


class Drawing(Block):
    """Draws in training from a generator that torch does not know."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.scaled(x))

    def mlp(self, x: Tensor) -> Tensor:
        return super().mlp(self.scaled(x))

    def scaled(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x + 2 * self.generator.random() * self.norm1.weight


# three blocks draw twice each; HTM's first run once more, the draws of VTM's are put back
@pytest.mark.parametrize(("settings", "draws"), [({"htm": HTM}, 7), ({"vtm": VTM}, 6)])
def test_a_block_may_draw_from_generators_whose_state_can_be_put_back(settings: Any, draws: int):
    for generator in (np.random.default_rng(0), np.random.RandomState(0), random.Random(0)):
        before = copy.deepcopy(generator)
        assert training_loss(attached(partial(Drawing, generator), **settings)(*BATCH)).isfinite()
        for _ in range(draws):
            before.random()
        assert generator.random() == before.random()


def centred(x: Tensor) -> Tensor:
    """So that a token depends on those beside it."""
    return x - x.mean(dim=1, keepdim=True)


class DrawingMean(Drawing):
    def projected(self, x: Tensor) -> Tensor:
        return super().projected(centred(x))


BESIDE = "block 2 .*depend on the tokens beside them"


def test_a_block_that_draws_from_elsewhere_is_proved_in_evaluation():
    elsewhere = random.SystemRandom()
    for settings in ({"htm": HTM}, {"vtm": VTM}):
        module = attached(partial(Drawing, elsewhere), **settings)
        assert training_loss(module(*BATCH)).isfinite()
    with refused(BESIDE):
        attached(partial(DrawingMean, elsewhere), vtm=VTM)(*BATCH)


class Failing(Block):
    """Works for the tokens of training only."""

    def projected(self, x: Tensor) -> Tensor:
        if x.shape[1] != TOKENS:
            raise RuntimeError("16 tokens\nand no others")
        return super().projected(x)


def test_a_block_that_fails_in_a_proof_is_named_with_what_was_tried():
    assert attached(Failing, htm=HTM)(*BATCH).mask.any()
    module = attached(Failing, vtm=VTM)
    how = "tried as far as its attention, it fails"
    with refused(rf"^block 2 \(Failing\): {how}: RuntimeError 16 tokens$"):
        module(*BATCH)


def test_a_proof_with_one_sample_is_made_again_with_more():
    """One sample has no others, on which it could depend."""
    module = attached(CASES["map: MeanOverSamples"].build, htm=HTM)
    images, targets = BATCH
    module(images[:1], targets[:1])
    with refused("block 2 .*depends on the other samples"):
        module(images, targets)


def wrap(block: Any) -> None:
    own = block.forward
    block.forward = lambda x: own(centred(x))


def wrap_a_layer(block: Any) -> None:
    own = block.norm1.forward
    block.norm1.forward = lambda x: centred(own(x))


def give_a_layer_that_mixes(block: Any) -> None:
    block.norm1 = nn.Sequential(nn.LayerNorm(WIDTH), Centring())


def swap_its_class(block: Any) -> None:
    block.__class__ = CASES["tokens: MeanSubtracted"].build


def hook_a_layer(block: Any) -> None:
    block.norm1.register_forward_hook(lambda part, args, out: centred(out))


def hook_before_a_layer(block: Any) -> None:
    block.qkv.register_forward_pre_hook(lambda part, args: centred(args[0]))


CHANGES = [wrap, wrap_a_layer, give_a_layer_that_mixes, swap_its_class, hook_a_layer]
CHANGES += [hook_before_a_layer]


class Centring(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return centred(x)


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_that_has_been_changed_is_proved_again(change: Callable[[Any], None]):
    module = attached(Block, vtm=VTM)
    images, targets = BATCH
    module(images, targets)
    runs = counted(module)
    module(images, targets)  # the hooks that count belong to the block
    before = runs()
    module(images[:3], targets[:3])  # another size is the same block
    assert np.subtract(runs(), before).tolist() == [1, 1, 2]
    change(module.model.blocks[LAYER])
    with refused(BESIDE):
        module(images, targets)


class Biased(Block):
    """Gets a bias for its tokens, and may be told to centre these."""

    def forward(self, x: Tensor, centres: bool = False, bias: Any = None) -> Tensor:
        self.bias = bias
        return super().forward(centred(x) if centres else x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.bias)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_block_that_gets_arguments_of_another_kind_is_proved_again(by_name: bool):
    module = attached(Biased, vtm=VTM)
    given: dict[str, Any] = {"centres": False}
    if by_name:
        module.model.run = lambda block, x: block(x, **given)
    else:
        module.model.run = lambda block, x: block(x, *given.values())
    module(*BATCH)
    given["bias"] = torch.randn(1, 1, TOKENS, TOKENS)
    module(*BATCH)
    given["centres"] = True
    with refused(BESIDE):
        module(*BATCH)


# Compiled


@pytest.mark.parametrize("name", ["map: LinearAttention", "tokens: MeanSubtracted"])
def test_a_compiled_module_is_proved_as_well(name: str):
    module = attached(CASES[name].build, vtm=VTM)
    module.compile(backend="eager")
    with pytest.raises(ValueError, match=r"block [02]"):
        module(*BATCH)


def test_a_compiled_module_is_proved_anew_for_another_way_to_train():
    """A last batch of one sample, other precisions, no gradients."""
    module = attached(Block, htm=HTM, vtm={"layer": 1, "kappa": 2})
    module.compile(backend="eager", fullgraph=True, dynamic=False)
    images, targets = BATCH
    module(images, targets)
    module(images[:1], targets[:1])
    assert module.mixed_pairs(images, targets) is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert module(images, targets).mask.any()


def test_a_compiled_block_that_draws_in_front_of_its_attention_is_refused():
    """The memory would move the numbers that its own tokens draw."""
    module = attached(CASES["dropout: LoRA"].build, vtm=VTM)
    module.compile(backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="draws in front of its attention"):
        module(*BATCH)


# What is around a block


class Twice(Block):
    """Attends twice, which no map can stand for."""

    def attention(self, x: Tensor) -> Tensor:
        return super().attention(super().attention(x))


def test_a_detector_that_needs_no_map_takes_any_block():
    module = attached(Twice, htm=HTM)
    configured = module.detect

    def by_length(entry: Any) -> Tensor:
        return entry.args[0].detach().norm(dim=-1).softmax(dim=-1)

    def by_the_map_in_the_end(entry: Any) -> Tensor:
        entry.watching()
        return configured(entry)

    module.detect = by_length
    assert module(*BATCH).mask.any()
    for detector in (configured, by_the_map_in_the_end):
        module.detect = detector
        with pytest.raises(ValueError, match="2 attention maps"):
            module(*BATCH)


class OnLast(Block):
    """Every sample attends to the keys of the last one."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k[-1:].expand_as(k), v)


def test_an_own_detector_that_says_so_reads_a_map_that_is_proved():
    def alike(entry: Any) -> Tensor:
        return by_attention(entry)

    module = attached(OnLast, htm={**HTM, "detector": alike})
    assert module(*BATCH).mask.any()
    setattr(alike, "reads_map", True)
    for detector in (alike, partial(alike), partial(by_attention, class_token=False)):
        module = attached(OnLast, htm={**HTM, "detector": detector})
        with refused("block 2"):
            module(*BATCH)
    expected = attached(Block, htm=HTM)(*BATCH)
    found = attached(Block, htm={**HTM, "detector": alike})(*BATCH)
    assert torch.equal(found.logits, expected.logits)


class Padded(Block):
    """Half of the samples see nothing, which fused attention answers with 0."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = (len(q), 1, q.shape[2], k.shape[2])
        is_even = torch.arange(len(q)) % 2 == 0
        mask = is_even[:, None, None, None].expand(shape)
        return F.scaled_dot_product_attention(q, k, v, mask)


def test_rows_that_see_no_key_give_no_saliency():
    output = attached(Padded, htm=HTM)(*BATCH)
    assert (output.layers[0].saliency[1::2] == 0).all()
    assert output.logits.isfinite().all()


WRAPPED = """
import functools, torch, torch.nn.functional as F
own = F.scaled_dot_product_attention
F.scaled_dot_product_attention = functools.wraps(own)(lambda *x, **given: own(*x, **given))
from tests.tokenmixup.test_proved_blocks import BATCH, HTM, Block, attached
class Late(Block):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)
assert attached(Late, htm=HTM, vtm={"layer": 1})(*BATCH).mask.any()
"""


@pytest.mark.slow
def test_attention_that_others_have_wrapped_is_seen():
    subprocess.run([sys.executable, "-c", WRAPPED], check=True)
