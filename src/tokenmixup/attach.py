"""Puts HTM and VTM on a stock transformer without editing it.

While a training forward pass runs, hooks on the blocks mix what enters them and one attention
module attends to the memory as well. Outside of it the model is untouched, so evaluation is the
plain model bit for bit. Letters: b batch, n tokens with prefix, t spatial tokens, d width, c
classes, m memory.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokenmixup.attention import attention_map, is_plain_attention
from tokenmixup.contexts import no_grad_uncached, replaced_forward
from tokenmixup.horizontal import HTM, HorizontalMix, mix_horizontal
from tokenmixup.output import Output
from tokenmixup.saliency import attention_saliency
from tokenmixup.scorenet import ScoreNet, difficulty
from tokenmixup.vertical import VTM, select_salient, vertical_attention


def attach(
    model: nn.Module,
    num_classes: int,
    htm: HTM | Mapping[str, Any] | None = None,
    vtm: VTM | Mapping[str, Any] | None = None,
) -> "TokenMixup":
    """Wraps a transformer with `blocks` of pre-norm attention for training with TokenMixup.

    `htm`, `vtm`: settings, as mappings or dataclasses; None leaves the variant out. Raises
    ValueError for a model that cannot be served, a layer that it lacks, or a bad setting.
    """
    try:
        htm = HTM(**htm) if isinstance(htm, Mapping) else htm
        vtm = VTM(**vtm) if isinstance(vtm, Mapping) else vtm
    except TypeError as error:  # an unknown or missing name
        raise ValueError(f"attach: {error}") from error
    return TokenMixup(model, num_classes, htm, vtm)


@dataclass
class _Pass:
    """What one forward pass carries from block to block."""

    targets: Tensor
    score_logits: Tensor | None = None
    difficulty: Tensor | None = None
    is_easy: Tensor | None = None
    mix: HorizontalMix | None = None
    memory: list[Tensor] = field(default_factory=list)


class TokenMixup(nn.Module):
    """`module(images, targets)` -> Output in training, `module(images)` -> logits in evaluation.

    `images`: `b 3 h w`; `targets`: `b c` probabilities as they enter the model.
    """

    def __init__(self, model: nn.Module, num_classes: int, htm: HTM | None, vtm: VTM | None):
        super().__init__()
        self.model, self.htm, self.vtm = model, htm, vtm
        self.num_prefix_tokens: int = getattr(model, "num_prefix_tokens", 0)
        self.class_token = getattr(model, "cls_token", None) is not None
        self.scorenet: ScoreNet | None = None
        for name, settings in (("htm", htm), ("vtm", vtm)):
            if settings is not None:
                _check_blocks(model, name, settings.layer)
        if htm is not None:
            self.scorenet = self._build_scorenet(htm, num_classes)

    def _build_scorenet(self, htm: HTM, num_classes: int) -> ScoreNet:
        pooling = htm.pooling
        if pooling == "auto":
            pools_class_token = getattr(self.model, "global_pool", None) == "token"
            pooling = "class_token" if self.class_token and pools_class_token else "attention"
        if pooling == "class_token" and not self.class_token:
            raise ValueError("htm.pooling='class_token': the model has no class token")
        return ScoreNet(
            embed_dim=cast(int, self.model.embed_dim),
            num_classes=num_classes,
            pooling=pooling,
            num_prefix_tokens=self.num_prefix_tokens,
            stop_gradient=htm.stop_gradient,
        )

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Output | Tensor:
        if not self.training:
            return self.model(images)
        if targets is None:
            raise TypeError("training needs module(images, targets) with targets b c")
        state = _Pass(targets)
        with self._mixing(state):
            logits = self.model(images)
        return self._output(logits, state)

    def mixed_pairs(self, images: Tensor, targets: Tensor) -> HorizontalMix | None:
        """Who would give which tokens to whom in a training pass; None without HTM."""
        state = _Pass(targets)
        with self._mixing(state):
            self.model(images)
        return state.mix

    def no_weight_decay(self) -> set[str]:
        """Parameters that the model exempts from weight decay, as timm's optimisers ask for it."""
        exempt = getattr(self.model, "no_weight_decay", set)
        return {f"model.{name}" for name in exempt()}

    @contextmanager
    def _mixing(self, state: _Pass) -> Iterator[None]:
        """Lets the blocks mix until the context ends."""
        if getattr(self.model, "grad_checkpointing", False):
            raise ValueError("TokenMixup cannot repeat blocks: switch gradient checkpointing off")
        used = [s.layer for s in (self.htm, self.vtm) if s is not None]
        with ExitStack() as stack:
            for index in range(max(used, default=-1) + 1):
                hook = partial(self._enter_block, state, index)
                handle = _blocks(self.model)[index].register_forward_pre_hook(hook)
                stack.callback(handle.remove)
            if self.vtm is not None:
                block = _blocks(self.model)[self.vtm.layer]
                attend = partial(_attend_to_memory, block, state.memory)
                stack.enter_context(replaced_forward(block.attn, attend))
            yield

    def _enter_block(
        self, state: _Pass, index: int, block: nn.Module, inputs: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Changes what enters a block: HTM mixes it, VTM remembers its salient tokens."""
        tokens, *rest = inputs
        is_source = self.vtm is not None and index < self.vtm.layer
        is_mixed = self.htm is not None and index == self.htm.layer
        if is_source or is_mixed:
            saliency = self._saliency(block, tokens)
            if is_mixed:
                tokens, saliency = self._mix(state, tokens, saliency)
            if is_source:
                kappa = cast(VTM, self.vtm).kappa
                salient = select_salient(tokens, saliency, kappa, self.num_prefix_tokens)
                state.memory.append(salient)
        return (tokens, *rest)

    def _mix(self, state: _Pass, tokens: Tensor, saliency: Tensor) -> tuple[Tensor, Tensor]:
        """Algorithm 1 at the input of the HTM block; returns mixed tokens and mixed saliency."""
        htm, scorenet = cast(HTM, self.htm), cast(ScoreNet, self.scorenet)
        state.score_logits = scorenet(tokens)
        state.difficulty = difficulty(state.score_logits, state.targets)
        state.is_easy = state.difficulty.detach() < htm.tau
        mix = mix_horizontal(
            tokens, state.targets, saliency, state.is_easy, htm.rho, self.num_prefix_tokens
        )
        state.mix = mix
        return mix.tokens, torch.where(mix.mask, saliency[mix.donor], saliency)

    def _saliency(self, block: Any, tokens: Tensor) -> Tensor:
        """Saliency of `tokens` by the map that `block` computes on them, `b t`, no gradient."""
        with no_grad_uncached(tokens.device.type):
            attn = attention_map(block.attn, block.norm1(tokens), first_row_only=self.class_token)
            return attention_saliency(attn, self.num_prefix_tokens, self.class_token)

    @staticmethod
    def _output(logits: Tensor, state: _Pass) -> Output:
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
        return Output(logits, state.mix.targets, state.score_logits, score_loss, stats)


def _blocks(model: Any) -> Any:
    return model.blocks


def _check_blocks(model: Any, name: str, layer: int) -> None:
    """Raises ValueError unless block `layer` and those before it can be served."""
    kind = type(model).__name__
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, (nn.Sequential, nn.ModuleList)):
        raise ValueError(f"TokenMixup cannot serve {kind}: it has no plain sequence of blocks")
    if not 0 <= layer < len(blocks):
        raise ValueError(f"{name}.layer={layer}: {kind} has blocks 0..{len(blocks) - 1}")
    if not isinstance(getattr(model, "patch_drop", None), nn.Identity | None):
        raise ValueError(f"TokenMixup cannot serve {kind} with patch dropout: tokens need a place")
    for index, block in enumerate(blocks[: layer + 1]):
        attn = getattr(block, "attn", None)
        if not (is_plain_attention(attn) and _is_pre_norm(block)):
            raise ValueError(
                f"TokenMixup cannot serve {kind}: block {index} is {type(block).__name__} with "
                f"{type(attn).__name__}, not plain pre-norm self-attention with a fused qkv"
            )


def _is_pre_norm(block: Any) -> bool:
    """Whether attention sees `norm1` of the tokens: timm's Block, or one that declares it."""
    is_timms = (type(block).__module__, type(block).__name__) == (
        "timm.models.vision_transformer",
        "Block",
    )
    return is_timms or getattr(block, "attends_to_norm1", False)


def _attend_to_memory(
    block: Any,
    memory: list[Tensor],
    tokens: Tensor,
    attn_mask: None = None,
    is_causal: bool = False,
) -> Tensor:
    """Stands in for the VTM block's attention; `tokens` are layer-normed already."""
    assert attn_mask is None and not is_causal, "masks over tokens are not defined for memory"
    return vertical_attention(block.attn, tokens, block.norm1(torch.cat(memory, dim=1)))
