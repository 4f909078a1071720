"""Whatever a block consists of, HTM and VTM are right, or it is refused in one line."""

import copy
import itertools
import random
import subprocess
import sys
from collections import deque
from collections.abc import Callable
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
    assert_nothing_is_left,
    drawn_batch,
    gradients_of,
    refused,
    small_vit,
)
from tests.tokenmixup.blocks import CASES, TOKENS, WIDTH, Block, Case, Random, SequenceFirst
from tokenmixup import Adapter, attach, mix_horizontal, training_loss
from tokenmixup.watch import Sight

LAYER = 2
KAPPA = 2
HTM: dict[str, Any] = {"layer": LAYER, "tau": float("inf"), "rho": 0.0}
VTM: dict[str, Any] = {"layer": LAYER, "kappa": KAPPA}
ADAPTER = Adapter(blocks="blocks", embed_dim=WIDTH, patch_embed="stem")
RANDOM = [name for name, case in CASES.items() if issubclass(case.build, Random)]
MAPPED = [name for name, case in CASES.items() if case.htm and name not in RANDOM]
NOT_MAPPED = [name for name, case in CASES.items() if not case.htm]
WITH_MEMORY = [name for name, case in CASES.items() if case.vtm]
WITHOUT_MEMORY = [name for name, case in CASES.items() if not case.vtm]


class Model(nn.Module):
    """Patches, three blocks, the mean of the tokens."""

    def __init__(self, case: Case):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(case.build() for _ in range(3))
        self.is_sequence_first = case.build is SequenceFirst

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


def model_of(case: Case) -> Model:
    """With random parameters, but for gates, which begin at 0."""
    torch.manual_seed(0)
    model = Model(case)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate" not in name and "up.weight" not in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch_of(case: Case) -> tuple[Tensor, Tensor]:
    return drawn_batch(case.samples, 16)


def attached(case: Case, **settings: Any) -> Any:
    return attach(model_of(case), CLASSES, adapter=ADAPTER, **settings).train()


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
    images, targets = batch_of(CASES[name])
    module = attached(CASES[name], htm=HTM)
    output = module(images, targets)
    (mix,) = output.layers
    model: Any = model_of(CASES[name])
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
    output = attached(CASES[name], htm=HTM)(*batch_of(CASES[name]))
    assert output.mask.any()
    assert training_loss(output).isfinite()


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_vtm_gives_a_block_keys_and_values_and_nothing_else(name: str):
    images, targets = batch_of(CASES[name])
    module = attached(CASES[name], vtm=VTM)
    model: Any = model_of(CASES[name]).train()
    torch.manual_seed(2)
    output = module(images, targets)
    torch.manual_seed(2)
    x = model.patches(images)
    memory = []
    places = []
    for block in model.blocks[:LAYER]:
        out, saliency = by_hand(block, x)
        places.append(saliency.topk(KAPPA).indices)
        memory.append(x.take_along_dim(places[-1][..., None], dim=1))
        x = out
    model.blocks[LAYER].memory_places = torch.cat(places, dim=1)
    out, _ = model.blocks[LAYER].by_hand(x, torch.cat(memory, dim=1))
    logits = model.classified(out)
    assert_close(output.logits, logits, rtol=1e-4, atol=1e-5)
    ours = gradients_by(module.model, output.logits, targets)
    theirs = gradients_by(model, logits, targets)
    assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", NOT_MAPPED)
def test_htm_refuses_a_block_whose_map_it_would_misread(name: str):
    module = attached(CASES[name], htm=HTM)
    with refused("block "):
        module(*batch_of(CASES[name]))


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_vtm_refuses_a_block_whose_keys_and_values_it_cannot_have(name: str):
    module = attached(CASES[name], vtm=VTM)
    with refused("block "):
        module(*batch_of(CASES[name]))


# What a proof leaves behind, and when it is made again


def counted(module: Any) -> Callable[[], list[int]]:
    """How often the first norm of each block has run; a proof cannot take these numbers back."""
    counters = [itertools.count() for _ in module.model.blocks]

    def count(counter: Any, *_: Any) -> None:
        next(counter)

    for block, counter in zip(module.model.blocks, counters, strict=True):
        block.norm1.register_forward_hook(partial(count, counter))
    return lambda: [next(copy.copy(counter)) for counter in counters]


@pytest.mark.parametrize("name", ["map: Multihead", "map: Tied", "map: OneHead"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_proof_changes_nothing_of_the_model(name: str, dtype: torch.dtype):
    """Parameters, also those at two places; buffers, modes, generators, gradients, hooks."""
    module = attached(CASES[name], htm=HTM, vtm={"layer": 1}).to(dtype)
    module.model.blocks[1].eval()
    runs = counted(module)
    hooks = [dict(part._forward_pre_hooks) for part in module.modules()]
    modes = [part.training for part in module.modules()]
    parameters = [id(p) for p in module.parameters()]
    before = copy.deepcopy(module.state_dict())
    images, targets = batch_of(CASES[name])
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
        inner = self.inner
        sizes = [
            len(inner["list"]),
            sorted(inner["set"]),
            len(inner["deque"]),
            len(self.seen),
            len(LOSSES),
        ]
        states = [self.own.get_state(), random.getstate(), np.random.get_state()[2]]
        return [*states, self.plain, self.mean, self.runs, Leaving.count, *sizes]


def test_a_proof_leaves_nothing_of_its_runs(monkeypatch: pytest.MonkeyPatch):
    """A step that proves leaves what one leaves that does not."""
    case = Case(Leaving, htm=True, vtm=True)
    left = []
    for is_proved in (True, False):
        module = attached(case, vtm=VTM)
        runs = counted(module)
        blocks = module.model.blocks
        kept: list[Tensor] = []
        blocks[1].norm2.register_forward_hook(lambda part, args, out, kept=kept: kept.append(out))
        Leaving.seen.clear()
        LOSSES.clear()
        KEPT.clear()
        Leaving.count = 0
        random.seed(0)
        np.random.seed(0)
        if not is_proved:
            monkeypatch.setattr("tokenmixup.prove.prove_block", lambda *_: Sight())
        module(*batch_of(case))
        assert (min(runs()) > 3) == is_proved
        left.append([[block.left() for block in blocks], len(kept), len(KEPT)])
    assert_close(left[0], left[1], rtol=0, atol=0)


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
    ("block 0 .*tokens that it gets in place", add_to_tokens, None),
    ("", overwrite, torch.zeros(3)),
    ("", change_in_evaluation, None),
]


@pytest.mark.parametrize("settings", [{"htm": HTM}, {"vtm": VTM}])
@pytest.mark.parametrize(("told", "change", "given"), IN_FRONT)
def test_what_a_block_changes_in_front_of_its_attention_changes_once(
    told: str, change: Any, given: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(StateInFront, "change", change)
    case = Case(StateInFront, htm=True, vtm=True)
    model = Given(case)
    model.given = given
    module = attach(model, CLASSES, adapter=ADAPTER, **settings).train()
    if not told:
        assert training_loss(module(*batch_of(case))).isfinite()
        return
    with refused(told.replace("block 0", "block [02]")):
        module(*batch_of(case))


def test_what_a_memory_would_cache_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(StateInFront, "change", cache)
    module = attached(Case(StateInFront, htm=True, vtm=False), vtm=VTM)
    with refused(f"block 2 .*cached in {TWICE}"):
        module(*batch_of(CASES["map: Fused"]))


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
    case = Case(FromOutside, htm=True, vtm=True)
    FromOutside.outside.scale = nn.Parameter(torch.ones(WIDTH))
    module = attach(Making(case), CLASSES, adapter=ADAPTER, vtm=VTM).train()
    module.scale = FromOutside.outside.scale
    gradients = []
    for _ in range(2):
        module.zero_grad()
        training_loss(module(*batch_of(case))).backward()
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
    case = Case(Merged, htm=True, vtm=True)
    module = attached(case, htm={**HTM, "layer": 1, **more})
    assert module(*batch_of(case)).mask.any()
    assert not any(block.qkv.merged for block in module.model.blocks)
    assert all(part.training for part in module.modules())


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.utils.parametrizations.weight_norm(self.qkv)


@pytest.mark.parametrize("settings", [{"htm": HTM}, {"vtm": VTM}])
def test_a_proof_leaves_no_weight_in_a_cache(settings: Any):
    case = Case(Normed, htm=True, vtm=True)
    module = attached(case, **settings)
    with nn.utils.parametrize.cached():
        proved = module(*batch_of(case)).logits
    with nn.utils.parametrize.cached():
        assert torch.equal(module(*batch_of(case)).logits, proved)


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


def test_a_mask_of_each_sample_is_no_stream():
    case = Case(Masked, htm=True, vtm=False)
    images, targets = batch_of(case)
    model = Given(case)
    model.given = torch.randn(len(images), TOKENS, TOKENS)
    module = attach(model, CLASSES, adapter=ADAPTER, htm=HTM).train()
    assert module(images, targets).mask.any()


def test_htm_refuses_a_stream_that_it_would_not_mix():
    case = Case(Streams, htm=False, vtm=False)
    images, targets = batch_of(case)
    model = Given(case)
    module = attach(model, CLASSES, adapter=ADAPTER, htm=HTM).train()
    model.given = torch.randn(1, TOKENS, WIDTH).expand(len(images), -1, -1)  # positions
    module(images, targets)
    model.given = torch.randn(len(images), TOKENS, WIDTH)
    module = attach(model, CLASSES, adapter=ADAPTER, htm=HTM).train()
    with refused("block 2 .*second stream"):
        module(images, targets)


class Late(Block):
    """Attends to something of the shape of its tokens, and scores by a softmax, from a day on."""

    scores_now = False
    crosses_now = False

    def forward(self, x: Tensor) -> Any:
        if self.scores_now:
            x = x * (1 + self.up(x)[..., :3].softmax(dim=-1).amax(dim=-1, keepdim=True))
        if self.crosses_now:
            q, k, v = self.projected(x)
            x = x + self.merged(self.attend(q, self.keys.expand_as(k), v))
        return super().forward(x)

    @property
    def keys(self) -> Tensor:
        return self.qkv.weight[:TOKENS, : WIDTH // 4]


@pytest.mark.parametrize("settings", [{"htm": HTM}, {"vtm": VTM}])
def test_which_call_is_attention_is_told_by_its_shape_and_by_how_many_there_are(settings: Any):
    case = Case(Late, htm=True, vtm=True)
    module = attached(case, **settings)
    module(*batch_of(case))
    for block in module.model.blocks:
        block.scores_now = True
    changed = module(*batch_of(case)).logits
    fresh = attached(case, **settings)
    for block in fresh.model.blocks:
        block.scores_now = True
    assert torch.equal(changed, fresh(*batch_of(case)).logits)
    for block in module.model.blocks:
        block.crosses_now = True
    with refused("block [02] .*computes 2 attention maps"):
        module(*batch_of(case))


class Halving(Model):
    """Leaves out every second token in front of the last block."""

    def run(self, block: Any, x: Tensor) -> Tensor:
        if block is self.blocks[2]:
            x = x[:, ::2]
        return super().run(block, x)


def test_sources_of_vtm_have_the_tokens_of_its_layer():
    case = CASES["map: Fused"]
    adapter = replace(ADAPTER, patch_embed=None)
    module = attach(Halving(case), CLASSES, adapter=adapter, vtm=VTM).train()
    with refused(r"block 2 .*tokens \[8, 64\], a source of VTM with \[16, 64\]"):
        module(*batch_of(case))


class Adding(Model):
    """Adds to the tokens of a block in place, once that has run."""

    def run(self, block: Any, x: Tensor) -> Tensor:
        out = super().run(block, x)
        x.add_(1)
        return out


@pytest.mark.parametrize("compiles", [False, True])
def test_a_source_whose_tokens_are_changed_in_place_is_refused(compiles: bool):
    """Nothing of a frozen model tells autograd of it."""
    case = CASES["map: Fused"]
    module = attach(Adding(case).requires_grad_(False), CLASSES, adapter=ADAPTER, vtm=VTM).train()
    if compiles:
        module.compile(backend="eager")
    with refused("block [12] .*changed in place"):
        module(*batch_of(case))


def test_blocks_that_are_compiled_by_themselves_are_proved():
    case = CASES["map: Fused"]
    module = attached(case, htm=HTM)
    expected = module(*batch_of(case)).logits
    module = attached(case, htm=HTM)
    for block in module.model.blocks:
        block.compile(backend="eager")
    assert_close(module(*batch_of(case)).logits, expected)


class Described(Block):
    """Reads what a quantised parameter would tell of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.scale.times = 2

    def projected(self, x: Tensor) -> Tensor:
        assert isinstance(self.scale, nn.Parameter)
        return super().projected(x * self.scale * self.scale.times)


def test_parameters_are_parameters_in_a_proof():
    case = Case(Described, htm=True, vtm=True)
    model = Model(case)
    assert attach(model, CLASSES, adapter=ADAPTER, vtm=VTM).train()(*batch_of(case)).logits.any()


class DroppingTokens(Block):
    def projected(self, x: Tensor) -> Tensor:
        return super().projected(x * (torch.rand(*x.shape[:2], 1) > 0.2))


@pytest.mark.parametrize("settings", [{"htm": HTM}, {"vtm": VTM}])
def test_a_verdict_is_no_matter_of_chance(settings: Any):
    case = Case(DroppingTokens, htm=True, vtm=True)
    found = set()
    for seed in range(8):
        module = attached(case, **settings)
        torch.manual_seed(seed)
        try:
            module(*batch_of(case))
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


class Flagged(Block):
    """Says while it runs that it does."""

    running = False

    def forward(self, x: Tensor) -> Any:
        assert not self.running
        self.running = True
        out = super().forward(x)
        self.running = False
        return out


class Attending(Block):
    """Attention is a part of its own, which hooks can be around."""

    def __init__(self) -> None:
        super().__init__()
        self.around = nn.Identity()
        self.around.forward = super().attention

    def attention(self, x: Tensor) -> Tensor:
        return self.around(x)


@pytest.mark.parametrize("settings", [{"htm": HTM}, {"vtm": VTM}, {"htm": HTM, "vtm": VTM}])
def test_what_a_block_puts_back_behind_its_attention_is_put_back(settings: dict[str, Any]):
    for kind in (Attending, Flagged):
        case = Case(kind, htm=True, vtm=True)
        module = attached(case, **settings)
        model = module.model
        if kind is Attending:
            for block in model.blocks:
                rounding = Rounding(block.qkv.weight)
                block.around.register_forward_pre_hook(rounding.begin)
                block.around.register_forward_hook(rounding.end)
        before = copy.deepcopy(model.state_dict())
        for _ in range(2):
            training_loss(module(*batch_of(case))).backward()
        assert_close(model.state_dict(), before, rtol=0, atol=0)
        assert not any(getattr(block, "running", False) for block in model.blocks)


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


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(Hooking, torch.float32), (Casting, torch.bfloat16), (Block, torch.bfloat16)],
)
def test_a_block_is_proved_as_it_trains(kind: Any, dtype: torch.dtype):
    """With gradients, and in the dtype of the model, which may be the default one."""
    case = Case(kind, htm=True, vtm=True)
    images, targets = batch_of(case)
    torch.set_default_dtype(dtype)
    try:
        module = attached(case, htm=HTM, vtm={"layer": 1, "kappa": 2})
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
    batch = batch_of(CASES["map: Fused"])
    for generator in (np.random.default_rng(0), np.random.RandomState(0), random.Random(0)):
        case = Case(partial(Drawing, generator), htm=True, vtm=True)
        before = copy.deepcopy(generator)
        assert training_loss(attached(case, **settings)(*batch)).isfinite()
        for _ in range(draws):
            before.random()
        assert generator.random() == before.random()


class DrawingMean(Drawing):
    def projected(self, x: Tensor) -> Tensor:
        return super().projected(x - x.mean(dim=1, keepdim=True))


def test_a_block_that_draws_from_elsewhere_is_proved_in_evaluation():
    for settings in ({"htm": HTM}, {"vtm": VTM}):
        case = Case(partial(Drawing, random.SystemRandom()), htm=True, vtm=True)
        assert training_loss(attached(case, **settings)(*batch_of(case))).isfinite()
    case = Case(partial(DrawingMean, random.SystemRandom()), htm=True, vtm=False)
    with refused("block 2 .*depend on the tokens beside them"):
        attached(case, vtm=VTM)(*batch_of(case))


class Failing(Block):
    """Works for the tokens of training only."""

    def projected(self, x: Tensor) -> Tensor:
        if x.shape[1] != TOKENS:
            raise RuntimeError("16 tokens\nand no others")
        return super().projected(x)


def test_a_block_that_fails_in_a_proof_is_named_with_what_was_tried():
    case = Case(Failing, htm=True, vtm=False)
    assert attached(case, htm=HTM)(*batch_of(case)).mask.any()
    module = attached(case, vtm=VTM)
    how = "tried as far as its attention, it fails"
    with refused(rf"^block 2 \(Failing\): {how}: RuntimeError 16 tokens$"):
        module(*batch_of(case))


def test_a_proof_with_one_sample_is_made_again_with_more():
    """One sample has no others, on which it could depend."""
    case = Case(MeanOverSamples, htm=False, vtm=False)
    module = attached(case, htm=HTM)
    images, targets = batch_of(case)
    module(images[:1], targets[:1])
    with refused("block 2 .*depends on the other samples"):
        module(images, targets)


class MeanOverSamples(Block):
    def projected(self, x: Tensor) -> Tensor:
        return super().projected(x + x.mean(dim=0))


def wrap(module: Any) -> None:
    own = module.model.blocks[LAYER].forward
    module.model.blocks[LAYER].forward = lambda x: own(x - x.mean(dim=1, keepdim=True))


def give_a_layer_that_mixes(module: Any) -> None:
    module.model.blocks[LAYER].norm1 = nn.Sequential(nn.LayerNorm(WIDTH), MeanSubtracting())


def swap_its_class(module: Any) -> None:
    module.model.blocks[LAYER].__class__ = CASES["tokens: MeanSubtracted"].build


def hook_a_layer(module: Any) -> None:
    norm = module.model.blocks[LAYER].norm1
    norm.register_forward_hook(lambda part, args, out: out - out.mean(dim=1, keepdim=True))


def hook_before_a_layer(module: Any) -> None:
    qkv = module.model.blocks[LAYER].qkv
    qkv.register_forward_pre_hook(lambda part, args: args[0] - args[0].mean(dim=1, keepdim=True))


CHANGES = [wrap, give_a_layer_that_mixes, swap_its_class, hook_a_layer, hook_before_a_layer]


class MeanSubtracting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=1, keepdim=True)


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_that_has_been_changed_is_proved_again(change: Callable[[Any], None]):
    case = CASES["map: Fused"]
    module = attached(case, vtm=VTM)
    images, targets = batch_of(case)
    module(images, targets)
    runs = counted(module)
    module(images, targets)  # the hooks that count belong to the block
    before = runs()
    module(images[:3], targets[:3])  # another size is the same block
    assert np.subtract(runs(), before).tolist() == [1, 1, 2]
    change(module)
    with refused("block 2 .*depend on the tokens beside them"):
        module(images, targets)


class Biased(Block):
    """Gets a bias for its tokens, and may be told to centre these."""

    def forward(self, x: Tensor, centres: bool = False, bias: Any = None) -> Tensor:
        self.bias = bias
        if centres:
            x = x - x.mean(dim=1, keepdim=True)
        return super().forward(x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.bias)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_block_that_gets_arguments_of_another_kind_is_proved_again(by_name: bool):
    case = Case(Biased, htm=True, vtm=True)
    module = attached(case, vtm=VTM)
    batch = batch_of(case)
    given: dict[str, Any] = {"centres": False}
    if by_name:
        module.model.run = lambda block, x: block(x, **given)
    else:
        module.model.run = lambda block, x: block(x, *given.values())
    module(*batch)
    given["bias"] = torch.randn(1, 1, TOKENS, TOKENS)
    module(*batch)
    given["centres"] = True
    with refused("block 2 .*depend on the tokens beside them"):
        module(*batch)


@pytest.mark.parametrize("name", ["map: LinearAttention", "tokens: MeanSubtracted"])
def test_a_compiled_module_is_proved_as_well(name: str):
    module = attached(CASES[name], vtm=VTM)
    module.compile(backend="eager")
    with pytest.raises(ValueError, match=r"block [02]"):
        module(*batch_of(CASES[name]))


def test_a_compiled_module_is_proved_anew_for_another_way_to_train():
    """A last batch of one sample, other precisions, no gradients."""
    case = CASES["map: Fused"]
    module = attached(case, htm=HTM, vtm={"layer": 1, "kappa": 2})
    module.compile(backend="eager", fullgraph=True, dynamic=False)
    images, targets = batch_of(case)
    module(images, targets)
    module(images[:1], targets[:1])
    assert module.mixed_pairs(images, targets) is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert module(images, targets).mask.any()


def test_a_compiled_block_that_draws_in_front_of_its_attention_is_refused():
    """The memory would move the numbers that its own tokens draw."""
    module = attached(CASES["dropout: LoRA"], vtm=VTM)
    module.compile(backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="draws in front of its attention"):
        module(*batch_of(CASES["dropout: LoRA"]))


def test_what_proves_a_compiled_module_leaves_nothing():
    """An own pass, in which generators and buffers are not seen to have moved."""
    case = Case(Leaving, htm=True, vtm=True)
    module = attached(case, vtm=VTM)
    LOSSES.clear()
    random.seed(0)
    begun = copy.deepcopy([block.mean for block in module.model.blocks])
    state = torch.get_rng_state()
    replaced = module._begin(*batch_of(case))
    module._run_apart(*batch_of(case), replaced)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == random.Random(0).getstate()
    assert [block.runs for block in module.model.blocks] == [0, 0, 0]
    assert not LOSSES
    assert_close([block.mean for block in module.model.blocks], begun, rtol=0, atol=0)


# What is around a block


class Twice(Block):
    """Attends twice, which no map can stand for."""

    def attention(self, x: Tensor) -> Tensor:
        return super().attention(super().attention(x))


def test_a_detector_that_needs_no_map_takes_any_block():
    case = Case(Twice, htm=False, vtm=False)
    batch = batch_of(case)
    module = attached(case, htm=HTM)
    configured = module.detect

    def by_length(entry: Any) -> Tensor:
        return entry.args[0].detach().norm(dim=-1).softmax(dim=-1)

    def by_the_map_in_the_end(entry: Any) -> Tensor:
        entry.watching()
        return configured(entry)

    with pytest.raises(ValueError, match="2 attention maps"):
        module(*batch)
    module.detect = by_length
    assert module(*batch).mask.any()
    module.detect = by_the_map_in_the_end
    with pytest.raises(ValueError, match="2 attention maps"):
        module(*batch)


def test_scripted_blocks_are_refused():
    model: Any = small_vit()
    model.blocks[1] = torch.jit.trace(model.blocks[1], torch.randn(2, 17, model.embed_dim))
    with pytest.raises(ValueError, match=r"block 1 .*TorchScript"):
        attach(model, CLASSES, htm={"layer": 1})


class Vectorised(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.vmap(F.scaled_dot_product_attention)(q, k, v)


def test_attention_under_vmap_is_refused():
    case = Case(Vectorised, htm=False, vtm=False)
    module = attached(case, htm=HTM)
    with refused(r"^block 2 \(Vectorised\)"):
        module(*batch_of(case))


class Padded(Block):
    """Half of the samples see nothing, which fused attention answers with 0."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = (len(q), 1, q.shape[2], k.shape[2])
        is_even = torch.arange(len(q)) % 2 == 0
        mask = is_even[:, None, None, None].expand(shape)
        return F.scaled_dot_product_attention(q, k, v, mask)


def test_rows_that_see_no_key_give_no_saliency():
    case = Case(Padded, htm=True, vtm=True)
    output = attached(case, htm=HTM)(*batch_of(case))
    assert (output.layers[0].saliency[1::2] == 0).all()
    assert output.logits.isfinite().all()


def test_after_any_error_the_model_evaluates_as_before():
    """Also where the model has taken its own `forward` away meanwhile."""
    case = CASES["map: Fused"]
    module = attached(case, htm=HTM)
    images, targets = batch_of(case)
    module(images, targets)
    expected = module.eval()(images)

    def break_down(*_: Any) -> None:
        del module.model.stem.forward
        raise KeyError("in a hook")

    hook = module.model.blocks[0].register_forward_pre_hook(break_down)
    with pytest.raises(KeyError, match="in a hook"):
        module.train()(images, targets)
    hook.remove()
    assert_nothing_is_left(module)
    assert torch.equal(module.eval()(images), expected)


WRAPPED = """
import functools, torch, torch.nn.functional as F
own = F.scaled_dot_product_attention
F.scaled_dot_product_attention = functools.wraps(own)(lambda *x, **given: own(*x, **given))
from tests.tokenmixup.test_proved_blocks import HTM, Block, Case, attached, batch_of
class Late(Block):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)
case = Case(Late, htm=True, vtm=True)
module = attached(case, htm=HTM, vtm={"layer": 1})
assert module(*batch_of(case)).mask.any()
"""


@pytest.mark.slow
def test_attention_that_others_have_wrapped_is_seen():
    subprocess.run([sys.executable, "-c", WRAPPED], check=True)
