"""One training forward pass: its state, the stand-ins for attention, and its output.

Letters: b batch, n tokens with prefix, d width, c classes, h w image.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmixup.attention import attend, composed_map, positions, project
from tokenmixup.detectors import BlockInput
from tokenmixup.horizontal import HorizontalMix
from tokenmixup.manifold import ManifoldMix
from tokenmixup.saliency import attention_saliency
from tokenmixup.scorenet import difficulty
from tokenmixup.vertical import Memory, vertical_attention


class LayerMix(NamedTuple):
    """Results of HTM at one layer."""

    layer: int
    score_logits: Tensor  # b c, of the layer's ScoreNet
    difficulty: Tensor  # b, with the targets before mixing
    is_easy: Tensor  # b bool
    mask: Tensor  # b t bool, the replaced tokens
    gain: Tensor  # b t, gain in saliency of each replaced token, else 0


class Output(NamedTuple):
    """Output of a training forward pass. Without HTM all but the first two have their defaults.

    Rows are in the order of the images. With `order=published`, `logits` and `targets` are in the
    published code's order, easy samples first.
    """

    logits: Tensor  # b c
    targets: Tensor  # b c, after mixing
    score_loss: Tensor | None = None  # scalar: the mean difficulty, summed over the layers
    is_easy: Tensor | None = None  # b bool, at any layer
    mask: Tensor | None = None  # b t bool, tokens replaced at any layer
    gain: Tensor | None = None  # b t, their gain in saliency, summed over the layers
    layers: tuple[LayerMix, ...] = ()
    score_loss_weight: float = 0.0  # the setting of HTM

    @property
    def stats(self) -> dict[str, Tensor]:
        """Scalars, computed on access.

        `mixed_samples`: number of easy samples; `mixed_tokens`: replaced tokens per easy sample;
        with HTM also `difficulty`: mean in nats; `gain_max`, `gain_mean`: gain in saliency of the
        replaced tokens. With several layers these are over all of them together; the values of each
        layer follow under names such as `mixed_samples/1`.
        """
        if self.is_easy is None or self.mask is None or self.gain is None:
            zero = self.logits.new_zeros((), dtype=torch.float32)
            return {"mixed_samples": zero, "mixed_tokens": zero}
        difficulty = torch.stack([mix.difficulty.detach() for mix in self.layers])
        stats = _stats(self.is_easy, self.mask, self.gain, difficulty)
        for mix in self.layers if len(self.layers) > 1 else ():
            of_layer = _stats(mix.is_easy, mix.mask, mix.gain, mix.difficulty.detach())
            stats |= {f"{name}/{mix.layer}": value for name, value in of_layer.items()}
        return stats


def _stats(is_easy: Tensor, mask: Tensor, gain: Tensor, difficulty: Tensor) -> dict[str, Tensor]:
    mixed_samples, replaced = (x.sum(dtype=torch.float32) for x in (is_easy, mask))
    return {
        "mixed_samples": mixed_samples,
        "mixed_tokens": replaced / mixed_samples.clamp(min=1),
        "difficulty": difficulty.mean(),
        "gain_max": gain.amax(),
        "gain_mean": gain.sum() / replaced.clamp(min=1),
    }


def training_loss(output: Output, score_loss_weight: float | None = None) -> Tensor:
    """Returns cross-entropy(logits, mixed targets) + lambda x ScoreNet's loss, at least in float32.

    `score_loss_weight`: lambda, by default `HTM.score_loss_weight`, whose default is the published
    code's. The paper trains both jointly (Section 3.1) without giving lambda.
    """
    weight = output.score_loss_weight if score_loss_weight is None else score_loss_weight
    dtype = torch.promote_types(output.logits.dtype, torch.float32)
    loss = F.cross_entropy(output.logits.to(dtype), output.targets.to(dtype))
    if output.score_loss is None:
        return loss
    return loss.add(output.score_loss, alpha=weight)


@dataclass
class ForwardState:
    """The state of one training forward pass."""

    targets: Tensor  # b c, as mixed so far
    view: Any  # the model, or its view with timm's names, see `adapters.py`
    pixels: Tensor | None = None  # b h w, magnitude of the input gradient
    manifold: ManifoldMix | None = None
    num_patches: int | None = None  # of the patch embedding's output
    grid: tuple[int, int] | None = None  # rows and columns of patches
    scores: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # b c, b; per HTM layer
    mixes: dict[int, HorizontalMix] = field(default_factory=dict)  # by layer
    memories: dict[int, Memory] = field(default_factory=dict)  # by the layer that attends to it
    entry: BlockInput | None = None  # of the hooked block that ran last

    def note_patches(self, embedding: Any, args: tuple[Any, ...], out: Any) -> None:
        """Forward hook of the patch embedding, `b t d` or `b rows columns d`: keeps its grid."""
        if not isinstance(out, Tensor) or out.ndim not in (3, 4):
            return
        self.num_patches = out.shape[1:-1].numel()
        if out.ndim == 4:
            self.grid = (out.shape[1], out.shape[2])
        elif hasattr(embedding, "dynamic_feat_size"):
            rows, columns = embedding.dynamic_feat_size(tuple(args[0].shape[-2:]))
            self.grid = (rows, columns) if rows * columns == self.num_patches else None

    def measure_difficulty(
        self, scorenet: Any, num_prefix_tokens: int, tokens: Tensor, targets: Tensor
    ) -> Tensor:
        """Returns the difficulty of each sample by ScoreNet, `b`; its mean is ScoreNet's loss."""
        logits = scorenet(tokens, num_prefix_tokens)
        self.scores.append((logits, difficulty(logits, targets)))
        return self.scores[-1][1]

    def remember(self, entry: BlockInput, saliency: Tensor) -> None:
        """Stores the most salient input tokens of a source for every later layer of VTM."""
        for layer, memory in self.memories.items():
            if layer > entry.index:
                memory.remember(entry.tokens, saliency, entry.num_prefix_tokens)

    def output(self, logits: Any, score_loss_weight: float = 0.0) -> Output:
        """Returns the output of the pass. Raises ValueError if the logits are not `b c`."""
        shape = [*logits.shape] if isinstance(logits, Tensor) else type(logits).__name__
        if shape != (expected := [*self.targets.shape]):
            raise ValueError(f"the model returned {shape}, not one tensor of logits {expected}")
        if not self.mixes:
            return Output(logits, self.targets)
        layers = tuple(
            LayerMix(layer, *score, mix.is_easy, mix.mask, mix.gain)
            for score, (layer, mix) in zip(self.scores, self.mixes.items(), strict=True)
        )
        return Output(
            logits,
            self.targets,
            reduce(torch.add, [mix.difficulty.mean() for mix in layers]),
            reduce(torch.logical_or, [mix.is_easy for mix in layers]),
            reduce(torch.logical_or, [mix.mask for mix in layers]),
            reduce(torch.add, [mix.gain for mix in layers]),
            layers,
            score_loss_weight,
        )


# Stand-ins for a block's attention in a training pass. `tokens`: layer-normed, `b n d`; `given`:
# further arguments of the attention.
StandIn = Callable[..., Tensor]


def attend_as_projected(state: ForwardState, block: Any, tokens: Tensor, **given: Any) -> Tensor:
    """At HTM's block: ordinary attention, reusing the projections computed for the saliency."""
    entry = _entry_of(block, state)
    where = positions(block.attn, tokens.shape[1], given)
    q, k, v = project(block.attn, tokens, where.rope, entry.projected)
    return attend(block.attn, tokens, q, k, v, where.bias)


def attend_and_remember(state: ForwardState, block: Any, tokens: Tensor, **given: Any) -> Tensor:
    """At a source of VTM: ordinary attention, whose saliency selects tokens for the memory.

    If the attention computes a map, the saliency is read off it; but not with a bias, which may
    contain dropout.
    """
    entry = _entry_of(block, state)
    where = positions(block.attn, tokens.shape[1], given)
    q, k, v = project(block.attn, tokens, where.rope)
    weights = composed_map(block.attn, q, k, where.bias)
    if weights is None or where.bias is not None:
        saliency = entry.saliency_by(q, k)
    else:
        saliency = attention_saliency(weights, entry.num_prefix_tokens, entry.class_token)
    state.remember(entry, saliency)
    return attend(block.attn, tokens, q, k, v, where.bias, weights)


def attend_to_memory(state: ForwardState, block: Any, tokens: Tensor, **given: Any) -> Tensor:
    """At VTM's block: attention to the tokens and to the memory (Eq. 13)."""
    entry = _entry_of(block, state)
    memory = state.memories[entry.index]
    where = positions(block.attn, tokens.shape[1], given)
    where = where.of_memory(memory.indices)
    own = [] if entry.projected else [entry.tokens]
    context = block.norm1(torch.cat([*own, *memory.tokens], dim=1))
    return vertical_attention(block.attn, tokens, context, where, entry.projected)


def _entry_of(block: Any, state: ForwardState) -> BlockInput:
    entry = state.entry
    assert entry is not None and entry.blocks[entry.index] is block, "this block has no hook"
    return entry
