"""Whatever a block consists of, HTM and VTM are right, or it is refused in one line."""

import copy
import subprocess
import sys
from collections.abc import Callable
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
    runs_of,
    small_vit,
)
from tests.tokenmixup.blocks import CASES, TOKENS, WIDTH, Block, Case, Random, SequenceFirst
from tokenmixup import Adapter, attach, mix_horizontal, training_loss

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


@pytest.mark.parametrize("name", NOT_MAPPED)
def test_htm_refuses_a_block_whose_map_it_would_misread(name: str):
    module = attached(CASES[name], htm=HTM)
    with refused("block "):
        module(*batch_of(CASES[name]))


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_vtm_refuses_a_block_that_more_tokens_would_change(name: str):
    module = attached(CASES[name], vtm=VTM)
    with refused("block "):
        module(*batch_of(CASES[name]))


# What a proof leaves behind, and when it is made again


@pytest.mark.parametrize("name", ["map: Multihead", "map: Tied", "map: OneHead"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_proof_changes_nothing_of_the_model(name: str, dtype: torch.dtype):
    """Parameters, also those at two places; buffers, modes, generators, gradients."""
    module = attached(CASES[name], htm=HTM, vtm={"layer": 1}).to(dtype)
    module.model.blocks[1].eval()
    runs = runs_of(block.norm1 for block in module.model.blocks)
    hooks = [dict(part._forward_pre_hooks) for part in module.modules()]
    modes = [part.training for part in module.modules()]
    parameters = [id(p) for p in module.parameters()]
    before = copy.deepcopy(module.state_dict())
    images, targets = batch_of(CASES[name])
    state = torch.get_rng_state()
    module(images.to(dtype), targets.to(dtype))
    assert min(runs) > 3  # more than a plain pass and this one need, so that each was proved
    assert torch.equal(torch.get_rng_state(), state)
    assert [dict(part._forward_pre_hooks) for part in module.modules()] == hooks
    assert [part.training for part in module.modules()] == modes
    assert [id(p) for p in module.parameters()] == parameters
    assert not gradients_of(module)
    assert_close(module.state_dict(), before, rtol=0, atol=0)


def excite(module: Any) -> None:
    kind = CASES["tokens: ExciteInPlace"].build
    module.model.blocks[LAYER].up = kind().up
    module.model.blocks[LAYER].__class__ = kind


def wrap(module: Any) -> None:
    own = module.model.blocks[LAYER].forward
    module.model.blocks[LAYER].forward = lambda x: own(x) + x.mean(dim=1, keepdim=True)


def give_a_layer_that_mixes(module: Any) -> None:
    module.model.blocks[LAYER].norm1 = nn.Sequential(nn.LayerNorm(WIDTH), MeanSubtracting())


class MeanSubtracting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=1, keepdim=True)


@pytest.mark.parametrize("change", [excite, wrap, give_a_layer_that_mixes])
def test_a_block_that_has_been_changed_is_proved_again(change: Callable[[Any], None]):
    case = CASES["map: Fused"]
    module = attached(case, vtm=VTM)
    runs = runs_of(block.norm1 for block in module.model.blocks)
    images, targets = batch_of(case)
    module(images, targets)
    before = list(runs)
    module(images[:3], targets[:3])  # another size is the same block
    assert np.subtract(runs, before).tolist() == [1, 1, 1]
    change(module)
    with pytest.raises(ValueError, match=r"block 2.*more tokens change"):
        module(images, targets)


class Biased(Block):
    """Gets a bias for its own tokens, or one that it could not extend to a memory."""

    def forward(self, x: Tensor, bias: Any = None) -> Tensor:
        self.bias = bias
        return super().forward(x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = self.bias
        if isinstance(bias, list):
            bias = bias[0][:, : k.shape[2]]
        return F.scaled_dot_product_attention(q, k, v, bias)


def test_a_block_that_gets_arguments_of_another_kind_is_proved_again():
    """A mask of all tokens passes; columns that are not those of the tokens do not."""
    case = Case(Biased, htm=True, vtm=True)
    module = attached(case, vtm=VTM)
    batch = batch_of(case)
    given: dict[str, Any] = {}
    module.model.run = lambda block, x: block(x, **given)
    module(*batch)
    given["bias"] = torch.randn(1, 1, TOKENS, TOKENS)
    module(*batch)
    given["bias"] = [torch.randn(TOKENS, 2 * TOKENS)]
    with pytest.raises(ValueError, match="block 2"):
        module(*batch)


@pytest.mark.parametrize("name", ["map: LinearAttention", "tokens: ExciteInPlace"])
def test_a_compiled_module_is_proved_as_well(name: str):
    module = attached(CASES[name], vtm=VTM)
    module.compile(backend="eager")
    with pytest.raises(ValueError, match=r"block [02]"):
        module(*batch_of(CASES[name]))


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
    module = attach(model, CLASSES, htm={"layer": 1}).train()
    with pytest.raises(ValueError, match=r"block 1 .*TorchScript"):
        module(torch.zeros(2, 3, 32, 32), torch.eye(CLASSES)[:2])


class Vectorised(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.vmap(F.scaled_dot_product_attention)(q, k, v)


def test_attention_under_vmap_is_refused():
    case = Case(Vectorised, htm=False, vtm=False)
    module = attached(case, htm=HTM)
    with refused(r"^block 2 \(Vectorised\) computes 0 attention maps"):
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
