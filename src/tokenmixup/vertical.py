"""Vertical TokenMixup: salient tokens of earlier blocks become keys and values (Section 3.4).

Letters: b batch, h heads, n tokens with prefix, t spatial tokens, m memory, d width, e head width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tokenmixup.attention import attend, project


@dataclass(frozen=True, kw_only=True)
class VTM:
    """Settings of Vertical TokenMixup.

    `layer`: block, counted from 0, that attends to the memory; it has `layer` sources, so
    `layer >= 1`. `kappa`: tokens that each source block adds to the memory.
    """

    layer: int
    kappa: int = 3

    def __post_init__(self) -> None:
        if type(self.layer) is not int or self.layer < 1:
            raise ValueError(f"vtm.layer={self.layer!r}: must be a block's index, 1 or more")
        if type(self.kappa) is not int or self.kappa < 1:
            raise ValueError(f"vtm.kappa={self.kappa!r}: must be a whole number, 1 or more")


def select_salient(
    tokens: Tensor, saliency: Tensor, kappa: int, num_prefix_tokens: int = 0
) -> Tensor:
    """The kappa most salient spatial tokens: `b n d`, `b t` -> `b kappa d`, gradient kept.

    Prefix tokens are never selected. Raises ValueError if kappa > t.
    """
    if kappa > saliency.shape[1]:
        raise ValueError(f"vtm.kappa={kappa}: there are only {saliency.shape[1]} spatial tokens")
    index = saliency.topk(kappa, dim=1).indices + num_prefix_tokens  # b kappa
    return torch.take_along_dim(tokens, index[..., None], dim=1)


def vertical_attention(attn: nn.Module, tokens: Tensor, memory: Tensor) -> Tensor:
    """Z = Softmax(X1 Wq (X2 Wk)^T) X2 Wv with X1 = tokens, X2 = tokens and memory (Eq. 13).

    `tokens`: `b n d`, `memory`: `b m d`, both layer-normed. Returns `b n d`, projected and dropped
    out as `attn` itself would.
    """
    (q,) = project(attn, tokens, "q")  # b h n e
    k, v = project(attn, torch.cat([tokens, memory], dim=1), "kv")  # b h n+m e
    return attend(attn, tokens, q, k, v)
