"""A block that keeps the contract is mixed as by hand; one that visibly does not is refused."""

from collections.abc import Callable
from typing import Any

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
from tests.tokenmixup.blocks import CASES, WIDTH, Block, Random
from tokenmixup import Adapter, attach, mix_horizontal, training_loss

LAYER = 2
KAPPA = 2
HTM: dict[str, Any] = {"layer": LAYER, "tau": float("inf"), "rho": 0.0}
VTM: dict[str, Any] = {"layer": LAYER, "kappa": KAPPA}
BATCH = drawn_batch(4, 16)
ADAPTER = Adapter(blocks="blocks", embed_dim=WIDTH)
RANDOM = [name for name, case in CASES.items() if issubclass(case.build, Random)]
MAPPED = [name for name, case in CASES.items() if case.htm and name not in RANDOM]
WITH_MEMORY = [name for name, case in CASES.items() if case.vtm]
REFUSED = [(name, {"htm": HTM}) for name, case in CASES.items() if not case.htm]
REFUSED += [(name, {"vtm": VTM}) for name, case in CASES.items() if not case.vtm]


class Model(nn.Module):
    """Patches, three blocks, the mean of the tokens."""

    def __init__(self, build: Callable[[], Any]):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(build() for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        for block in self.blocks:
            x = self.run(block, x)
        return self.classified(x)

    def run(self, block: Any, x: Tensor) -> Tensor:
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


# The check of VTM's keys


def test_the_check_runs_once_and_leaves_nothing():
    """Buffers, modes, generators, gradients and hooks are as they were."""
    runs: list[int] = []
    module = attached(Block, htm=HTM, vtm={"layer": 1})
    module.model.blocks[1].norm1.register_forward_hook(lambda *_: runs.append(1))
    module.model.blocks[1].eval()
    modes = [part.training for part in module.modules()]
    hooks = [dict(part._forward_pre_hooks) for part in module.modules()]
    before = {name: x.clone() for name, x in module.state_dict().items()}
    state = torch.get_rng_state()
    module(*BATCH)
    assert len(runs) == 3 + 2  # two of the check's, and the plain model's in evaluation
    module(*BATCH)
    assert len(runs) == 3 + 2 + 2  # on the memory, and as a whole
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in module.modules()] == modes
    assert [dict(part._forward_pre_hooks) for part in module.modules()] == hooks
    assert not gradients_of(module)
    assert_close(module.state_dict(), before, rtol=0, atol=0)


def test_a_batch_that_is_not_finite_is_no_check():
    """The next one is checked in its place."""
    images, targets = BATCH
    module = attached(CASES["tokens: MeanSubtracted"].build, vtm=VTM)
    module(torch.full_like(images, torch.nan), targets)
    with refused("block 2 .*beside them"):
        module(images, targets)


def test_a_compiled_module_is_checked_as_well():
    module = attached(CASES["tokens: MeanSubtracted"].build, vtm=VTM)
    module.compile(backend="eager")
    with refused("block 2 .*beside them"):
        module(*BATCH)


# What is around a block


class Twice(Block):
    """Attends twice, which no map can stand for."""

    def attention(self, x: Tensor) -> Tensor:
        return super().attention(super().attention(x))


def test_a_block_that_attends_twice_is_refused():
    with refused("block 2 .*2 attention maps"):
        attached(Twice, htm=HTM)(*BATCH)
