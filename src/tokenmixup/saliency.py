"""Saliency of tokens, read off an attention map (Section 3.2).

Letters: b batch, h heads, n tokens with prefix, t spatial tokens.
"""

import torch
from torch import Tensor


@torch.no_grad()
def attention_saliency(
    attn: Tensor, num_prefix_tokens: int = 0, class_token: bool | None = None
) -> Tensor:
    """Saliency of every spatial token, Eq. 3 (`eq:saliencyscore`).

    `attn`: `b h n n`, after softmax, query x key. With a class token only its own query row 0
    counts (the paper is silent, the published code does so; `b h 1 n` suffices then), else the
    mean over all query rows. `class_token=None` means `num_prefix_tokens > 0`. Columns of prefix
    tokens are dropped and the rest is not renormalised.

    Returns `b t` in float32, detached. Raises ValueError for a class token without a prefix.
    """
    if class_token is None:
        class_token = num_prefix_tokens > 0
    if class_token and num_prefix_tokens < 1:
        raise ValueError("class_token=True needs num_prefix_tokens >= 1, got 0")
    rows = attn[:, :, :1] if class_token else attn
    received = rows.mean(dim=(1, 2), dtype=torch.float32)  # b n
    return received[:, num_prefix_tokens:]  # b t
