"""Whatever a block consists of, HTM and VTM are right, or it is refused in one line."""

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import CLASSES, small_vit
from tests.tokenmixup.blocks import CASES, TOKENS, WIDTH, Block, Case, Random, SequenceFirst
from tokenmixup import Adapter, TokenMixup, attach, mix_horizontal, training_loss

LAYER = 2
KAPPA = 2
HTM: dict[str, Any] = {"layer": LAYER, "tau": float("inf"), "rho": 0.0}
VTM: dict[str, Any] = {"layer": LAYER, "kappa": KAPPA}
ADAPTER = Adapter(blocks="blocks", embed_dim=WIDTH, patch_embed="stem")
ALL = {f"{row}: {name}": case for row, cases in CASES.items() for name, case in cases.items()}


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
    generator = torch.Generator().manual_seed(1)
    targets = torch.randn(case.samples, CLASSES, generator=generator).softmax(dim=1)
    return torch.randn(case.samples, 3, 16, 16, generator=generator), targets


def step(model: nn.Module, logits: Tensor, targets: Tensor) -> list[Tensor]:
    """Returns gradients of the model's parameters."""
    F.cross_entropy(logits, targets).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def refusal(case: Case, **settings: Any) -> str:
    module = attach(model_of(case), CLASSES, adapter=ADAPTER, **settings).train()
    with pytest.raises(ValueError) as error:
        module(*batch_of(case))
    return str(error.value)


def sources(model: Any, images: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Returns what enters block LAYER, and tokens and saliency of the blocks before it."""
    x = model.patches(images)
    found = []
    for block in model.blocks[:LAYER]:
        out, attn = block.by_hand(x, x[:, :0])
        found.append((x, attn.mean(dim=(1, 2)).detach()))
        x = out
    return x, found


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if case.htm])
def test_htm_mixes_by_the_map_that_a_block_computes(name: str):
    case = ALL[name]
    images, targets = batch_of(case)
    model = model_of(case)
    module = attach(copy.deepcopy(model), CLASSES, adapter=ADAPTER, htm=HTM).train()
    output = module(images, targets)
    if issubclass(case.build, Random):  # type: ignore[arg-type]
        assert output.mask.any()
        assert training_loss(output).isfinite()
        return
    x, _ = sources(model, images)
    _, attn = model.blocks[LAYER].by_hand(x, x[:, :0])
    saliency = attn.mean(dim=(1, 2)).detach()
    torch.testing.assert_close(output.layers[0].saliency, saliency, rtol=1e-4, atol=1e-6)
    easy = torch.zeros(len(x))
    mixed = mix_horizontal(x, targets, output.layers[0].saliency, easy, 1.0, 0.0)
    assert torch.equal(output.mask, mixed.mask)
    assert mixed.mask.any()
    logits = model.classified(model.blocks[LAYER].by_hand(mixed.tokens, x[:, :0])[0])
    torch.testing.assert_close(output.logits, logits, rtol=1e-4, atol=1e-5)
    theirs = step(model, logits, mixed.targets)
    ours = step(module.model, output.logits, output.targets)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if case.vtm])
def test_vtm_gives_a_block_keys_and_values_and_nothing_else(name: str):
    case = ALL[name]
    images, targets = batch_of(case)
    model = model_of(case).train()
    module = attach(copy.deepcopy(model), CLASSES, adapter=ADAPTER, vtm=VTM).train()
    torch.manual_seed(2)
    output = module(images, targets)
    torch.manual_seed(2)
    x, found = sources(model, images)
    memory = []
    for tokens, saliency in found:
        places = saliency.topk(KAPPA).indices
        memory.append(tokens.take_along_dim(places[..., None], dim=1))
    logits = model.classified(model.blocks[LAYER].by_hand(x, torch.cat(memory, dim=1))[0])
    torch.testing.assert_close(output.logits, logits, rtol=1e-4, atol=1e-5)
    ours = step(module.model, output.logits, targets)
    theirs = step(model, logits, targets)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if not case.htm])
def test_htm_refuses_a_block_whose_map_it_would_misread(name: str):
    told = refusal(ALL[name], htm=HTM)
    assert "block " in told
    assert "\n" not in told


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if not case.vtm])
def test_vtm_refuses_a_block_that_more_tokens_would_change(name: str):
    told = refusal(ALL[name], vtm=VTM)
    assert "block " in told
    assert "\n" not in told


def test_there_are_eight_blocks_of_each_kind():
    assert WIDTH // Block.heads == TOKENS  # or nothing would coincide
    assert len(CASES) == 5
    assert all(len(cases) >= 8 for cases in CASES.values())


# What a proof leaves behind, and when it is made again


def attached(name: str, **settings: Any) -> TokenMixup:
    return attach(model_of(ALL[name]), CLASSES, adapter=ADAPTER, **settings).train()


@pytest.mark.parametrize("name", ["map: Multihead", "map: Tied", "map: OneHead"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_proof_changes_nothing_of_the_model(name: str, dtype: torch.dtype):
    """Parameters, also those at two places; buffers, modes, generators, gradients."""
    module = attached(name, htm=HTM, vtm={"layer": 1})
    module.to(dtype).model.blocks[1].eval()  # type: ignore[index, union-attr]
    before = copy.deepcopy(module.state_dict())
    parameters = [id(p) for p in module.parameters()]
    modes = [part.training for part in module.modules()]
    state = torch.get_rng_state()
    images, _ = batch_of(ALL[name])
    module._proofs.prove(module.model, module._plans, images.to(dtype))
    assert module._proofs.by_block.keys() == {0, 1, 2}
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in module.modules()] == modes
    assert not any(part._forward_pre_hooks for part in module.modules())
    assert all(p.grad is None for p in module.parameters())
    assert [id(p) for p in module.parameters()] == parameters
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), key


def excite(module: Any) -> None:
    module.model.blocks[LAYER].up = ALL["tokens: ExciteInPlace"].build().up
    module.model.blocks[LAYER].__class__ = ALL["tokens: ExciteInPlace"].build


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
    module = attached("map: Fused", vtm=VTM)
    batch = batch_of(ALL["map: Fused"])
    module(*batch)
    proofs = dict(module._proofs.by_block)
    module(*(x[:3] for x in batch))  # another size
    assert module._proofs.by_block == proofs
    change(module)
    with pytest.raises(ValueError, match=r"block 2.*more tokens change"):
        module(*batch)


class Biased(Block):
    """Gets a bias for its own tokens, or one that it could not extend to a memory."""

    def forward(self, x: Tensor, bias: Any = None) -> Tensor:
        self.bias = bias
        return super().forward(x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = self.bias[0][:, : k.shape[2]] if isinstance(self.bias, list) else self.bias
        return F.scaled_dot_product_attention(q, k, v, bias)


def test_a_block_that_gets_arguments_of_another_kind_is_proved_again():
    """A mask of all tokens passes; columns that are not those of the tokens do not."""
    case = Case(Biased, htm=True, vtm=True)
    model = model_of(case)
    given = dict[str, Any]()
    model.run = lambda block, x: block(x, **given)  # type: ignore[method-assign]
    module = attach(model, CLASSES, adapter=ADAPTER, vtm=VTM).train()
    module(*batch_of(case))
    given["bias"] = torch.randn(1, 1, TOKENS, TOKENS)
    module(*batch_of(case))
    assert module._proofs.by_block[LAYER].kinds == ((), (("bias", (4, True)),))
    given["bias"] = [torch.randn(TOKENS, 2 * TOKENS)]
    with pytest.raises(ValueError, match="block 2"):
        module(*batch_of(case))


@pytest.mark.parametrize("name", ["map: LinearAttention", "tokens: ExciteInPlace"])
def test_a_compiled_module_is_proved_as_well(name: str):
    module = attached(name, vtm=VTM)
    module.compile(backend="eager")
    with pytest.raises(ValueError, match=r"block [02]"):
        module(*batch_of(ALL[name]))


# What is around a block


class Twice(Block):
    """Attends twice, which no map can stand for."""

    def attention(self, x: Tensor) -> Tensor:
        return super().attention(super().attention(x))


def test_a_detector_that_needs_no_map_takes_any_block():
    case = Case(Twice, htm=False, vtm=False)
    module = attach(model_of(case), CLASSES, adapter=ADAPTER, htm=HTM).train()
    with pytest.raises(ValueError, match="2 attention maps"):
        module(*batch_of(case))
    module.detect = lambda entry: entry.args[0].detach().norm(dim=-1).softmax(dim=-1)
    assert module(*batch_of(case)).mask.any()
    module.detect = lambda entry: entry.watching() and module._configured_detect(entry)
    with pytest.raises(ValueError, match="2 attention maps"):
        module(*batch_of(case))


def test_scripted_blocks_are_refused():
    model: Any = small_vit()
    model.blocks[1] = torch.jit.trace(model.blocks[1], torch.randn(2, 17, model.embed_dim))
    with pytest.raises(ValueError, match=r"block 1 .*TorchScript"):
        attach(model, CLASSES, htm={"layer": 1}).train()(
            torch.zeros(2, 3, 32, 32), torch.eye(CLASSES)[:2]
        )


class Vectorised(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.vmap(F.scaled_dot_product_attention)(q, k, v)


def test_attention_under_vmap_is_refused():
    told = refusal(Case(Vectorised, htm=False, vtm=False), htm=HTM)
    assert told.startswith("block 2 (Vectorised) computes 0 attention maps")
    assert "\n" not in told


class Padded(Block):
    """Half of the samples see nothing, which fused attention answers with 0."""

    def mask(self, samples: int) -> Tensor:
        return (torch.arange(samples) % 2 == 0)[:, None, None, None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = (len(q), 1, q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, self.mask(len(q)).expand(shape))


def test_rows_that_see_no_key_give_no_saliency():
    case = Case(Padded, htm=True, vtm=True)
    module = attach(model_of(case), CLASSES, adapter=ADAPTER, htm=HTM).train()
    output = module(*batch_of(case))
    assert (output.layers[0].saliency[1::2] == 0).all()
    assert output.logits.isfinite().all()


def test_after_any_error_the_model_evaluates_as_before():
    """Also where the model has taken its own `forward` away meanwhile."""
    module, (images, targets) = attached("map: Fused", htm=HTM), batch_of(ALL["map: Fused"])
    module(images, targets)
    expected = module.eval()(images)
    model: Any = module.model

    def break_down(*_: Any) -> None:
        del model.stem.forward
        raise KeyError("in a hook")

    hook = model.blocks[0].register_forward_pre_hook(break_down)
    with pytest.raises(KeyError, match="in a hook"):
        module.train()(images, targets)
    hook.remove()
    assert not any("forward" in vars(part) for part in module.modules())
    assert torch.equal(module.eval()(images), expected)


WRAPPED = """
import functools, torch, torch.nn.functional as F
own = F.scaled_dot_product_attention
F.scaled_dot_product_attention = functools.wraps(own)(lambda *x, **given: own(*x, **given))
from tests.tokenmixup.test_proved_blocks import *
class Late(Block):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)
case = Case(Late, htm=True, vtm=True)
module = attach(model_of(case), CLASSES, adapter=ADAPTER, htm=HTM, vtm={"layer": 1}).train()
assert module(*batch_of(case)).mask.any()
"""


@pytest.mark.slow
def test_attention_that_others_have_wrapped_is_seen():
    subprocess.run([sys.executable, "-c", WRAPPED], check=True)
