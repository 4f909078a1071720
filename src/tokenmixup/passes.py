"""One training forward pass: what it carries, what stands in for attention, what it returns.

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
    """What HTM has found at one layer."""

    layer: int
    score_logits: Tensor  # b c, of its ScoreNet
    difficulty: Tensor  # b, by the targets before mixing
    is_easy: Tensor  # b bool
    mask: Tensor  # b t bool, the replaced tokens
    gain: Tensor  # b t, saliency that each of them gains, else 0


class Output(NamedTuple):
    """What a training forward pass returns; but for the first two None or empty without HTM.

    Rows are those of the images, except that `order=published` puts `logits` and `targets`, as the
    published code does, into another order: easy samples first.
    """

    logits: Tensor  # b c
    targets: Tensor  # b c, after mixing
    score_loss: Tensor | None = None  # scalar: the mean difficulty, summed over the layers
    is_easy: Tensor | None = None  # b bool, at any layer
    mask: Tensor | None = None  # b t bool, tokens that any layer has replaced
    gain: Tensor | None = None  # b t, saliency that they gain in all layers together
    layers: tuple[LayerMix, ...] = ()

    @property
    def score_logits(self) -> Tensor | None:
        """Of the first layer's ScoreNet, `b c`."""
        return self.layers[0].score_logits if self.layers else None

    @property
    def stats(self) -> dict[str, Tensor]:
        """Scalars, computed when they are asked for.

        `mixed_samples`: easy samples; `mixed_tokens`: tokens replaced per easy sample; with HTM
        also `difficulty`: the mean in nats; `gain_max`, `gain_mean`: by how much the donors' tokens
        are more salient than those they replace. With several layers these are of all together, and
        each layer's follow as `mixed_samples/1`.
        """
        if self.is_easy is None or self.mask is None or self.gain is None:
            zero = self.logits.new_zeros((), dtype=torch.float32)
            return {"mixed_samples": zero, "mixed_tokens": zero}
        difficulty = torch.stack([mix.difficulty.detach() for mix in self.layers])
        found = _stats(self.is_easy, self.mask, self.gain, difficulty)
        for mix in self.layers if len(self.layers) > 1 else ():
            of_layer = _stats(mix.is_easy, mix.mask, mix.gain, mix.difficulty.detach())
            found |= {f"{name}/{mix.layer}": value for name, value in of_layer.items()}
        return found


def _stats(is_easy: Tensor, mask: Tensor, gain: Tensor, difficulty: Tensor) -> dict[str, Tensor]:
    mixed_samples, replaced = (x.sum(dtype=torch.float32) for x in (is_easy, mask))
    return {
        "mixed_samples": mixed_samples,
        "mixed_tokens": replaced / mixed_samples.clamp(min=1),
        "difficulty": difficulty.mean(),
        "gain_max": gain.amax(),
        "gain_mean": gain.sum() / replaced.clamp(min=1),
    }


def training_loss(output: Output, score_loss_weight: float) -> Tensor:
    """CE(logits, mixed targets) + lambda x ScoreNet's loss, float32.

    The paper trains both together (Section 3.1) but prints no lambda; it is the published code's.
    """
    loss = F.cross_entropy(output.logits.float(), output.targets.float())
    if output.score_loss is None:
        return loss
    return loss.add(output.score_loss, alpha=score_loss_weight)


@dataclass
class ForwardState:
    """The state of one training forward pass."""

    targets: Tensor  # b c, as mixed so far
    view: Any  # the model by the names that this library reads, see `adapters.py`
    pixels: Tensor | None = None  # b h w, the gradient of the input
    manifold: ManifoldMix | None = None
    num_patches: int | None = None  # by the patch embedding
    grid: tuple[int, int] | None = None  # rows and columns of patches
    scores: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # b c, b; of each HTM layer
    mixes: dict[int, HorizontalMix] = field(default_factory=dict)  # by layer
    memories: dict[int, Memory] = field(default_factory=dict)  # by the layer that attends to it
    entry: BlockInput | None = None  # of the last block that is watched

    def note_patches(self, embedding: Any, args: tuple[Any, ...], out: Any) -> None:
        """Reads number and grid of the patches off their embedding: `b t d` or `b rows columns d`.

        It is a forward hook.
        """
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
        """The difficulty of each sample by ScoreNet, `b`, whose loss is its mean."""
        logits = scorenet(tokens, num_prefix_tokens)
        self.scores.append((logits, difficulty(logits, targets)))
        return self.scores[-1][1]

    def remember(self, entry: BlockInput, saliency: Tensor) -> None:
        """Keeps the salient tokens that enter a source, `b t`, for every later layer of VTM."""
        for layer, memory in self.memories.items():
            if layer > entry.index:
                memory.remember(entry.tokens, saliency, entry.num_prefix_tokens)

    def output(self, logits: Any) -> Output:
        """The output of the pass; ValueError if the model returned no logits `b c`."""
        found = [*logits.shape] if isinstance(logits, Tensor) else type(logits).__name__
        if found != (asked := [*self.targets.shape]):
            raise ValueError(f"the model returned {found}, not one tensor of logits {asked}")
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
        )


# Replacements of a block's attention during a training pass. `tokens`: layer-normed, `b n d`;
# `given`: the block's other arguments.
StandIn = Callable[..., Tensor]


def attend_as_projected(state: ForwardState, block: Any, tokens: Tensor, **given: Any) -> Tensor:
    """At HTM's block: the same attention, from the projections that the saliency already needed."""
    entry = _entry_of(block, state)
    where = positions(block.attn, tokens.shape[1], given)
    q, k, v = project(block.attn, tokens, where.rope, entry.projected)
    return attend(block.attn, tokens, q, k, v, where.bias)


def attend_and_remember(state: ForwardState, block: Any, tokens: Tensor, **given: Any) -> Tensor:
    """At a source of VTM: the same attention, whose saliency selects tokens for the memory.

    The saliency is taken from the attention map if one is computed anyway. Where there is a bias it
    is computed anew: the bias may have dropout, which the saliency must not have.
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
    where = where.of_memory(memory.places)
    own = [] if entry.projected else [entry.tokens]
    context = block.norm1(torch.cat([*own, *memory.tokens], dim=1))
    return vertical_attention(block.attn, tokens, context, where, entry.projected)


def _entry_of(block: Any, state: ForwardState) -> BlockInput:
    entry = state.entry
    assert entry is not None and entry.blocks[entry.index] is block, "no hook on this block"
    return entry
