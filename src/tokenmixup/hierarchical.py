"""Saliency of the blocks of hierarchical models, by their own attention.

Eq. 3 with a map over windows is the mean over the queries of a token's window, divided by the
number of windows; with fewer keys than queries, that of the keys' grid, resized to the tokens. Both
sum to 1. Nothing of timm is imported: a block brings what it consists of.
Letters: b batch, w windows, h heads, n tokens of a window, t tokens, d width, e head width.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from tokenmixup.contexts import evaluating, without_autocast

LARGEST_LOGIT = math.log(100)  # of Swin-V2's cosine attention
Terms = tuple[Tensor, Tensor, Tensor]  # scaled queries and keys `... h n e`, bias `h n n`


def swin(block: Any, x: Tensor) -> Tensor:
    """Saliency of a block of Swin (Liu et al., 2021): `b y x d` -> `b t`."""
    return _by_windows(block, block.norm1(x), _swin_terms)


def swin_v2(block: Any, x: Tensor) -> Tensor:
    """Saliency of a block of Swin-V2 (Liu et al., 2022), which norms afterwards: `b y x d`."""
    return _by_windows(block, x, _swin_v2_terms)


def pvt_v2(block: Any, x: Tensor, size: tuple[int, int]) -> Tensor:
    """Saliency of a block of PVT-v2 (Wang et al., 2022): `b t d` and its grid -> `b t`."""
    attn, x = block.attn, block.norm1(x)
    q, grid = _heads(attn.q(x), attn.num_heads), torch.Size(size)
    if attn.sr is not None:
        x = x.mT.unflatten(2, grid)  # b d y x
        x = attn.sr(x if attn.pool is None else attn.pool(x))
        grid = x.shape[2:]
        x = attn.norm(x.flatten(2).mT)
        x = x if attn.act is None else attn.act(x)
    k = _heads(attn.kv(x).chunk(2, dim=-1)[0], attn.num_heads)
    received = _received(q * attn.scale, k).unflatten(1, grid)[:, None]
    return _to_sum_1(F.interpolate(received, tuple(size), mode="nearest").flatten(1))


def hiera(block: Any, x: Tensor) -> Tensor:
    """Saliency of a block of Hiera (Ryali et al., 2023), in its own order: `b t d` -> `b t`."""
    attn = block.attn
    w = x.shape[1] // (attn.q_stride * attn.window_size) if attn.use_mask_unit_attn else 1
    qkv = attn.qkv(block.norm1(x))
    q, k, _ = rearrange(qkv, "b (n w) (p h e) -> p b w h n e", w=w, p=3, h=attn.heads)
    q = q.unflatten(3, (attn.q_stride, -1)).amax(dim=3)  # pooled where a stage begins
    return _to_sum_1(rearrange(_received(q * attn.scale, k), "b w n -> b (n w)"))


def _by_windows(block: Any, x: Tensor, terms: Callable[[Any, Tensor], Terms]) -> Tensor:
    """Saliency by attention over shifted windows: `b y x d`, as it enters them, -> `b t`.

    Windows that overlap the edge are padded; the share of the padding is lost.
    """
    rows, columns, (i, j), shift = *x.shape[1:3], block.window_size, block.shift_size
    x = torch.roll(x, [-step for step in shift], dims=(1, 2))
    x = F.pad(x, (0, 0, 0, -columns % j, 0, -rows % i))
    down, across = x.shape[1] // i, x.shape[2] // j
    mask = block.get_attn_mask(x) if block.dynamic_mask else block.attn_mask  # w n n
    windows = rearrange(x, "b (y i) (x j) d -> b (y x) (i j) d", i=i, j=j)
    q, k, bias = terms(block.attn, windows)
    received = _received(q, k, bias if mask is None else bias + mask[:, None])  # b w n
    sewn = rearrange(received, "b (y x) (i j) -> b (y i) (x j)", y=down, x=across, i=i)
    return _to_sum_1(torch.roll(sewn[:, :rows, :columns], list(shift), dims=(1, 2)).flatten(1))


def _swin_terms(attn: Any, x: Tensor) -> Terms:
    q, k, _ = (_heads(y, attn.num_heads) for y in attn.qkv(x).chunk(3, dim=-1))
    return q * attn.scale, k, attn._get_rel_pos_bias()


def _swin_v2_terms(attn: Any, x: Tensor) -> Terms:
    qkv = attn.qkv(x)
    if attn.q_bias is not None:
        qkv = qkv + torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])
    q, k, _ = (_heads(y, attn.num_heads) for y in qkv.chunk(3, dim=-1))
    scale = attn.logit_scale.clamp(max=LARGEST_LOGIT).exp()
    with evaluating(attn.cpb_mlp):  # it has dropout
        table = attn.cpb_mlp(attn.relative_coords_table).flatten(0, -2)  # positions h
    index, n = attn.relative_position_index.flatten(), x.shape[-2]
    bias = 16 * table[index].T.unflatten(1, (n, n)).sigmoid()
    return F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1), bias


def _heads(x: Tensor, num_heads: int) -> Tensor:
    return rearrange(x, "... n (h e) -> ... h n e", h=num_heads)


def _received(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """Mean attention over heads and queries: `... h n e`, `... h m e` -> `... m` in float32."""
    with without_autocast(q.device.type):
        scores = q.float() @ k.float().mT
        scores = scores if bias is None else scores + bias.float()
        return scores.softmax(dim=-1).mean(dim=(-3, -2))


def _to_sum_1(saliency: Tensor) -> Tensor:
    return saliency / saliency.sum(dim=1, keepdim=True)
