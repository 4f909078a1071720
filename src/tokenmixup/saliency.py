"""Saliency of tokens (Section 3.2) from attention maps or from the input gradient.

Letters: b batch, h heads, n tokens with prefix, t spatial tokens.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def attention_saliency(
    attn: Tensor, num_prefix_tokens: int = 0, class_token: bool | None = None
) -> Tensor:
    """Saliency of every spatial token, Eq. 3 (`eq:saliencyscore`).

    `attn`: `b h n n`, after softmax, query x key. The saliency is the mean over all query rows, as
    in Eq. 3, or with `class_token` the class token's row alone, as in the published code (`b h 1 n`
    suffices then). `class_token=None` means `num_prefix_tokens > 0`. Columns of prefix tokens are
    dropped; the rest is not renormalised.

    Returns `b t` in float32, detached. Raises ValueError for a class token without a prefix.
    """
    return rollout_saliency([attn], num_prefix_tokens, class_token)


@torch.no_grad()
def rollout_saliency(
    maps: Sequence[Tensor], num_prefix_tokens: int = 0, class_token: bool | None = None
) -> Tensor:
    """Saliency by attention rollout over the maps of successive blocks, Eq. 2 (`eq:rollout`) and 3.

    `maps`: each `b h n n` as in attention_saliency, beginning with the block whose input is mixed.
    Heads are averaged before the product, there is no residual term, and later maps multiply from
    the left, since rows are queries. (The paper prints the factors in layer order.) The paper's
    choice, l = 0, is a single map.
    """
    if class_token is None:
        class_token = num_prefix_tokens > 0
    if class_token and num_prefix_tokens < 1:
        raise ValueError("class_token=True needs num_prefix_tokens >= 1, got 0")
    *earlier, last = maps
    rows = last[:, :, :1] if class_token else last
    received = rows.mean(dim=(1, 2), dtype=torch.float32)  # b n
    for attn in reversed(earlier):  # the mean row of A B is the mean row of A times B
        received = torch.einsum("bi,bij->bj", received, attn.mean(dim=1, dtype=torch.float32))
    return received[:, num_prefix_tokens:]  # b t


@torch.enable_grad()
def input_gradient(model: Callable[[Tensor], Tensor], images: Tensor, targets: Tensor) -> Tensor:
    """Norm over channels of the loss gradient at each pixel, `b h w`, as in Co-Mixup (2021).

    The loss is the cross-entropy of `model(images)` against `targets`; `b 3 h w`, `b c`. Parameters
    receive no gradient.
    """
    images = images.detach().clone().requires_grad_()
    with torch.autocast(images.device.type, enabled=False):  # float16 would lose small gradients
        loss = F.cross_entropy(model(images).float(), targets.float(), reduction="sum")
        (gradient,) = torch.autograd.grad(loss, images)
    return gradient.float().square().sum(dim=1).sqrt()


@torch.no_grad()
def gradient_saliency(
    pixels: Tensor, num_tokens: int, grid: tuple[int, int] | None = None
) -> Tensor:
    """Pools `b h w` to the grid of spatial tokens and normalises each sample to sum 1: `b t`.

    `grid`: rows and columns of the tokens, by default of the image's aspect ratio. Raises
    ValueError if the grid does not have `num_tokens` cells.
    """
    height, width = pixels.shape[1:]
    rows = grid[0] if grid else max(1, round((num_tokens * height / width) ** 0.5))
    columns = grid[1] if grid else num_tokens // rows
    if rows * columns != num_tokens:
        raise ValueError(f"{num_tokens} tokens form no grid over an image of {height} x {width}")
    pooled = F.adaptive_avg_pool2d(pixels[:, None], (rows, columns)).flatten(1)
    return pooled / pooled.sum(dim=1, keepdim=True).clamp(min=torch.finfo(pooled.dtype).tiny)
