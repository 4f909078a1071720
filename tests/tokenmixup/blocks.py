"""Small blocks, half of which break what watching assumes, and what they compute by hand.

`by_hand` is Eq. 13 in plain matrix products: the memory is keys and values, and nothing else.
Letters: b batch, h heads, n tokens, m memory, d width, e head width.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 64
HEADS = 4
TOKENS = WIDTH // HEADS  # as many as a head is wide: what has one shape may be the other
SDPA = F.scaled_dot_product_attention


class Block(nn.Module):
    """Attention and MLP, as timm has them; the blocks below differ in one thing each."""

    heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        return self.merged(self.attend(q, k, v))

    def projected(self, x: Tensor) -> Tensor:
        """Queries, keys and values, `3 b h n e`."""
        return by_head(self.qkv(x), self.heads)

    def merged(self, x: Tensor) -> Tensor:
        """`b h n e` -> `b n d`."""
        return self.proj(x.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(q, k, v)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def tokens(self, out: Any) -> Tensor:
        """What a model takes from what the block returns."""
        return out

    def by_hand(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Returns tokens `b n d` and the map of the own tokens over these, `b h n n`."""
        x, attn = self.attended_by_hand(x, memory)
        return x + self.mlp(self.norm2(x)), attn

    def attended_by_hand(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The memory draws first."""
        n = x.shape[1]
        if memory.shape[1]:
            _, memory_k, memory_v = self.projected(self.norm1(memory))
        q, k, v = self.projected(self.norm1(x))
        if memory.shape[1]:
            k = torch.cat([k, memory_k], dim=2)
            v = torch.cat([v, memory_v], dim=2)
        attn = exponential(self.scores(q, k))
        x = x + self.merged(self.dropped(attn) @ v)
        return x, attn[..., :n]

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        width = q.shape[-1]
        return q @ k.mT / math.sqrt(width)

    def dropped(self, attn: Tensor) -> Tensor:
        return attn


def by_head(x: Tensor, heads: int) -> Tensor:
    """`b n (3 h e)` -> `3 b h n e`."""
    return x.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)


def exponential(scores: Tensor) -> Tensor:
    """A softmax that nobody sees."""
    powers = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    return powers / powers.sum(dim=-1, keepdim=True)


class Case(NamedTuple):
    """A block, and for HTM and VTM whether it is right, or else refused in one line."""

    build: Callable[[], Block]
    htm: bool
    vtm: bool
    samples: int = 4


CASES: dict[str, Case] = {}


def case(row: str, htm: bool = True, vtm: bool = True, samples: int = 4) -> Any:
    def enter(kind: Any) -> Any:
        CASES[f"{row}: {kind.__name__}"] = Case(kind, htm, vtm, samples)
        return kind

    return enter


# 1. What has the shape of a map is the map, batch first


@case("map")
class Fused(Block):
    pass


@case("map", vtm=False)
class Softmax(Block):
    softmax: Any = staticmethod(torch.softmax)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.softmax(self.scores(q, k), dim=3) @ v


@case("map")
class GroupsFused(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(*(x.unflatten(1, (2, 2)) for x in (q, k, v))).flatten(1, 2)


@case("map", htm=False, vtm=False)
class ExpertsAsTokens(Block):
    """Two routers, over as many experts as there are tokens."""

    def attention(self, x: Tensor) -> Tensor:
        return super().attention(x) + self.routed(x)

    def routed(self, x: Tensor) -> Tensor:
        return self.down(F.pad(self.up(x)[..., :TOKENS].softmax(-1), (0, WIDTH - TOKENS)))

    def forward(self, x: Tensor) -> Any:
        x = x + self.routed(self.norm1(x))
        x = x + self.attention(self.norm1(x))
        return x + self.routed(x)


@case("map")
class OneHead(Block):
    heads = 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return SDPA(q[:, 0], k[:, 0], v[:, 0])[:, None]


@case("map")
class Multihead(Block):
    """torch's own attention, batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.qkv = nn.Linear(1, 1)
        self.proj = self.own.out_proj

    def attention(self, x: Tensor) -> Tensor:
        out, _ = self.own(x, x, x, need_weights=False)
        return out

    def projected(self, x: Tensor) -> Tensor:
        both = F.linear(x, self.own.in_proj_weight, self.own.in_proj_bias)
        return by_head(both, HEADS)


@case("map", htm=False, vtm=False)
class LinearAttention(Block):
    """Queries that are normalised over their width."""

    heads = 2

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed = k.softmax(dim=-2).mT @ v
        return q.softmax(dim=-1) @ mixed


# 2. Keys and values of a token do not depend on the others; all else may (VTM)


@case("tokens")
class ExciteInPlace(Block):
    """Squeeze and excite, with a residual sum in place."""

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.norm1(x))
        attended += x
        return attended + self.mlp(self.norm2(attended))

    def mlp(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=1, keepdim=True)
        return x * self.up(mean).sigmoid()


@case("tokens", vtm=False)
class MeanSubtracted(Block):
    def projected(self, x: Tensor) -> Tensor:
        return super().projected(x - x.mean(dim=1, keepdim=True))


@case("tokens", vtm=False)
class Rotary(Block):
    """Positions that the block makes from the number of its tokens."""

    def projected(self, x: Tensor) -> Tensor:
        q, k, v = super().projected(x)
        places = torch.arange(x.shape[1])
        lengths = 2.0 ** torch.arange(q.shape[-1] // 2)
        angle = places[:, None] / lengths
        return torch.stack([rotated(q, angle), rotated(k, angle), v])


def rotated(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    cos = angle.cos()
    sin = angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


# 3. A block's own tokens draw as without a memory (VTM)


class Random(Block):
    """HTM's first run draws as well, so that by hand it would draw other numbers."""

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, self.training)


@case("dropout")
class OfFusedAttention(Random):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.training:
            return SDPA(q, k, v)
        return SDPA(q, k, v, dropout_p=0.3)

    def dropped(self, attn: Tensor) -> Tensor:
        return self.drop(attn)


class LowRank(nn.Module):
    """LoRA, with dropout in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, 3 * WIDTH, bias=False)
        nn.init.normal_(self.up.weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        low = self.down(F.dropout(x, 0.5, self.training))
        return self.base(x) + self.up(low)


@case("dropout")
class LoRA(Random):
    """What the memory draws moves no number of the MLP's."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = LowRank()

    def mlp(self, x: Tensor) -> Tensor:
        return self.drop(super().mlp(x))


# 4. The first output is the residual stream


class Several(Block):
    def tokens(self, out: Any) -> Tensor:
        return out[0]


@case("output")
class WithWeights(Several):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.new_ones(len(x), HEADS, 1)


# 5. Nobody catches what ends the first run
