"""Adds HTM, VTM and manifold mixup to a stock transformer without editing it.

During a training forward pass, stand-ins for the `forward` of blocks mix their inputs, and those of
attentions answer where the block mixes, feeds VTM's memory or reads it. Otherwise the model is
untouched: evaluation is the plain model, bit for bit.

Letters: b batch, n tokens with prefix, t spatial tokens, d width, c classes, m memory.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tokenmixup.adapters import Adapter, adapter_of
from tokenmixup.batch import check_batch
from tokenmixup.contexts import Forward, evaluating, replace_forwards
from tokenmixup.detectors import detector_of
from tokenmixup.encoder import head_size, is_sharded, layer_group
from tokenmixup.fitting import encoder_for
from tokenmixup.horizontal import HorizontalMix, mix_horizontal
from tokenmixup.manifold import ManifoldMix, draw_manifold_mix
from tokenmixup.output import LayerMix, Output
from tokenmixup.passes import BlockPass, ForwardPass
from tokenmixup.rules import ORDERS, rules_of
from tokenmixup.saliency import input_gradient
from tokenmixup.scorenet import Pooling, ScoreNet, difficulty
from tokenmixup.settings import HTM, VTM, ManifoldMixup, built
from tokenmixup.vertical import INDICES, Memory


class TokenMixup(nn.Module):
    """`module(images, targets)` -> Output in training, `module(images)` -> logits in evaluation.

    `model`: a stock model, used in place; `num_classes`: of its logits. `htm`, `vtm`,
    `manifold_mixup`: settings, as mappings or dataclasses; None disables a method.
    `checkpoint_blocks`: recomputes activations in the backward pass (gradient checkpointing) of all
    blocks but those of HTM, VTM, its sources and manifold mixup. `adapter`: needed if the model has
    other names than timm's and is no known class of torchvision or transformers. Raises ValueError
    for an unsupported model, a layer that it does not have, or an invalid setting.

    `images`: `b 3 h w`; `targets`: `b c`, probabilities after any input mixup. Training raises
    TypeError without targets; ValueError for images or targets of another kind (values of targets
    are looked at on a CPU only), a detector that cannot run under FSDP, a model that skips
    or repeats a block, the model's own gradient checkpointing, which would rerun blocks without
    stand-ins, and DataParallel, whose replicas would share them; FloatingPointError if the saliency
    is not finite. HTM's `rules` and `detect` may be replaced.
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
        htm = htm and htm.for_classes(num_classes)
        self.model, self.num_classes = model, num_classes
        self.adapter = adapter or adapter_of(model)
        self.checkpoint_blocks = checkpoint_blocks
        self.encoder = encoder_for(model, self.adapter, htm, vtm, manifold_mixup, checkpoint_blocks)
        if (size := head_size(model)) not in (None, num_classes):
            raise ValueError(
                f"num_classes={num_classes}: the head of {type(model).__name__} has {size} outputs"
            )
        self.htm, self.vtm, self.manifold_mixup = htm, vtm, manifold_mixup
        # By layer, what mixes in training; nothing after `stop_mixing`.
        self._htm_at = {} if htm is None else htm.each
        self._vtm_at = {} if vtm is None else vtm.each
        self._manifold = manifold_mixup
        self.scorenets = nn.ModuleDict(
            {str(layer): self._new_scorenet(layer) for layer in self._htm_at}
        )
        if htm is not None:
            self.rules, self.detect = rules_of(htm), detector_of(htm)
        self._state: ForwardPass | None = None  # of the training pass that runs
        self._kept: dict[Any, Forward] = {}  # stand-ins, whose identity a compiler may ask for

    def _new_scorenet(self, layer: int) -> ScoreNet:
        htm, encoder, like = self.htm, self.encoder, next(self.model.parameters())
        assert htm is not None and encoder is not None
        own = "class_token" if encoder.reads_class_token else "attention"
        pooling = cast(Pooling, own if htm.pooling == "auto" else htm.pooling)
        width = encoder.blocks[layer].width
        scorenet = ScoreNet(width, self.num_classes, pooling, htm.stop_gradient)
        return scorenet.to(like.device, like.dtype)

    @torch.compiler.disable(recursive=False)  # a compiler begins at `forward`
    def __call__(self, images: Tensor, targets: Tensor | None = None) -> Any:
        """Checks the batch, draws what is drawn for it as a whole, and runs `forward`."""
        if not self.training:
            return super().__call__(images)
        drawn = self._drawn(images, targets)
        before = replace_forwards(self._stand_ins())
        try:
            return super().__call__(images, targets, *drawn)
        except Exception as error:
            if type(error).__module__.startswith("torch._dynamo"):  # it may hide an error of ours
                with torch.compiler.set_stance("force_eager"):
                    self._call_impl(images, targets, *drawn)
            raise
        finally:
            replace_forwards(before)

    def forward(
        self,
        images: Tensor,
        targets: Tensor | None = None,
        pixels: Tensor | None = None,
        manifold: ManifoldMix | None = None,
    ) -> Output | Tensor:
        """Runs a pass. `pixels`: `b h w`, input gradient, and `manifold` come from `__call__`."""
        if targets is None:
            return self._logits(images)
        state = self._state = self._pass_of(targets, pixels, manifold)
        try:
            logits = self.adapter.logits(self.model(images))
        finally:
            self._state = None
        for key, layers in (("htm", self._htm_at), ("vtm", self._vtm_at)):
            for layer in layers:
                if layer not in state.blocks:
                    raise ValueError(f"{key}.layer={layer}: this block did not run")
        return state.output(logits, 0.0 if self.htm is None else self.htm.score_loss_weight)

    def _pass_of(
        self, targets: Tensor, pixels: Tensor | None, manifold: ManifoldMix | None
    ) -> ForwardPass:
        """Returns the state of a new pass, with an empty memory for each layer of VTM."""
        memories = {
            layer: Memory(vtm.kappa, INDICES[vtm.class_token_offset], vtm.stop_gradient)
            for layer, vtm in self._vtm_at.items()
        }
        return ForwardPass(targets, pixels, manifold, memories=memories)

    def _logits(self, images: Tensor) -> Any:
        return self.adapter.logits(self.model(images))

    def _run_block(self, index: int, plain: Forward, *args: Any, **given: Any) -> Any:
        """Stands in for a block, `plain`: mixes its input by manifold mixup, then HTM, and runs it.

        VTM stores the salient ones of the mixed tokens.
        """
        if (state := self._state) is None:
            return plain(*args, **given)
        assert self.encoder is not None
        block = state.enter(self.encoder, index, args, given)
        if state.manifold is not None and state.manifold.layer == index:
            block.tokens = state.manifold(block.tokens)
            state.targets = state.manifold(state.targets)
        if (htm := self._htm_at.get(index)) is not None:
            score_logits = self.scorenets[str(index)](block.tokens, block.num_prefix_tokens)
            hard = difficulty(score_logits, state.targets, htm.difficulty)
            saliency = self._saliency_of(block)
            rho = htm.rho_for(saliency.shape[1])
            mix = mix_horizontal(
                block.tokens, state.targets, saliency, hard, htm.tau, rho, self.rules
            )
            state.layers.append(
                LayerMix(index, score_logits, hard, mix.is_easy, mix.mask, mix.gain)
            )
            if block.later:
                block.own_saliency()
            mix = state.mixes[index] = ORDERS[htm.order](mix)
            block.mix(mix, moves_saliency=htm.order == "in_place")
            state.targets = mix.targets
        elif block.later and block.memory is not None:
            block.own_saliency()  # by its own keys, before the memory is added to them
        if block.saliency is not None:  # else its attention does it
            block.remember(block.saliency)
        return plain(*block.inputs(), **given)

    def _saliency_of(self, block: BlockPass) -> Tensor:
        """Returns the detector's saliency. Raises ValueError unless it is `b t`."""
        state, self._state = self._state, None  # blocks that it runs are the plain ones
        saliency = self.detect(block)
        self._state = state
        b, n, _ = block.tokens.shape
        if saliency.shape != (b, n - block.num_prefix_tokens):
            raise ValueError(
                f"htm.detector returns {[*saliency.shape]}, must be samples x spatial tokens, "
                f"{[b, n - block.num_prefix_tokens]}"
            )
        return saliency

    def stop_mixing(self) -> None:
        """Disables all mixing in training for good and freezes the ScoreNets.

        Not part of the state dict: call it again after a resume. A DistributedDataParallel wrapper
        waits for the gradients of the ScoreNets: wrap the module again.
        """
        self._htm_at, self._vtm_at, self._manifold = {}, {}, None
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
        return next(iter(self.traced(images, targets).mixes.values()), None)

    def traced(self, images: Tensor, targets: Tensor) -> ForwardPass:
        """Runs the model as in training, in its current mode; returns the state of the pass."""
        state = self._pass_of(targets, *self._drawn(images, targets))
        before = replace_forwards(self._stand_ins())
        self._state = state
        try:
            self.model(images)
        finally:
            self._state = None
            replace_forwards(before)
        return state

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

    @torch.compiler.disable
    def _drawn(
        self, images: Tensor, targets: Tensor | None
    ) -> tuple[Tensor | None, ManifoldMix | None]:
        """Checks the batch; returns the input gradient, `b h w`, and manifold mixup's draws."""
        if getattr(self, "_is_replica", False):
            raise ValueError("TokenMixup trains under DistributedDataParallel, not DataParallel")
        targets = check_batch(images, targets, self.num_classes)
        pixels = self._input_gradient(images, targets)
        if self._manifold is None:
            return pixels, None
        return pixels, draw_manifold_mix(self._manifold, images)

    def _input_gradient(self, images: Tensor, targets: Tensor) -> Tensor | None:
        """Returns the input gradient if HTM takes it. Raises ValueError if HTM cannot run here."""
        takes_gradient = any(htm.detector == "gradient" for htm in self._htm_at.values())
        if takes_gradient and torch.is_inference_mode_enabled():
            raise ValueError("htm.detector=gradient: torch.inference_mode() allows no gradient")
        if (takes_gradient or self._rollout_blocks()) and is_sharded(self):
            key = "htm.detector=gradient" if takes_gradient else "htm.rollout_steps"
            raise ValueError(
                f"{key}: not supported with FSDP, which gathers weights for the main pass only"
            )
        if not takes_gradient:
            return None
        with evaluating(self.model):
            exact = images.to(next(self.model.parameters()).dtype)  # autocast is off there
            return input_gradient(self._logits, exact, targets)

    @torch.compiler.disable
    def _stand_ins(self) -> list[tuple[nn.Module, Forward]]:
        """Returns the modules to replace in a training pass, each with its stand-in `forward`.

        Raises ValueError if the model has been changed since `attach` in a way that rules it out.
        """
        if (encoder := self.encoder) is None:
            return []
        blocks, holders = encoder.blocks, {self.model, *encoder.stages}
        reruns = [getattr(block.module, "gradient_checkpointing", False) for block in blocks]
        if any(reruns) or any(getattr(x, "grad_checkpointing", False) for x in holders):
            raise ValueError(
                "TokenMixup cannot rerun all blocks: instead of the model's gradient "
                "checkpointing use attach(..., checkpoint_blocks=True)"
            )
        answered = self.answered_blocks()
        mixed = () if self._manifold is None else self._manifold.layers
        entered = {*answered, *mixed, *self._htm_at}
        for index in {*answered, *self._rollout_blocks()}:
            if reason := blocks[index].why_not():
                raise ValueError(f"TokenMixup no longer supports block {index}, {reason}")
        found: list[tuple[nn.Module, Forward]] = []
        if entered and (embed := encoder.patch_embed) is not None:
            found.append(self._stand_in(embed, _embed, embed))
        for index, block in enumerate(blocks):
            if index in entered:
                found.append(self._stand_in(block.module, TokenMixup._run_block, index))
            elif self.checkpoint_blocks:
                found.append(self._stand_in(block.module, _rerun))
            if index in answered:
                found.append(self._stand_in(block.attn, _attend, index))
        return found

    def answered_blocks(self) -> set[int]:
        """Returns the blocks whose attention has a stand-in: VTM's, its sources, most of HTM's."""
        answered = {*range(max(self._vtm_at, default=-1) + 1)}
        has_parts = self.encoder is not None and self.encoder.has_parts
        if has_parts and self._htm_at and self.detect is BlockPass.own_saliency:
            answered |= {*self._htm_at}  # it has projected the tokens
        return answered

    def _rollout_blocks(self) -> set[int]:
        """Returns the blocks whose maps are multiplied in a rollout."""
        steps = max((htm.rollout_steps for htm in self._htm_at.values()), default=0)
        return {layer + step for layer in self._htm_at for step in range(steps + 1) if steps}

    def _stand_in(
        self, module: nn.Module, function: Callable[..., Any], *bound: Any
    ) -> tuple[nn.Module, Forward]:
        """Returns a stand-in for `module.forward`; the same one again for the same `forward`."""
        own = vars(module).get("forward")
        key = (module, own)
        if key not in self._kept:
            plain = own or partial(type(module).forward, module)
            self._kept[key] = partial(function, self, *bound, plain)
        return module, self._kept[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kept": {}}  # copies make their own


attach = TokenMixup  # `attach(model, ...)` says what happens to the model


# Further stand-ins, besides `_run_block`, for the `forward` of modules: `plain` is their own, and
# without a pass they are `plain`.


def _embed(method: TokenMixup, embed: Any, plain: Forward, *args: Any, **given: Any) -> Any:
    out = plain(*args, **given)
    if method._state is not None:
        method._state.note_patches(embed, args[0], out)
    return out


def _attend(method: TokenMixup, index: int, plain: Forward, *args: Any, **given: Any) -> Any:
    if method._state is None:
        return plain(*args, **given)
    block = method._state.blocks[index]
    return block.block.answer(block.attend, args, given)


def _rerun(method: TokenMixup, plain: Forward, *args: Any, **given: Any) -> Any:
    return checkpoint(plain, *args, use_reentrant=False, **given)
