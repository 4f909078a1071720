"""What `attach` does to a stock transformer, without editing it: HTM, VTM and manifold mixup.

A training pass puts stand-ins in the place of `forward` of the modules in brackets, and takes them
away at its end. What a block consists of is looked up in each pass, so that the model may change
between two of them. Evaluation is the plain model, bit for bit.

    images, targets          checked; layer and partners of manifold mixup drawn, pixels' gradient
        |
    [patch embedding]        says how many patches there are, and in which grid
        |
        | tokens b n d
    [block]  ................ manifold mixup, if this layer is drawn: tokens, targets
        |                     layer of HTM: ScoreNet -> difficulty, detector -> saliency,
        |                        Algorithm 1 -> tokens, targets; known projections move along
        |                     source of VTM: most salient tokens -> memory of each later layer
        |                        (by the attention below, unless its saliency is known already)
        |
        +-- own forward:      norm -> [attention] -> residual -> MLP
        |                        projections that are known are not computed again;
        |                        layer of VTM: the memory's tokens are further keys and values
        | tokens b n d
    [block]  ................ one that nothing touches: as it is, or `checkpoint_blocks`
        |
    logits b c  ............. Output, if each block that must run has run

Letters: b batch, h heads, n tokens with prefix, t spatial tokens, d width, e head width, c classes,
m memory, h w image.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tokenmixup.adapters import Adapter, adapter_of
from tokenmixup.attention import (
    Positions,
    attend,
    attend_by_map,
    composed_map,
    positions,
    project,
    projections,
    received,
)
from tokenmixup.contexts import evaluating
from tokenmixup.detectors import by_attention, detector_of
from tokenmixup.encoder import Block, Encoder, encoder_now, head_size, is_sharded, layer_group
from tokenmixup.fitting import check_settings, encoder_for
from tokenmixup.horizontal import HorizontalMix, mix_horizontal
from tokenmixup.manifold import ManifoldMix, draw_manifold_mix
from tokenmixup.output import LayerMix, Output
from tokenmixup.rules import ORDERS, rules_of
from tokenmixup.saliency import attention_saliency, input_gradient
from tokenmixup.scorenet import Pooling, ScoreNet, difficulty
from tokenmixup.settings import HTM, VTM, ManifoldMixup, built
from tokenmixup.vertical import INDICES, Memory, vertical_attention

Forward = Callable[..., Any]
SUM_ROUNDING = 0.01  # of the sum of 1,000 smoothed probabilities in bfloat16
OWN_CHECKPOINTING = (
    "runs without gradients or under the model's own gradient checkpointing, which would rerun it "
    "without TokenMixup: use attach(..., checkpoint_blocks=True)"
)


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
    or repeats a block, one that has become unsupported, its own gradient checkpointing of a block
    that is touched, and DataParallel, whose replicas would share stand-ins; FloatingPointError if
    the saliency is not finite. HTM's `rules` and `detect` may be replaced.
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
        self.checkpoint_blocks = checkpoint_blocks
        self._told, self.adapter = adapter, adapter or adapter_of(model)
        self.encoder = encoder_for(model, adapter, htm, vtm, manifold_mixup, checkpoint_blocks)
        if (size := head_size(model)) not in (None, num_classes):
            raise ValueError(
                f"num_classes={num_classes}: the head of {type(model).__name__} has {size} outputs"
            )
        self.htm, self.vtm, self.manifold_mixup = htm, vtm, manifold_mixup
        # By layer, what mixes in training; nothing after `stop_mixing`.
        self._htm_at = {} if htm is None else htm.each
        self._vtm_at = {} if vtm is None else vtm.each
        self._manifold = manifold_mixup
        self._settings: tuple[Any, ...] = (htm, vtm, manifold_mixup)
        self.scorenets = nn.ModuleDict(
            {str(layer): self._new_scorenet(layer) for layer in self._htm_at}
        )
        if htm is not None:
            self.rules, self.detect = rules_of(htm), detector_of(htm)
        self._state: ForwardPass | None = None  # of the training pass that runs
        self._required = Required()
        self._kept: dict[nn.Module, tuple[Any, Forward]] = {}  # stand-ins of the last pass

    def _new_scorenet(self, layer: int) -> ScoreNet:
        htm, encoder, like = self.htm, self.encoder, next(self.model.parameters())
        assert htm is not None and encoder is not None
        own = "class_token" if encoder.reads_class_token else "attention"
        pooling = cast(Pooling, own if htm.pooling == "auto" else htm.pooling)
        width = encoder.blocks[layer].width
        scorenet = ScoreNet(width, self.num_classes, pooling, htm.stop_gradient)
        return scorenet.to(like.device, like.dtype)

    @torch._dynamo.decorators.skip  # a compiler begins at `_run`
    def forward(self, images: Tensor, targets: Tensor | None = None) -> Any:
        """Checks the batch, draws what is drawn for it as a whole, and runs the pass."""
        if not self.training:
            self._look_up_adapter()
            return self._logits(images)
        if torch.compiler.is_exporting():
            raise ValueError("a training pass cannot be exported: export module.model, the model")
        before, *drawn = self._begin(images, targets)
        try:
            return self._run(images, targets, *drawn)
        except FloatingPointError as error:
            if rows := _not_finite(images):
                raise FloatingPointError(f"images{rows}: not finite; {error}") from error
            raise
        except Exception as error:
            if type(error).__module__.startswith("torch._dynamo"):  # it may hide an error of ours
                with torch.compiler.set_stance("force_eager"):
                    self._run(images, targets, *drawn)
            raise
        finally:
            replace_forwards(before)

    def _run(
        self, images: Tensor, targets: Any, pixels: Tensor | None, manifold: ManifoldMix | None
    ) -> Output:
        state = self._state = self._pass_of(targets, pixels, manifold)
        try:
            logits = self.adapter.logits(self.model(images))
        finally:
            self._state = None
        state.check_complete()
        return state.output(logits, 0.0 if self.htm is None else self.htm.score_loss_weight)

    def _logits(self, images: Tensor) -> Any:
        return self.adapter.logits(self.model(images))

    def _pass_of(
        self, targets: Tensor, pixels: Tensor | None, manifold: ManifoldMix | None
    ) -> "ForwardPass":
        """Returns the state of a new pass, with an empty memory for each layer of VTM."""
        memories = {
            layer: Memory(vtm.kappa, INDICES[vtm.class_token_offset], vtm.stop_gradient)
            for layer, vtm in self._vtm_at.items()
        }
        return ForwardPass(
            self.encoder, self._required, targets, pixels, manifold, memories=memories
        )

    @torch.compiler.disable
    def _begin(
        self, images: Tensor, targets: Tensor | None
    ) -> tuple[list[tuple[nn.Module, Forward | None]], Tensor | None, ManifoldMix | None]:
        """Puts the stand-ins of a pass in their places, once its batch is checked.

        Returns what `replace_forwards` needs to take them away, the input gradient, `b h w`, and
        manifold mixup's draws.
        """
        if getattr(self, "_is_replica", False):
            raise ValueError("TokenMixup trains under DistributedDataParallel, not DataParallel")
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise ValueError("TokenMixup trains by backward(), not by a transform of torch.func")
        if not isinstance(self.scorenets, nn.ModuleDict):
            raise ValueError("TokenMixup is compiled as a whole, by module.compile(), not in parts")
        targets = check_batch(images, targets, self.num_classes)
        self._look_up_adapter()
        stand_ins = self._stand_ins()
        pixels = self._input_gradient(images, targets)
        manifold = None if self._manifold is None else draw_manifold_mix(self._manifold, images)
        return replace_forwards(stand_ins), pixels, manifold

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
    def _look_up_adapter(self) -> None:
        adapter = self._told or adapter_of(self.model)
        if adapter != self.adapter:  # a compiler may ask whether it is the same object
            self.adapter = adapter

    def _stand_ins(self) -> list[tuple[nn.Module, Forward | None]]:
        """Returns the modules to replace in a training pass, each with its stand-in `forward`.

        Looks up what the blocks consist of now. Raises ValueError if it is not supported.
        """
        if self.encoder is None:
            return []
        answered, rollout = self.answered_blocks(), self._rollout_blocks()
        checked = {*answered, *self._htm_at, *rollout}
        try:
            encoder = encoder_now(self.model, self._told, checked)
        except ValueError as error:
            raise ValueError(f"TokenMixup no longer supports this model: {error}") from error
        check_settings(self.model, encoder, self.adapter, *self._settings)
        if encoder != self.encoder:
            self.encoder = encoder
        mixed = () if self._manifold is None else self._manifold.layers
        entered = {*answered, *self._htm_at, *mixed}
        rerun = {*range(len(encoder.blocks))} - entered if self.checkpoint_blocks else set()
        must = ({*answered, *self._htm_at}, answered, rerun)
        self._required = Required(*(tuple(sorted(blocks)) for blocks in must))
        found: list[tuple[Any, ...]] = []
        if entered and encoder.patch_embed is not None:
            found.append((encoder.patch_embed, _embed, encoder.patch_embed))
        for index, block in enumerate(encoder.blocks):
            if index in entered:
                found.append((block.module, TokenMixup._run_block, index))
            elif index in rerun:
                found.append((block.module, _rerun, index))
            if index in answered:
                found.append((block.attn, _attend, index))
        self._kept = {module: self._stand_in(module, *told) for module, *told in found}
        return [(module, stand_in) for module, (_, stand_in) in self._kept.items()]

    def answered_blocks(self) -> set[int]:
        """Returns the blocks whose attention has a stand-in: VTM's, its sources, most of HTM's."""
        answered = {*range(max(self._vtm_at, default=-1) + 1)}
        has_parts = self.encoder is not None and self.encoder.has_parts
        if has_parts and self._htm_at and self.detect is by_attention:
            answered |= {*self._htm_at}  # it has projected the tokens
        return answered

    def _rollout_blocks(self) -> set[int]:
        """Returns the blocks whose maps are multiplied in a rollout."""
        steps = max((htm.rollout_steps for htm in self._htm_at.values()), default=0)
        return {layer + step for layer in self._htm_at for step in range(steps + 1) if steps}

    def _stand_in(
        self, module: nn.Module, function: Callable[..., Any], *bound: Any
    ) -> tuple[Any, Forward]:
        """Returns a stand-in for `module.forward`, and of what; the last one if that is the same.

        A compiler may ask for its identity.
        """
        own = vars(module).get("forward")
        told = (own or type(module).forward, self, function, *bound)
        if module in self._kept and self._kept[module][0] == told:
            return self._kept[module]
        plain = own or partial(type(module).forward, module)
        return told, partial(function, self, *bound, plain)

    def _run_block(self, index: int, plain: Forward, *args: Any, **given: Any) -> Any:
        """Stands in for a block, `plain`: mixes its input by manifold mixup, then HTM, and runs it.

        VTM stores the salient ones of the mixed tokens.
        """
        if (state := self._state) is None:
            return plain(*args, **given)
        block = state.enter(index, args, given)
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
            found = (score_logits, hard, mix.is_easy, mix.mask, mix.gain, saliency, mix.donor)
            state.layers.append(LayerMix(index, *found))
            if block.later:
                block.own_saliency()
            mix = state.mixes[index] = ORDERS[htm.order](mix)
            block.mix(mix, moves_saliency=htm.order == "in_place")
            state.targets = mix.targets
        if block.later and (htm is not None or block.memory is not None):
            block.remember(block.own_saliency())  # by its own keys, without those of the memory
        elif block.later:
            block.remembers_in_attention = True
        return plain(*block.inputs(), **given)

    def _saliency_of(self, block: "BlockPass") -> Tensor:
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
        self._htm_at, self._vtm_at, self._manifold, self._settings = {}, {}, None, ()
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

    def traced(self, images: Tensor, targets: Tensor) -> "ForwardPass":
        """Runs the model as in training, in its current mode; returns the state of the pass."""
        before, *drawn = self._begin(images, targets)
        state = self._state = self._pass_of(targets, *drawn)
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
    def pretrained_cfg(self) -> Any:
        """The model's, by which timm resolves mean, std and size of the images."""
        return self.model.pretrained_cfg

    @property
    def group_matcher(self) -> Callable[..., Any]:
        """The model's layer groups, for timm's layer-wise learning rates. ScoreNets join the last.

        Raises AttributeError if the model has none, so that timm sees none.
        """
        own: Any = self.model.group_matcher
        return lambda coarse=False: partial(layer_group, own(coarse=coarse))

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
    block = method._state.attention_of(index)
    return block.block.answer(block.attend, args, given)


def _rerun(method: TokenMixup, index: int, plain: Forward, *args: Any, **given: Any) -> Any:
    if method._state is not None:
        method._state.rerun.append(index)
    return checkpoint(plain, *args, use_reentrant=False, **given)


@torch.compiler.disable
def replace_forwards(
    forwards: Sequence[tuple[nn.Module, Forward | None]],
) -> list[tuple[nn.Module, Forward | None]]:
    """Replaces `module.forward` on each instance; None: by that of its class.

    Returns what undoes it.
    """
    before = [(module, vars(module).get("forward")) for module, _ in forwards]
    for module, forward in forwards:
        if forward is None:
            del module.forward
        else:
            setattr(module, "forward", forward)
    return before


def check_batch(images: Any, targets: Any, num_classes: int) -> Tensor:
    """Returns the targets. Raises ValueError unless `b 3 h w` and probabilities `b c`.

    Raises TypeError without targets. Their values are looked at on a CPU only.
    """
    if targets is None:
        raise TypeError("training needs module(images, targets) with targets b c")
    if not isinstance(images, Tensor) or images.ndim != 4:
        raise ValueError("TokenMixup mixes images of one size, as a tensor b 3 h w")
    shape = (len(images), num_classes)
    found = targets.shape if isinstance(targets, Tensor) else type(targets)
    if found != shape or not len(images):
        raise ValueError(
            f"targets {found}: must be probabilities b c of at least one image, here {shape}, "
            "such as F.one_hot(classes, c)"
        )
    if targets.device.type != "cpu":  # looking would wait for it
        return targets
    close = (targets.sum(dim=1, dtype=torch.float32) - 1).abs() < SUM_ROUNDING  # false for nan
    if not (good := close & (targets >= 0).all(dim=1)).all():
        row = int(good.int().argmin())
        raise ValueError(
            f"targets[{row}]: must be probabilities, which are >= 0 and sum to 1; it sums to "
            f"{float(targets[row].sum()):g}, its lowest value is {float(targets[row].min()):g}"
        )
    return targets


@dataclass
class BlockPass:
    """Block `index` in one pass: its input, from which a detector computes saliency."""

    encoder: Encoder
    index: int
    tokens: Tensor  # b n d, after mixing the mixed ones
    given: dict[str, Any]  # the block's further arguments, which it passes to its attention
    pixels: Tensor | None = None  # b h w, magnitude of the input gradient
    grid: tuple[int, int] | None = None  # rows and columns of patches, if known
    memory: Memory | None = None  # that its attention reads (VTM)
    later: Sequence[Memory] = ()  # of later blocks, which it feeds
    remembers_in_attention: bool = False  # which may compute the map anyway
    saliency: Tensor | None = None  # b t, by the block's own attention map, once computed
    projected: Sequence[Tensor] = ()  # b n k, the block's own projections, once computed
    where: Positions | None = None  # positional terms of the tokens, once computed
    called: tuple[Any, ...] = ()  # the block's positional arguments, before mixing

    def __post_init__(self) -> None:
        self.block: Block = self.encoder.blocks[self.index]
        self.num_prefix_tokens = self.encoder.num_prefix_tokens
        self.class_token = self.encoder.reads_class_token  # by whose row saliency then is
        if self.encoder.has_parts:
            self.parts = self.block.parts()

    def inputs(self) -> tuple[Any, ...]:
        """Returns the block's positional arguments, with the tokens as they are now."""
        first, *others = self.called
        return self.block.adapter.tokens[1](self.tokens, first), *others

    def own_saliency(self) -> Tensor:
        """Returns the saliency by the block's own attention map, `b t`; computed once.

        Keeps the projections for the block's attention, if it has Parts.
        """
        if self.saliency is None and (of_block := self.block.adapter.saliency) is not None:
            with torch.no_grad():
                self.saliency = of_block(self.block.module, *self.inputs(), **self.given)
        elif self.saliency is None:
            q, k = self.queries_and_keys()
            self.saliency = self.saliency_by(q, k, self.class_token)
        return self.saliency

    def queries_and_keys(self) -> list[Tensor]:
        """Returns the block's own queries and keys, `b h n e`, and keeps its projections."""
        normed = self.block.norm(self.tokens)
        self.projected = projections(self.parts, normed)
        with torch.no_grad():
            return project(self.parts, normed, self._positions().rope, self.projected)[:2]

    def saliency_by(self, q: Tensor, k: Tensor, class_token: bool) -> Tensor:
        """Returns the saliency, `b t`, by queries and keys, `b h n e`.

        `class_token`: by its row of the attention map, else by the mean over all rows.
        """
        bias, rows = self._positions().bias, 1 if class_token else None
        bias = None if bias is None else bias[:, :, :rows]
        attention = received(self.parts, q[:, :, :rows], k, bias)
        return attention[:, self.num_prefix_tokens :]

    def _positions(self) -> Positions:
        if self.where is None:
            n = self.tokens.shape[1]
            self.where = positions(self.parts, n, self.given, dropout=False)
        return self.where

    def mix(self, mix: HorizontalMix, moves_saliency: bool) -> None:
        """Replaces the tokens by the mixed ones; what is known of them moves along."""
        if self.later and self.saliency is not None and moves_saliency:
            self.saliency = torch.where(mix.mask, self.saliency[mix.donor], self.saliency)
        self.projected = [mix.exchange(y) for y in self.projected]
        self.tokens = mix.tokens

    def remember(self, saliency: Tensor) -> None:
        """Stores the most salient tokens, by `b t`, for every later layer of VTM."""
        for memory in self.later:
            memory.remember(self.tokens, saliency, self.num_prefix_tokens)

    def attend(self, normed: Tensor, **given: Any) -> Tensor:
        """Answers in place of the block's attention: `b n d`, layer-normed, -> `b n d`.

        `given`: further arguments of the attention. Projections that are known are not computed
        again. VTM's layer attends to the memory too (Eq. 13).
        """
        where = positions(self.parts, normed.shape[1], given)
        if self.memory is not None:
            where = where.of_memory(self.memory.indices)
            own = [] if self.projected else [self.tokens]
            context = self.block.norm(torch.cat([*own, *self.memory.tokens], dim=1))
            return vertical_attention(self.parts, normed, context, where, self.projected)
        q, k, v = project(self.parts, normed, where.rope, self.projected)
        if not self.remembers_in_attention:
            return attend(self.parts, normed, q, k, v, where.bias)
        if self.parts.fused or where.bias is not None:  # a bias may contain dropout
            self.remember(self.saliency_by(q, k, self.class_token))
            return attend(self.parts, normed, q, k, v, where.bias)
        weights = composed_map(self.parts, q, k)
        self.remember(attention_saliency(weights, self.num_prefix_tokens, self.class_token))
        return attend_by_map(self.parts, normed, weights, v)


class Required(NamedTuple):
    """The blocks, by index, that a pass must enter, whose attention it must answer, and rerun."""

    entered: tuple[int, ...] = ()
    answered: tuple[int, ...] = ()
    rerun: tuple[int, ...] = ()


@dataclass
class ForwardPass:
    """The state of one training forward pass."""

    encoder: Encoder | None  # None if nothing happens inside of the model
    required: Required
    targets: Tensor  # b c, as mixed so far
    pixels: Tensor | None = None  # b h w, magnitude of the input gradient
    manifold: ManifoldMix | None = None
    num_patches: int | None = None  # of the patch embedding's output
    grid: tuple[int, int] | None = None  # rows and columns of patches
    memories: dict[int, Memory] = field(default_factory=dict)  # by the layer that attends to it
    layers: list[LayerMix] = field(default_factory=list)  # of HTM
    mixes: dict[int, HorizontalMix] = field(default_factory=dict)  # by layer of HTM
    blocks: dict[int, BlockPass] = field(default_factory=dict)  # that have run, by index
    answered: list[int] = field(default_factory=list)  # blocks whose attention has run
    rerun: list[int] = field(default_factory=list)  # blocks that the backward pass runs again

    def __post_init__(self) -> None:
        self.graph = _graph()

    def note_patches(self, embedding: Any, images: Any, out: Any) -> None:
        """Keeps number and grid of the patches, by what Adapter.patch_embed returns."""
        if not isinstance(out, Tensor) or out.ndim not in (3, 4):
            return
        out = out.movedim(1, -1) if isinstance(embedding, nn.Conv2d) else out
        self.num_patches = out.shape[1:-1].numel()
        if out.ndim == 4:
            self.grid = (out.shape[1], out.shape[2])
        elif hasattr(embedding, "dynamic_feat_size"):
            rows, columns = embedding.dynamic_feat_size(tuple(images.shape[-2:]))
            self.grid = (rows, columns) if rows * columns == self.num_patches else None

    def enter(self, index: int, args: tuple[Any, ...], given: dict[str, Any]) -> BlockPass:
        """Begins the pass through a block. Raises ValueError for one that runs out of order."""
        encoder = self.encoder
        assert encoder is not None, "without one nothing has a stand-in"
        tokens = _tokens_of(encoder, index, args)
        if any(index <= entered for entered in self.blocks):
            raise ValueError(f"block {index} runs again: must run once in a forward pass, in order")
        self._check_graph(index)
        n, prefix = tokens.shape[1], encoder.num_prefix_tokens
        patches = n - prefix if self.num_patches is None else self.num_patches
        if encoder.has_parts and (n != prefix + patches or n <= prefix):
            raise ValueError(
                f"{self._name(index)} gets {n} tokens for {patches} patches, but must get "
                f"{prefix} more, which come first (num_prefix_tokens={prefix})"
            )
        spatial, grid = args[0].shape[1:-1], self.grid if patches == n - prefix else None
        if len(spatial) == 2 and spatial.numel() == n:  # a map with its channels last
            grid = (spatial[0], spatial[1])
        self.blocks[index] = BlockPass(
            encoder,
            index,
            tokens,
            given,
            pixels=self.pixels,
            grid=grid,
            memory=self.memories.get(index),
            later=[memory for layer, memory in self.memories.items() if layer > index],
            called=args,
        )
        return self.blocks[index]

    def attention_of(self, index: int) -> BlockPass:
        """Begins the attention of a block. Raises ValueError if it runs twice, or outside of it."""
        if index not in self.blocks or index in self.answered:
            raise ValueError(f"the attention of block {index} must run once, inside of the block")
        self._check_graph(index)
        self.answered.append(index)
        return self.blocks[index]

    def _check_graph(self, index: int) -> None:
        """Raises ValueError where the model's own checkpointing would run a block again."""
        if self.graph != _graph():
            raise ValueError(f"{self._name(index)} {OWN_CHECKPOINTING}")

    def _name(self, index: int) -> str:
        assert self.encoder is not None, "without one nothing has a stand-in"
        return f"block {index} ({type(self.encoder.blocks[index].module).__name__})"

    def check_complete(self) -> None:
        """Raises ValueError unless all has run that must."""
        entered, answered, rerun = self.required
        drawn = () if self.manifold is None else (self.manifold.layer,)
        for index in (*entered, *drawn):
            if index not in self.blocks:
                raise ValueError(f"{self._name(index)} did not run: TokenMixup touches it")
        for index in answered:
            if index not in self.answered:
                raise ValueError(f"{self._name(index)} ran without its attention")
        for index in rerun:
            if index not in self.rerun:
                raise ValueError(f"checkpoint_blocks=True: {self._name(index)} did not run")

    def output(self, logits: Any, score_loss_weight: float = 0.0) -> Output:
        """Returns the output of the pass. Raises ValueError if the logits are not `b c`."""
        shape = [*logits.shape] if isinstance(logits, Tensor) else type(logits).__name__
        if shape != (expected := [*self.targets.shape]):
            raise ValueError(f"the model returned {shape}, not one tensor of logits {expected}")
        if not self.layers:
            return Output(logits, self.targets)
        return Output(
            logits,
            self.targets,
            reduce(torch.add, [mix.difficulty.mean() for mix in self.layers]),
            reduce(torch.logical_or, [mix.is_easy for mix in self.layers]),
            reduce(torch.logical_or, [mix.mask for mix in self.layers]),
            reduce(torch.add, [mix.gain for mix in self.layers]),
            tuple(self.layers),
            score_loss_weight,
        )


def _tokens_of(encoder: Encoder, index: int, args: tuple[Any, ...]) -> Tensor:
    """Returns the tokens that enter a block, `b n d`. Raises ValueError for other arguments."""
    if not args:
        raise ValueError(f"block {index} gets its tokens by keyword: must be first argument")
    x, dims = args[0], (3,) if encoder.has_parts else (3, 4)
    if not isinstance(x, Tensor) or x.ndim not in dims:
        found = [*getattr(x, "shape", [])] or type(x).__name__
        raise ValueError(f"block {index} gets {found}: must be tokens b n d")
    if encoder.has_parts and any(value is not None for value in args[1:]):
        raise ValueError(f"block {index} gets further positional arguments: not supported")
    return encoder.blocks[index].adapter.tokens[0](x)


@torch.compiler.disable
def _not_finite(images: Tensor) -> list[int]:
    """Returns the samples that are not finite; looks at them on a CPU only."""
    if images.device.type != "cpu":
        return []
    return (~images.flatten(1).isfinite().all(dim=1)).nonzero().flatten().tolist()


def _graph() -> tuple[bool, Any]:
    """Returns whether gradients are recorded, and by which checkpoint (of torch, not reentrant)."""
    if torch.compiler.is_compiling():  # it reruns rightly
        return torch.is_grad_enabled(), None
    packing = torch._C._autograd._top_saved_tensors_default_hooks(False)
    checkpointing = packing is not None and packing[0].__module__ == "torch.utils.checkpoint"
    return torch.is_grad_enabled(), packing[0] if checkpointing else None
