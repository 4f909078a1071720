"""Vertical TokenMixup: salient tokens of earlier blocks become keys and values (Section 3.4).

Letters: b batch, t spatial tokens, n tokens with prefix, d width, s sources, m memory.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from tokenmixup.settings import VTM


class Source(NamedTuple):
    """The input of a block. HTM and manifold mixup at blocks after it do not mix these tokens."""

    tokens: Tensor  # b n d
    saliency: Tensor  # b t


class Memory(NamedTuple):
    """Tokens of earlier blocks, which become keys and values of a later one (Eq. 13)."""

    tokens: Tensor  # b m d
    indices: Tensor  # b m, in 0..n-1: what masks and rotary positions know a token by


def memory_of(sources: Sequence[Source], vtm: VTM, num_prefix_tokens: int) -> Memory:
    """Returns the kappa most salient tokens of each source, one source after the other."""
    saliency = torch.stack([source.saliency for source in sources], dim=1)  # b s t
    choose = INDICES[vtm.class_token_offset]
    indices = choose(saliency, cast(int, vtm.kappa), num_prefix_tokens)  # b s kappa
    chosen = [
        source.tokens.take_along_dim(of_source[..., None], dim=1)
        for source, of_source in zip(sources, indices.unbind(dim=1), strict=True)
    ]
    tokens = torch.cat(chosen, dim=1)
    if vtm.stop_gradient:
        tokens = tokens.detach()
    return Memory(tokens, indices.flatten(1))


def salient_indices(saliency: Tensor, kappa: int, num_prefix_tokens: int = 0) -> Tensor:
    """Indices in 0..n-1 of the kappa most salient tokens: `b .. t` -> `b .. kappa` int64.

    Prefix tokens are never selected. Raises ValueError if kappa > t.
    """
    t = saliency.shape[-1]
    if kappa > t:
        raise ValueError(f"vtm.kappa={kappa}: there are only {t} spatial tokens")
    patches = saliency.topk(kappa, dim=-1).indices
    if num_prefix_tokens == 0:
        return patches
    return num_prefix_tokens + patches


def indices_without_prefix(saliency: Tensor, kappa: int, num_prefix_tokens: int = 0) -> Tensor:
    """The published indices: of patches, though they are used for tokens that include the prefix.

    Each is too low by the number of prefix tokens: with a class token it can be that token, and
    never is the last patch.
    """
    return salient_indices(saliency, kappa)


# by `vtm.class_token_offset`: saliency `b .. t`, kappa, prefix tokens -> `b .. kappa`
INDICES: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "paper": salient_indices,
    "published": indices_without_prefix,
}
