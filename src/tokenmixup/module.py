"""Adds HTM, VTM and manifold mixup to a stock transformer without editing it.

During a training forward pass, hooks mix the inputs of blocks, and stand-ins replace the attention
of blocks that mix, fill VTM's memory or attend to it. Otherwise the model is untouched: evaluation
is the plain model, bit for bit.

Letters: b batch, n tokens with prefix, t spatial tokens, d width, c classes, m memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tokenmixup.adapters import Adapter, adapter_of, as_called, attention_module, block_module
from tokenmixup.contexts import evaluating, replaced_forward
from tokenmixup.detectors import BlockInput, detector_of
from tokenmixup.horizontal import HorizontalMix, algorithm_1
from tokenmixup.manifold import draw_manifold_mix
from tokenmixup.passes import (
    ForwardState,
    Output,
    StandIn,
    attend_and_remember,
    attend_as_projected,
    attend_to_memory,
)
from tokenmixup.rules import rules_of
from tokenmixup.saliency import input_gradient
from tokenmixup.scorenet import ScoreNet
from tokenmixup.settings import HTM, VTM, ManifoldMixup, built
from tokenmixup.structure import (
    check_layer,
    check_projections,
    check_rollout,
    declared_prefix,
    has_class_token,
    head_size,
    is_sharded,
    layer_group,
    reads_class_token,
    scorenet_pooling,
    view_of,
    why_not,
)
from tokenmixup.vertical import INDICES, Memory

ROUNDING = 0.01  # of the sum of 1,000 smoothed probabilities in bfloat16


def attach(
    model: nn.Module,
    num_classes: int,
    htm: HTM | Mapping[str, Any] | None = None,
    vtm: VTM | Mapping[str, Any] | None = None,
    manifold_mixup: ManifoldMixup | Mapping[str, Any] | None = None,
    checkpoint_blocks: bool = False,
    adapter: Adapter | None = None,
) -> "TokenMixup":
    """Wraps a transformer with pre-norm attention `blocks` for training with TokenMixup.

    `model`: a stock model, used in place; `num_classes`: of its logits. `htm`, `vtm`,
    `manifold_mixup`: settings, as mappings or dataclasses; None disables a method.
    `checkpoint_blocks`: recomputes activations in the backward pass (gradient checkpointing) of all
    blocks but those of HTM, VTM, its sources and manifold mixup. `adapter`: needed if the model has
    other names than timm's and is no known class of torchvision or transformers. Raises ValueError
    for an unsupported model, a layer that it does not have, or an invalid setting.
    """
    return TokenMixup(model, num_classes, htm, vtm, manifold_mixup, checkpoint_blocks, adapter)


class TokenMixup(nn.Module):
    """`module(images, targets)` -> Output in training, `module(images)` -> logits in evaluation.

    `images`: `b 3 h w`; `targets`: `b c`, probabilities after any input mixup. Training raises
    TypeError without targets; ValueError for images or targets of another kind (values of targets
    are looked at on a CPU only), a detector that cannot run under FSDP, a model that skips
    or repeats a block, the model's own gradient checkpointing, which would rerun blocks without
    hooks, and DataParallel, whose replicas would share hooks; FloatingPointError if the saliency is
    not finite. HTM's `rules` and `detect` may be replaced.
    """

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        htm: HTM | Mapping[str, Any] | None = None,
        vtm: VTM | Mapping[str, Any] | None = None,
        manifold_mixup: ManifoldMixup | Mapping[str, Any] | None = None,
        checkpoint_blocks: bool = False,
        adapter: Adapter | None = None,
    ):
        super().__init__()
        htm, vtm = built(HTM, htm), built(VTM, vtm)
        manifold_mixup = built(ManifoldMixup, manifold_mixup)
        if type(num_classes) is not int or num_classes < 1:
            raise ValueError(f"num_classes={num_classes!r}: must be an int, 1 or more")
        if type(checkpoint_blocks) is not bool:
            raise ValueError(f"checkpoint_blocks={checkpoint_blocks!r}: must be True or False")
        if checkpoint_blocks and (reason := why_not(model, None, adapter)):
            raise ValueError(f"TokenMixup does not support this model: {reason}")
        htm = htm and htm.for_classes(num_classes)
        self.adapter = adapter or adapter_of(model)
        self.num_classes = num_classes
        self.checkpoint_blocks = checkpoint_blocks
        self.model, self.htm, self.vtm, self.manifold_mixup = model, htm, vtm, manifold_mixup
        self.scorenets = nn.ModuleDict()  # by layer
        self._htm_at = {} if htm is None else htm.each
        self._vtm_at = {} if vtm is None else vtm.each
        self._manifold = manifold_mixup
        self._takes_gradient = htm is not None and htm.detector == "gradient"
        self._sources = range(max(self._vtm_at, default=0))
        for key, layers in (
            ("htm.layer", self._htm_at),
            ("vtm.layer", self._vtm_at),
            ("manifold_mixup.layers", self._manifold_layers),
        ):
            for layer in layers:
                check_layer(model, key, layer, adapter)
        if (size := head_size(model)) not in (None, num_classes):
            raise ValueError(
                f"num_classes={num_classes}: the head of {type(model).__name__} has {size} outputs"
            )
        view = view_of(model, adapter)
        if vtm is not None and vtm.class_token_offset == "published" and not has_class_token(view):
            raise ValueError("vtm.class_token_offset='published': no class token enters the blocks")
        if htm is not None:
            width, pooling = view.embed_dim, scorenet_pooling(view, htm.pooling)
            like = next(model.parameters())
            for layer in htm.layers:
                check_rollout(model, layer, htm.rollout_steps, adapter)
                scorenet = ScoreNet(width, num_classes, pooling, htm.stop_gradient)
                self.scorenets[str(layer)] = scorenet.to(like.device, like.dtype)
            self.rules, self.detect = rules_of(htm), detector_of(htm)
        self._reads_class_token = reads_class_token(view)

    @property
    def _manifold_layers(self) -> Sequence[int]:
        return () if self._manifold is None else self._manifold.layers

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Output | Tensor:
        if not self.training:
            return self._logits(images)
        if targets is None:
            raise TypeError("training needs module(images, targets) with targets b c")
        if getattr(self, "_is_replica", False):
            raise ValueError("TokenMixup trains under DistributedDataParallel, not DataParallel")
        state = self._begin(images, targets)
        with self._mixing(state):
            logits = self._logits(images)
        for layer in self._htm_at.keys() - state.mixes.keys():
            raise ValueError(f"htm.layer={layer}: this block did not run")
        return state.output(logits, 0.0 if self.htm is None else self.htm.score_loss_weight)

    def _logits(self, images: Tensor) -> Any:
        out = self.model(images)
        return out if self.adapter is None else self.adapter.logits(out)

    def stop_mixing(self) -> None:
        """Disables all mixing in training for good and freezes the ScoreNets.

        Not part of the state dict: call it again after a resume. A DistributedDataParallel wrapper
        waits for the gradients of the ScoreNets: wrap the module again.
        """
        self._htm_at, self._vtm_at, self._sources, self._manifold = {}, {}, range(0), None
        self.scorenets.requires_grad_(False)

    @property
    def scorenet(self) -> ScoreNet | None:
        """The ScoreNet of HTM's first layer."""
        return cast(ScoreNet, next(iter(self.scorenets.values()), None))

    @torch.no_grad()
    def mixed_pairs(self, images: Tensor, targets: Tensor) -> HorizontalMix | None:
        """Returns what HTM's first layer makes of these images; None without HTM.

        Runs the model in its current mode: training mode has dropout and updates running
        statistics. Raises the errors of a training pass.
        """
        state = self._begin(images, targets)
        with self._mixing(state):
            self.model(images)
        return next(iter(state.mixes.values()), None)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters without weight decay; timm's optimisers call this."""
        exempt = getattr(self.model, "no_weight_decay", set)
        return {f"model.{name}" for name in exempt()}

    @property
    def group_matcher(self) -> Callable[..., Any]:
        """The model's layer groups, for timm's layer-wise learning rates. ScoreNets join the last.

        Raises AttributeError if the model has none, so that timm sees none.
        """
        own: Any = self.model.group_matcher
        return lambda coarse=False: partial(layer_group, own(coarse=coarse))

    def _begin(self, images: Tensor, targets: Tensor) -> ForwardState:
        """Checks the batch, computes the input gradient, draws for manifold mixup."""
        if not isinstance(images, Tensor) or images.ndim != 4:
            raise ValueError("TokenMixup mixes images of one size, as a tensor b 3 h w")
        shape = (len(images), self.num_classes)
        found = targets.shape if isinstance(targets, Tensor) else type(targets)
        if found != shape or not len(images):
            raise ValueError(
                f"targets {found}: must be probabilities b c of at least one image, here {shape}, "
                "such as F.one_hot(classes, c)"
            )
        if targets.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_probabilities(targets)  # on a GPU this would wait
        self._check_detector()
        state = ForwardState(targets, view_of(self.model, self.adapter))
        if self._htm_at and self._takes_gradient:
            with evaluating(self.model):
                exact = images.to(next(self.model.parameters()).dtype)  # autocast is off there
                state.pixels = input_gradient(self._logits, exact, targets)
        if self._manifold is not None:
            state.manifold = draw_manifold_mix(self._manifold, images)
        for layer, vtm in self._vtm_at.items():
            select = INDICES[vtm.class_token_offset]
            state.memories[layer] = Memory(vtm.kappa, select, vtm.stop_gradient)
        return state

    def _check_detector(self) -> None:
        """Raises ValueError if HTM's detector cannot run in this pass."""
        rolls_out = [*self._rollout_blocks()] != []
        takes_gradient = self._takes_gradient and bool(self._htm_at)
        if takes_gradient and torch.is_inference_mode_enabled():
            raise ValueError("htm.detector=gradient: torch.inference_mode() allows no gradient")
        if (rolls_out or takes_gradient) and is_sharded(self):
            key = "htm.detector=gradient" if takes_gradient else "htm.rollout_steps"
            raise ValueError(
                f"{key}: not supported with FSDP, which gathers weights for the main pass only"
            )

    @contextmanager
    def _mixing(self, state: ForwardState) -> Iterator[None]:
        """Installs hooks and stand-ins for the length of the context."""
        model = state.view
        blocks = getattr(model, "blocks", ())  # a model without mixing inside may have none
        reruns = [getattr(block_module(x), "gradient_checkpointing", False) for x in blocks]
        if getattr(self.model, "grad_checkpointing", False) or any(reruns):
            raise ValueError(
                "TokenMixup cannot rerun all blocks: instead of the model's gradient "
                "checkpointing use attach(..., checkpoint_blocks=True)"
            )
        replaced = self.replaced_attention()
        watched = {*replaced, *self._manifold_layers, *self._htm_at}
        for index in {*replaced, *self._rollout_blocks()}:
            check_projections(index, model.blocks[index])
        with ExitStack() as stack:
            if watched and isinstance(embed := getattr(model, "patch_embed", None), nn.Module):
                handle = embed.register_forward_hook(state.note_patches)
                stack.callback(handle.remove)
            for index in watched:
                hook = partial(self._enter_block, state, index)
                block = block_module(model.blocks[index])
                handle = block.register_forward_pre_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            for index, stand_in in replaced.items():
                block = model.blocks[index]
                forward = as_called(block, partial(stand_in, state, block))
                stack.enter_context(replaced_forward(attention_module(block), forward))
            for index, block in enumerate(model.blocks) if self.checkpoint_blocks else ():
                if index not in watched:
                    module = block_module(block)
                    checkpointed = partial(checkpoint, module.forward, use_reentrant=False)
                    stack.enter_context(replaced_forward(module, checkpointed))
            yield

    def _rollout_blocks(self) -> Iterator[int]:
        """Yields the blocks whose maps are multiplied in a rollout."""
        for layer, htm in self._htm_at.items():
            if htm.rollout_steps > 0:
                yield from range(layer, layer + htm.rollout_steps + 1)

    def unchanged_blocks(self) -> list[nn.Module]:
        """Returns the blocks without hooks or stand-ins in training, which can be compiled."""
        changed = {*self.replaced_attention(), *self._htm_at, *self._manifold_layers}
        changed |= {*self._rollout_blocks()}
        blocks = enumerate(view_of(self.model, self.adapter).blocks)
        return [block_module(block) for index, block in blocks if index not in changed]

    def replaced_attention(self) -> dict[int, StandIn]:
        """Returns the stand-in for the attention of each block that has one in training."""
        replaced: dict[int, StandIn] = dict.fromkeys(self._sources, attend_and_remember)
        for layer in self._htm_at:
            if layer in self._sources or self.detect is BlockInput.own_saliency:
                replaced[layer] = attend_as_projected  # HTM has projected the tokens
        return replaced | dict.fromkeys(self._vtm_at, attend_to_memory)

    def _enter_block(
        self, state: ForwardState, index: int, block: nn.Module, args: tuple[Any, ...], given: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Mixes a block's input: manifold mixup, then HTM; VTM then stores its salient tokens."""
        if not args:
            raise ValueError(f"block {index} gets its tokens by keyword: must be first argument")
        if not isinstance(args[0], Tensor) or args[0].ndim != 3:
            found = [*getattr(args[0], "shape", [])] or type(args[0]).__name__
            raise ValueError(f"block {index} gets {found}: must be tokens b n d")
        if any(value is not None for value in args[1:]):
            raise ValueError(f"block {index} gets further positional arguments: not supported")
        if state.entry is not None and index <= state.entry.index:
            raise ValueError(f"block {index} runs again: must run once in a forward pass, in order")
        entry = state.entry = self._block_input(state, index, args[0], given)
        if state.manifold is not None and state.manifold.layer == index:
            entry.tokens = state.manifold(entry.tokens)
            state.targets = state.manifold(state.targets)
        is_source = index in self._sources
        if (htm := self._htm_at.get(index)) is not None:
            scorenet = self.scorenets[str(index)]
            mix = state.mixes[index] = algorithm_1(
                entry.tokens,
                state.targets,
                htm.tau,
                htm.rho_for(entry.tokens.shape[1] - entry.num_prefix_tokens),
                partial(state.measure_difficulty, scorenet, entry.num_prefix_tokens),
                partial(self._saliency_of, entry),
                self.rules,
            )
            if is_source:  # VTM
                own = entry.own_saliency()
                if htm.order == "in_place":  # the saliency moves with its token
                    entry.saliency = torch.where(mix.mask, own[mix.donor], own)
            entry.projected = [mix.exchange(y) for y in entry.projected]
            entry.tokens, state.targets = mix.tokens, mix.targets
        elif is_source and index in self._vtm_at:
            entry.own_saliency()  # by its own keys, before the memory is added to them
        if entry.saliency is not None and is_source:  # else the stand-in for its attention does it
            state.remember(entry, entry.saliency)
        return (entry.tokens, *args[1:]), given

    def _saliency_of(self, entry: BlockInput) -> Tensor:
        """Returns the detector's saliency. Raises ValueError unless it is `b t`."""
        saliency = self.detect(entry)
        b, n, _ = entry.tokens.shape
        if saliency.shape != (b, n - entry.num_prefix_tokens):
            raise ValueError(
                f"htm.detector returns {[*saliency.shape]}, must be samples x spatial tokens, "
                f"{[b, n - entry.num_prefix_tokens]}"
            )
        return saliency

    def _block_input(
        self, state: ForwardState, index: int, tokens: Tensor, given: Any
    ) -> BlockInput:
        prefix = declared_prefix(state.view)
        if state.num_patches is not None:
            prefix = tokens.shape[1] - state.num_patches
        if not 0 <= prefix < tokens.shape[1]:
            n = tokens.shape[1]
            raise ValueError(
                f"block {index} gets {n} tokens for {n - prefix} patches: "
                "TokenMixup cannot tell which tokens are the prefix"
            )
        by_class_token = prefix > 0 and self._reads_class_token
        return BlockInput(
            state.view.blocks,
            index,
            tokens,
            given,
            prefix,
            by_class_token,
            state.pixels,
            state.grid,
        )


def _check_probabilities(targets: Tensor) -> None:
    """Raises ValueError unless each row of `b c` has no negative value and sums to 1."""
    close = (targets.sum(dim=1, dtype=torch.float32) - 1).abs() < ROUNDING  # false for nan
    if not (good := close & (targets >= 0).all(dim=1)).all():
        row = int(good.int().argmin())
        raise ValueError(
            f"targets[{row}]: must be probabilities, which are >= 0 and sum to 1; it sums to "
            f"{float(targets[row].sum()):g}, its lowest value is {float(targets[row].min()):g}"
        )
