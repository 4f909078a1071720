"""Vertical TokenMixup: salient tokens of earlier blocks become keys and values (Section 3.4).

Letters: b batch, h heads, n tokens with prefix, t spatial tokens, m memory, d width, e head width,
kappa tokens of each source.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenmixup.attention import Parts, Positions, attend, project, projections


def salient_indices(saliency: Tensor, kappa: int, num_prefix_tokens: int = 0) -> Tensor:
    """Indices in 0..n-1 of the kappa most salient tokens: `b t` -> `b kappa` int64.

    Prefix tokens are never selected. Raises ValueError if kappa > t.
    """
    if kappa > saliency.shape[1]:
        raise ValueError(f"vtm.kappa={kappa}: there are only {saliency.shape[1]} spatial tokens")
    indices = saliency.topk(kappa, dim=1).indices
    return indices + num_prefix_tokens if num_prefix_tokens else indices


def indices_without_prefix(saliency: Tensor, kappa: int, num_prefix_tokens: int = 0) -> Tensor:
    """The published indices: of patches, though they are used for tokens that include the prefix.

    Each is too low by the number of prefix tokens: with a class token it can be that token, and
    never is the last patch.
    """
    return salient_indices(saliency, kappa)


# by `vtm.class_token_offset`: saliency `b t`, kappa, prefix tokens -> `b kappa`
INDICES: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "paper": salient_indices,
    "published": indices_without_prefix,
}


@dataclass
class Memory:
    """Salient tokens of the sources, collected in one forward pass for a layer of VTM."""

    kappa: int
    select: Callable[[Tensor, int, int], Tensor]  # an entry of INDICES
    stop_gradient: bool = False  # whether the sources get no gradient from the memory
    tokens: list[Tensor] = field(default_factory=list)  # b kappa d of each source
    indices: list[Tensor] = field(default_factory=list)  # b kappa, in 0..n-1

    def remember(self, tokens: Tensor, saliency: Tensor, num_prefix_tokens: int) -> None:
        """Stores the most salient of a block's tokens: `b n d`, by their saliency, `b t`."""
        indices = self.select(saliency, self.kappa, num_prefix_tokens)
        tokens = tokens.detach() if self.stop_gradient else tokens
        self.tokens.append(tokens.gather(1, indices[..., None].expand(-1, -1, tokens.shape[2])))
        self.indices.append(indices)


def vertical_attention(
    parts: Parts,
    tokens: Tensor,
    context: Tensor,
    where: Positions | None = None,
    known: Sequence[Tensor] = (),
) -> Tensor:
    """Z = Softmax(X1 Wq (X2 Wk)^T) X2 Wv with X1 = tokens, X2 = context (Eq. 13).

    `tokens`: `b n d`; `context`: `b n+m d`, the tokens followed by the memory; both layer-normed.
    `where`: positional terms of the context. `known`: the projections of `tokens`, if already
    computed; `context` is then the memory alone, `b m d`. Returns `b n d`, after the attention's
    output projection and dropout.
    """
    flat = projections(parts, context)
    if known:
        flat = [torch.cat(both, dim=1) for both in zip(known, flat, strict=True)]
    rope, bias = where or Positions()
    q, k, v = project(parts, context, rope, flat)  # b h n+m e
    return attend(parts, tokens, q[:, :, : tokens.shape[1]], k, v, bias)
