"""What one forward pass carries from block to block, and what it returns.

Letters: b batch, n tokens with prefix, d width, c classes, h w image.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenmixup.detectors import BlockInput
from tokenmixup.horizontal import HorizontalMix
from tokenmixup.manifold import ManifoldMix
from tokenmixup.memory import Memory
from tokenmixup.output import Output


@dataclass
class Pass:
    """What is known so far."""

    targets: Tensor  # b c, as mixed so far
    pixels: Tensor | None = None  # b h w, the gradient of the input
    manifold: ManifoldMix | None = None
    num_patches: int | None = None  # by the patch embedding
    grid: tuple[int, int] | None = None  # rows and columns of patches
    score_logits: Tensor | None = None  # b c
    difficulty: Tensor | None = None  # b
    is_easy: Tensor | None = None  # b bool
    mix: HorizontalMix | None = None
    memory: Memory | None = None
    entry: BlockInput | None = None  # of the last block that is watched


def note_patches(state: Pass, embedding: Any, args: tuple[Any, ...], out: Any) -> None:
    """Reads number and grid of the patches off their embedding: `b t d`, or `b rows columns d`."""
    if not isinstance(out, Tensor) or out.ndim not in (3, 4):
        return
    state.num_patches = out.shape[1:-1].numel()
    if out.ndim == 4:
        state.grid = (out.shape[1], out.shape[2])
    elif hasattr(embedding, "dynamic_feat_size"):
        rows, columns = embedding.dynamic_feat_size(tuple(args[0].shape[-2:]))
        state.grid = (rows, columns) if rows * columns == state.num_patches else None


def output_of(logits: Any, state: Pass) -> Output:
    """The output of a pass; ValueError if the model returned no logits `b c`."""
    if not isinstance(logits, Tensor):
        raise ValueError(f"the model returned {type(logits).__name__}, not one tensor of logits")
    if state.mix is None or state.difficulty is None or state.is_easy is None:
        zero = logits.new_zeros((), dtype=torch.float32)
        stats = {"mixed_samples": zero, "mixed_tokens": zero}
        return Output(logits, state.targets, None, None, stats)
    mixed_samples = state.is_easy.sum().float()
    stats = {
        "mixed_samples": mixed_samples,
        "mixed_tokens": state.mix.mask.sum() / mixed_samples.clamp(min=1),
        "difficulty": state.difficulty.detach().mean(),
    }
    score_loss = state.difficulty.mean()
    return Output(logits, state.targets, state.score_logits, score_loss, stats)
