"""The contract of a block is checked once; a block that visibly breaks it is refused in one line.

Letters: b batch, h heads, n tokens, d width, e head width.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from tests.conftest import CLASSES, drawn_batch, gradients_of, refused
from tokenmixup import Adapter, attach, training_loss

WIDTH = 64
HEADS = 4
TOKENS = WIDTH // HEADS  # as many as a head is wide: what has one shape may be the other
HTM: dict[str, Any] = {"htm": {"layer": 2, "tau": float("inf"), "rho": 0.0}}
VTM: dict[str, Any] = {"vtm": {"layer": 2, "kappa": 2}}
BATCH = drawn_batch(4, 16)
ADAPTER = Adapter(blocks="blocks", embed_dim=WIDTH)


class Block(nn.Module):
    """Attention and MLP, as timm has them; the blocks below differ in one thing each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.qkv: nn.Module = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x)).relu()

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        return self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def projected(self, x: Tensor) -> Tensor:
        """Queries, keys and values, `3 b h n e`."""
        return self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class ExpertsAsTokens(Block):
    """A router, over as many experts as there are tokens."""

    def forward(self, x: Tensor) -> Tensor:
        routes = self.mlp(x)[..., :TOKENS].softmax(dim=-1)
        return super().forward(x) + F.pad(routes, (0, WIDTH - TOKENS))


class LinearAttention(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.exp() @ (k.exp().mT @ v)


class Twice(Block):
    def attention(self, x: Tensor) -> Tensor:
        return super().attention(super().attention(x))


class MeanSubtracted(Block):
    def projected(self, x: Tensor) -> Tensor:
        return super().projected(x - x.mean(dim=1, keepdim=True))


class OwnPositions(Block):
    """Keys with positions that the block makes from the number of its tokens."""

    def projected(self, x: Tensor) -> Tensor:
        places = torch.linspace(0, 1, x.shape[1])
        return super().projected(x + places[:, None])


class OfDropout(Block):
    """LoRA with dropout in front of it, and dropout of the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, 4)
        self.up = nn.Linear(4, 3 * WIDTH)
        self.base = self.qkv
        self.qkv = nn.Identity()

    def projected(self, x: Tensor) -> Tensor:
        low = self.down(F.dropout(x, 0.5, self.training))
        return super().projected(self.base(x) + self.up(low))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dropout = 0.3 if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)


class FirstAlone(Block):
    """Every token attends to the first one alone."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        is_first = torch.arange(TOKENS)[None] < 1
        return F.scaled_dot_product_attention(q, k, v, is_first)


class Model(nn.Module):
    """Patches, three blocks, the mean of the tokens."""

    def __init__(self, build: Callable[[], Block]):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.blocks = nn.Sequential(*(build() for _ in range(3)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).mT
        return self.head(self.blocks(x).mean(dim=1))


def attached(build: Callable[[], Block], **settings: Any) -> Any:
    torch.manual_seed(0)
    return attach(Model(build), CLASSES, adapter=ADAPTER, **settings).train()


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (ExpertsAsTokens, HTM),
        (LinearAttention, HTM),
        (Twice, HTM),
        (MeanSubtracted, VTM),
        (OwnPositions, VTM),
    ],
)
def test_a_block_that_would_be_misread_is_refused(build: Any, settings: Any):
    """By HTM for its map, by VTM for its keys and values."""
    module = attached(build, **settings)
    with refused("block 2 "):
        module(*BATCH)


def test_a_block_may_have_dropout_in_front_of_and_in_its_attention():
    module = attached(OfDropout, **HTM, **VTM)
    output = module(*BATCH)
    training_loss(output).backward()
    assert output.mask.any()
    gradients = gradients_of(module)
    assert len(gradients) == len(list(module.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_a_mask_of_booleans_says_which_keys_count():
    output = attached(FirstAlone, **HTM)(*BATCH)
    assert_close(output.layers[0].saliency[:, 0], torch.ones(4))


# The check of VTM's keys and values


def test_the_check_runs_once_and_leaves_nothing():
    """Buffers, modes, generators, gradients and hooks are as they were."""
    runs: list[int] = []
    module = attached(Block, **HTM, vtm={"layer": 1})
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
    module = attached(MeanSubtracted, **VTM)
    module(torch.full_like(images, torch.nan), targets)
    with refused("block 2 .*beside them"):
        module(images, targets)


def test_a_compiled_module_is_checked_as_well():
    module = attached(MeanSubtracted, **VTM)
    module.compile(backend="eager")
    with refused("block 2 .*beside them"):
        module(*BATCH)
