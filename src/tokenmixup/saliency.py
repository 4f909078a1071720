"""Saliency of tokens (Section 3.2 and Table 3), and the detectors of the tokens of a block.

Letters: b batch, h heads, n tokens with prefix, t spatial tokens; of an image h w.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmixup.attention import AttentionMap
from tokenmixup.block import BlockInput, Detector, run_watched
from tokenmixup.contexts import evaluating, without_autocast
from tokenmixup.rules import rule_of
from tokenmixup.settings import HTM


@torch.no_grad()
def rollout_saliency(
    maps: Sequence[Tensor], num_prefix_tokens: int = 0, class_token: bool | None = None
) -> Tensor:
    """Saliency of every spatial token: Eq. 3 (`eq:saliencyscore`) of a map, Eq. 2 of several.

    `maps`: each `b h n n`, after softmax, query x key, of successive blocks, beginning with the one
    whose input is mixed; the paper's choice is a single one. The saliency is the mean over all
    query rows, as in Eq. 3, or with `class_token` the class token's row alone, as in the published
    code; None means `num_prefix_tokens > 0`. Columns of prefix tokens are dropped; the rest is not
    renormalised. By attention rollout (`eq:rollout`) heads are averaged before the product, there
    is no residual term, and later maps multiply from the left, since rows are queries. (The paper
    prints the factors in layer order.)

    Returns `b t` in float32, detached. Raises ValueError for a class token without a prefix.
    """
    if class_token is None:
        class_token = num_prefix_tokens > 0
    if class_token and num_prefix_tokens < 1:
        raise ValueError("class_token=True needs num_prefix_tokens >= 1, got 0")
    last = maps[-1]
    if class_token:
        last = last[:, :, :1]
    received = last.mean(dim=(1, 2), dtype=torch.float32)  # b n
    with without_autocast(last.device.type):
        for attn in reversed(maps[:-1]):  # the row of the product, which is never formed
            mean = attn.mean(dim=1, dtype=torch.float32)
            received = torch.einsum("bi,bij->bj", received, mean)
    return received[:, num_prefix_tokens:]  # b t


@torch.enable_grad()
def input_gradient(model: Callable[[Tensor], Tensor], images: Tensor, targets: Tensor) -> Tensor:
    """Norm over channels of the loss gradient at each pixel, `b h w`, as in Co-Mixup (2021).

    The loss is the cross-entropy of `model(images)` against `targets`; `b 3 h w`, `b c`. Parameters
    receive no gradient.
    """
    images = images.detach().clone().requires_grad_()
    with without_autocast(images.device.type):  # float16 would lose small gradients
        loss = F.cross_entropy(model(images).float(), targets.float(), reduction="sum")
        (gradient,) = torch.autograd.grad(loss, images)
    return gradient.float().square().sum(dim=1).sqrt()


@torch.no_grad()
def gradient_saliency(
    gradient: Tensor, num_tokens: int, grid: tuple[int, int] | None = None
) -> Tensor:
    """Saliency by the input gradient (Table 3), each sample's with the sum 1: `b h w` -> `b t`.

    `gradient`: of `input_gradient`, averaged over the pixels of each spatial token. `grid`: rows
    and columns of the tokens, by default of the image's aspect ratio. Raises ValueError if the grid
    does not have `num_tokens` cells.
    """
    height, width = gradient.shape[1:]
    grid = grid or square_grid(num_tokens, height, width)
    if grid is None or grid[0] * grid[1] != num_tokens:
        raise ValueError(f"{num_tokens} tokens form no grid over an image of {height} x {width}")
    pooled = F.adaptive_avg_pool2d(gradient[:, None], grid).flatten(1)
    return pooled / pooled.sum(dim=1, keepdim=True).clamp(min=torch.finfo(pooled.dtype).tiny)


def square_grid(num_tokens: int, height: int, width: int) -> tuple[int, int] | None:
    """Returns rows and columns of square patches over an image, None if they do not cover it.

    Patches that end beyond the image, or before its end, are less than one in each direction.
    """
    rows = max(1, round((num_tokens * height / width) ** 0.5))
    columns = num_tokens // rows
    is_square = abs(rows * width - columns * height) < max(height, width)
    if rows * columns == num_tokens and is_square:
        return (rows, columns)
    return None


def by_attention(block_input: BlockInput, class_token: bool | None = None) -> Tensor:
    """Saliency by the block's own attention map (Eq. 3); the block is run as far as that.

    `class_token`: True takes the class token's row of the map, False the mean over all rows, None
    the row if the head reads the class token.
    """
    # Gradients are recorded as in training, since a block may ask for them; the map has none.
    _, watching = run_watched(block_input, ends=True)
    return saliency_of_map(watching.map(), block_input, class_token)


@torch.no_grad()
def saliency_of_map(
    seen: AttentionMap, block_input: BlockInput, class_token: bool | None = None
) -> Tensor:
    """Returns the saliency that the block's own map gives its tokens, `b t`."""
    adapter = block_input.adapter
    if adapter.geometry is not None:
        saliency = adapter.geometry(
            block_input.block, seen, *block_input.args, **block_input.kwargs
        )
        return saliency / saliency.sum(dim=1, keepdim=True)
    if class_token is None:
        class_token = adapter.reads_class_token
    received = seen.received(queries=1 if class_token else None)  # b n
    while received.ndim > 2:  # b g n, of groups of heads
        received = received.mean(dim=1)
    return received[:, adapter.num_prefix_tokens :]


by_mean_attention = partial(by_attention, class_token=False)


def by_gradient(block_input: BlockInput) -> Tensor:
    """Saliency by the gradient of the loss with respect to the image."""
    if block_input.input_gradient is None:  # which is computed before the forward pass
        raise ValueError("htm.detector: one that calls by_gradient must say takes_gradient = True")
    if block_input.grid is None:
        raise ValueError(
            "htm.detector=gradient: the tokens are no grid of square patches, row by row"
        )
    return gradient_saliency(
        block_input.input_gradient, block_input.num_spatial_tokens, block_input.grid
    )


setattr(by_gradient, "takes_gradient", True)
setattr(by_gradient, "capturable", False)


@torch.no_grad()
def by_rollout(steps: int, block_input: BlockInput) -> Tensor:
    """Saliency by attention rollout over `steps` further blocks, without dropout."""
    plan = block_input.plan
    adapter = plan.adapter
    maps = []
    for step in range(steps + 1):
        of_step = replace(plan, name=f"{plan.name} + {step}", blocks=plan.blocks[step:])
        block_input = replace(block_input, plan=of_step)
        with evaluating(block_input.block):
            out, watching = run_watched(block_input)
        maps.append(watching.map().probabilities())
        block_input = block_input.with_tokens(out if isinstance(out, Tensor) else out[0])
    return rollout_saliency(maps, adapter.num_prefix_tokens, adapter.reads_class_token)


def detector_of(htm: HTM) -> Detector:
    """Returns the configured detector."""
    if htm.rollout_steps > 0:
        return partial(by_rollout, htm.rollout_steps)
    detector: Detector = rule_of(htm, "detector")
    return detector


def takes_gradient(detector: Any) -> bool:
    """Whether a detector states that it needs the input gradient, of the unmixed batch."""
    return getattr(detector, "takes_gradient", False)
