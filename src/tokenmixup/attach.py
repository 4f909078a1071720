"""Puts HTM, VTM and manifold mixup on a stock transformer without editing it.

While a training forward pass runs, hooks on the blocks mix what enters them, and functions stand in
for the attention of those that mix, tell their saliency or attend to the memory. Outside of it the
model is untouched, so evaluation is the plain model bit for bit.

Letters: b batch, n tokens with prefix, t spatial tokens, d width, c classes, m memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from tokenmixup.contexts import evaluating, replaced_forward
from tokenmixup.detectors import BlockInput, detector_of
from tokenmixup.horizontal import HTM, HorizontalMix, take_from_donors
from tokenmixup.manifold import ManifoldMix, ManifoldMixup, draw_manifold_mix
from tokenmixup.memory import Memory
from tokenmixup.output import Output
from tokenmixup.passes import Pass, note_patches, output_of
from tokenmixup.saliency import input_gradient
from tokenmixup.scorenet import ScoreNet, difficulty
from tokenmixup.stand_ins import attend_and_remember, attend_as_projected, attend_to_memory
from tokenmixup.structure import (
    check_layer,
    check_projections,
    check_rollout,
    declared_prefix,
    has_class_token,
    reads_class_token,
    scorenet_pooling,
)
from tokenmixup.variants import rules_of
from tokenmixup.vertical import VTM, places_of

Settings = TypeVar("Settings")
Step = Callable[["TokenMixup", Pass, BlockInput], None]


def attach(
    model: nn.Module,
    num_classes: int,
    htm: HTM | Mapping[str, Any] | None = None,
    vtm: VTM | Mapping[str, Any] | None = None,
    manifold_mixup: ManifoldMixup | Mapping[str, Any] | None = None,
) -> "TokenMixup":
    """Wraps a transformer with `blocks` of pre-norm attention for training with TokenMixup.

    `htm`, `vtm`, `manifold_mixup`: settings, as mappings or dataclasses; None leaves one out.
    Raises ValueError for a model that cannot be served, a layer that it lacks, or a bad setting.
    A training pass with HTM cannot be differentiated twice.
    """
    return TokenMixup(
        model,
        num_classes,
        _settings(HTM, htm),
        _settings(VTM, vtm),
        _settings(ManifoldMixup, manifold_mixup),
    )


def _settings(kind: type[Settings], given: Any) -> Settings | None:
    if given is None or isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f"attach: {given!r} is neither a mapping nor {kind.__name__}")
    try:
        return kind(**given)
    except TypeError as error:  # an unknown or missing name
        raise ValueError(f"attach: {error}") from error


class TokenMixup(nn.Module):
    """`module(images, targets)` -> Output in training, `module(images)` -> logits in evaluation.

    `images`: `b 3 h w`; `targets`: `b c` probabilities as they enter the model. In training raises
    TypeError without targets; ValueError for other images, for gradient checkpointing and for
    DataParallel, whose replicas would share their hooks; FloatingPointError if the saliency is not
    finite.
    """

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        htm: HTM | None,
        vtm: VTM | None,
        manifold_mixup: ManifoldMixup | None = None,
    ):
        super().__init__()
        self.model, self.htm, self.vtm, self.manifold_mixup = model, htm, vtm, manifold_mixup
        self.scorenet: ScoreNet | None = None
        for key, layer in self._layers():
            check_layer(model, key, layer)
        is_offset = vtm is not None and vtm.class_token_offset == "published"
        if is_offset and not has_class_token(model):
            raise ValueError("vtm.class_token_offset='published': there is no class token")
        if htm is not None:
            width, pooling = cast(Any, model).embed_dim, scorenet_pooling(model, htm.pooling)
            like = next(model.parameters())
            scorenet = ScoreNet(width, num_classes, pooling, htm.stop_gradient)
            self.scorenet = scorenet.to(like.device, like.dtype)
            self._rules, self._detect = rules_of(htm), detector_of(htm)
            check_rollout(model, htm.layer, htm.rollout_steps)
        self._reads_class_token = reads_class_token(model)
        self._needs_gradient = htm is not None and htm.detector == "gradient"
        self._steps = self._build_steps()

    def _layers(self) -> Iterator[tuple[str, int]]:
        for key in ("htm", "vtm"):
            if (settings := getattr(self, key)) is not None:
                yield f"{key}.layer", settings.layer
        for layer in self.manifold_mixup.layers if self.manifold_mixup is not None else ():
            yield "manifold_mixup.layers", layer

    def _build_steps(self) -> dict[int, list[Step]]:
        """What happens at the input of which block, in this order; all others are not watched."""
        kind = type(self)  # unbound, so that a copy of the module runs its own parts
        layers: list[tuple[Step, Sequence[int]]] = [
            (kind._mix_manifold, self.manifold_mixup.layers if self.manifold_mixup else ()),
            (kind._mix_horizontally, [self.htm.layer] if self.htm else ()),
            (kind._remember, range(self.vtm.layer) if self.vtm else ()),
        ]
        steps: dict[int, list[Step]] = {index: [] for index in self.replaced_attention()}
        for step, indices in layers:
            for index in indices:
                steps.setdefault(index, []).append(step)
        return steps

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Output | Tensor:
        if not self.training:
            return self.model(images)
        if targets is None:
            raise TypeError("training needs module(images, targets) with targets b c")
        if getattr(self, "_is_replica", False):
            raise ValueError("TokenMixup trains under DistributedDataParallel, not DataParallel")
        state = self._begin(images, targets)
        with self._mixing(state):
            logits = self.model(images)
        assert self.htm is None or state.mix is not None, "block htm.layer did not run"
        return output_of(logits, state)

    @torch.no_grad()
    def mixed_pairs(self, images: Tensor, targets: Tensor) -> HorizontalMix | None:
        """Who would give which tokens to whom in a training pass; None without HTM."""
        state = self._begin(images, targets)
        with self._mixing(state):
            self.model(images)
        return state.mix

    def no_weight_decay(self) -> set[str]:
        """Parameters that the model exempts from weight decay, as timm's optimisers ask for it."""
        exempt = getattr(self.model, "no_weight_decay", set)
        return {f"model.{name}" for name in exempt()}

    def _begin(self, images: Tensor, targets: Tensor) -> Pass:
        """What is known before the pass: the gradient of the input, the draws of manifold mixup."""
        if not isinstance(images, Tensor) or images.ndim != 4:
            raise ValueError("TokenMixup mixes images of one size, as a tensor b 3 h w")
        state = Pass(targets)
        if self._needs_gradient:
            with evaluating(self.model):
                state.pixels = input_gradient(self.model, images, targets)
        if self.manifold_mixup is not None:
            state.manifold = draw_manifold_mix(self.manifold_mixup, images)
        if self.vtm is not None:
            state.memory = Memory(self.vtm.kappa, places_of(self.vtm))
        return state

    @contextmanager
    def _mixing(self, state: Pass) -> Iterator[None]:
        """Lets the blocks mix until the context ends."""
        model: Any = self.model
        if getattr(model, "grad_checkpointing", False):
            raise ValueError("TokenMixup cannot repeat blocks: switch gradient checkpointing off")
        with ExitStack() as stack:
            if self._steps and isinstance(embed := getattr(model, "patch_embed", None), nn.Module):
                handle = embed.register_forward_hook(partial(note_patches, state))
                stack.callback(handle.remove)
            for index in self._steps:
                hook = partial(self._enter_block, state, index)
                handle = model.blocks[index].register_forward_pre_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            replaced = self.replaced_attention()
            for index in {*replaced, *self._rolled_out()}:
                check_projections(index, model.blocks[index].attn)
            for index, stand_in in replaced.items():
                block = model.blocks[index]
                forward = partial(stand_in, state, block)
                stack.enter_context(replaced_forward(block.attn, forward))
            yield

    def _rolled_out(self) -> range:
        """Blocks whose maps tell the saliency by rollout."""
        steps = 0 if self.htm is None else self.htm.rollout_steps
        return range(self.htm.layer, self.htm.layer + steps + 1) if self.htm and steps else range(0)

    def replaced_attention(self) -> dict[int, Callable[..., Tensor]]:
        """Blocks whose attention is replaced in a training pass, and what stands in for it."""
        sources = range(self.vtm.layer) if self.vtm is not None else range(0)
        replaced: dict[int, Callable[..., Tensor]] = dict.fromkeys(sources, attend_and_remember)
        if self.htm is not None and (
            self.htm.layer in sources or self._detect is BlockInput.own_saliency
        ):
            replaced[self.htm.layer] = attend_as_projected  # HTM asks for the saliency
        if self.vtm is not None:
            replaced[self.vtm.layer] = attend_to_memory
        return replaced

    def _enter_block(
        self, state: Pass, index: int, block: nn.Module, args: tuple[Any, ...], given: Any
    ) -> tuple[tuple[Tensor], dict[str, Any]]:
        """Changes what enters a block."""
        (tokens,) = args
        prefix = declared_prefix(self.model)
        if state.num_patches is not None:
            prefix = tokens.shape[1] - state.num_patches
        if not 0 <= prefix < tokens.shape[1]:
            raise ValueError(
                f"block {index} gets {tokens.shape[1]} tokens of {state.num_patches} patches: "
                "TokenMixup cannot tell which is which"
            )
        by_class_token = prefix > 0 and self._reads_class_token
        blocks = cast(Any, self.model).blocks
        entry = BlockInput(
            blocks, index, tokens, given, prefix, by_class_token, state.pixels, state.grid
        )
        state.entry = entry
        for step in self._steps[index]:
            step(self, state, entry)
        return (entry.tokens,), given

    def _mix_manifold(self, state: Pass, entry: BlockInput) -> None:
        """Mixes tokens and targets linearly if this is the layer that was drawn."""
        mix = cast(ManifoldMix, state.manifold)
        if mix.layer == entry.index:
            entry.tokens, state.targets = mix(entry.tokens), mix(state.targets)

    def _mix_horizontally(self, state: Pass, entry: BlockInput) -> None:
        """Algorithm 1."""
        htm, scorenet = cast(HTM, self.htm), cast(ScoreNet, self.scorenet)
        state.score_logits = scorenet(entry.tokens, entry.num_prefix_tokens)
        state.difficulty = difficulty(state.score_logits, state.targets)
        state.is_easy = self._rules.find_easy(state.difficulty.detach())
        saliency = self._detect(entry)
        is_source = self.vtm is not None and htm.layer < self.vtm.layer
        for_memory = entry.own_saliency() if is_source else None
        state.mix = self._rules.mix(entry.tokens, state.targets, saliency, state.is_easy)
        moved = state.mix.moved
        projected = [take_from_donors(y, moved, in_place=True) for y in entry.projected]
        arranged = self._rules.arrange(state.mix, state.is_easy, for_memory, projected)
        entry.tokens, state.targets, entry.saliency, entry.projected = arranged

    def _remember(self, state: Pass, entry: BlockInput) -> None:
        """VTM keeps the salient tokens of this block, or does so once its attention tells them."""
        if entry.saliency is not None:
            cast(Memory, state.memory).remember(entry)
