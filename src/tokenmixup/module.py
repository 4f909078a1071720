"""What `attach` does to a transformer, without editing it: HTM, VTM and manifold mixup.

During a training pass another function stands in for `forward` of the modules in brackets. What a
block consists of is nobody's business: its attention map is seen while the block computes it (see
`watch.py`), and VTM is the block on n + m tokens, cut to n. Evaluation is the plain model, bit for
bit.

    images, targets          checked; layer and partners of manifold mixup drawn, pixels' gradient
        |
    [patch embedding]        says how many patches there are, and in which grid
        |
        | tokens b n d
    [block]  ................ manifold mixup, if this layer is drawn: tokens, targets
        |                     layer of HTM: ScoreNet -> difficulty; a first run of the block, left
        |                        at its map -> saliency; Algorithm 1 -> tokens, targets
        |                     layer of VTM: the memory's m tokens are put behind the n
        |
        +-- own forward, whose map is seen, on n or n + m tokens
        |
        |                     layer of VTM: the first n tokens are kept
        |                     block before it: its most salient inputs -> that layer's memory
        | tokens b n d
    [block]  ................ one that nothing touches: as it is, or `checkpoint_blocks`
        |
    logits b c  ............. Output, if each block that must run has run

Letters: b batch, n tokens with prefix, t spatial tokens, d width, c classes, m memory, h w image.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._functorch import config
from torch.utils.checkpoint import checkpoint

from tokenmixup.adapters import (
    Adapter,
    adapter_of,
    blocks_of,
    check_unwrapped,
    has_class_token,
    is_sharded,
    name_of,
    patch_embed_of,
    width_of,
)
from tokenmixup.contexts import evaluating
from tokenmixup.horizontal import PAPER, Rules
from tokenmixup.manifold import ManifoldMix, draw_manifold_mix
from tokenmixup.output import LayerMix, Output
from tokenmixup.passes import Pass, stand_in
from tokenmixup.rules import rules_of
from tokenmixup.saliency import Detector, by_attention, detector_of, input_gradient
from tokenmixup.scorenet import Pooling, ScoreNet
from tokenmixup.settings import HTM, VTM, ManifoldMixup, built

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
SUM_ROUNDING = 0.01  # of the sum of 1,000 smoothed probabilities in bfloat16
Forwards = list[tuple[nn.Module, Any]]  # modules and their `forward`; None: that of the class


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
    are looked at on a CPU only), a block whose map is not seen, and one that is skipped, repeated
    or checkpointed by the model itself; on a CPU FloatingPointError if the gain of an easy sample
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
        if type(num_classes) is not int or num_classes < 1:
            raise ValueError(f"num_classes={num_classes!r}: must be an int, 1 or more")
        self.htm, self.vtm = built(HTM, htm), built(VTM, vtm)
        self.htm = self.htm and self.htm.for_classes(num_classes)
        self.manifold_mixup = built(ManifoldMixup, manifold_mixup)
        self.model, self.num_classes = model, num_classes
        self.checkpoint_blocks = checkpoint_blocks
        self._told, self.adapter = adapter, adapter or adapter_of(model)
        # What mixes in training, by layer; nothing after `stop_mixing`.
        self._htm: dict[int, HTM] = {} if self.htm is None else self.htm.each
        self._vtm: dict[int, VTM] = {} if self.vtm is None else self.vtm.each
        self._manifold = self.manifold_mixup
        mixed = () if self._manifold is None else self._manifold.layers
        sources = range(max(self._vtm, default=-1) + 1)
        self._touched = sorted({*self._htm, *sources, *mixed})  # blocks that must run
        self._blocks: list[nn.Module] = []
        self._running: list[Pass] = []  # the pass that runs, if one does; stand-ins share the list
        self._stand_ins: tuple[Any, list[Any]] = (None, [])
        if self._touched or checkpoint_blocks:
            check_unwrapped(model)
            self._look_up()
        self.scorenets = nn.ModuleDict({str(x): self._new_scorenet(x) for x in self._htm})
        self.rules: Rules = PAPER if self.htm is None else rules_of(self.htm)
        self.detect: Detector = by_attention if self.htm is None else detector_of(self.htm)

    def _new_scorenet(self, layer: int) -> ScoreNet:
        assert self.htm is not None, "it has layers"
        own = "class_token" if self.adapter.reads_class_token else "attention"
        pooling = cast(Pooling, own if self.htm.pooling == "auto" else self.htm.pooling)
        width = width_of(self.model, self._blocks[layer], self.adapter)
        scorenet = ScoreNet(width, self.num_classes, pooling, self.htm.stop_gradient)
        like = next(self.model.parameters())
        return scorenet.to(like.device, like.dtype)

    @torch._dynamo.decorators.skip  # a compiler begins at `_run`
    def forward(self, images: Tensor, targets: Tensor | None = None) -> Any:
        """Checks the batch, draws what is drawn for it as a whole, and runs the pass."""
        if not self.training:
            return logits_of(self.model(images))
        before, pixels, manifold = self._begin(images, targets)
        try:
            # Compiled, its backward pass is without autocast, as an eager one: ScoreNet's is exact.
            with config.patch("backward_pass_autocast", "off"):
                return self._run(images, targets, pixels, manifold)
        except FloatingPointError as error:
            bad = (~images.flatten(1).isfinite().all(dim=1)).nonzero().flatten().tolist()
            told = f"images{bad}: not finite; {error}" if bad else str(error)
            raise FloatingPointError(told) from error
        finally:
            put_back(before)

    def _run(
        self, images: Tensor, targets: Any, pixels: Tensor | None, manifold: ManifoldMix | None
    ) -> Output:
        state = Pass(self, targets, pixels, manifold)
        self._running.append(state)
        try:
            logits = logits_of(self.model(images))
        finally:
            self._running.clear()
        return state.output(logits)

    @torch.compiler.disable
    def _begin(
        self, images: Tensor, targets: Any
    ) -> tuple[Forwards, Tensor | None, ManifoldMix | None]:
        """Puts the stand-ins of a pass in their places, once its batch is checked.

        Returns the `forward` of each module that it replaced, the input gradient, `b h w`, and
        manifold mixup's draws.
        """
        if getattr(self, "_is_replica", False):
            raise ValueError("TokenMixup trains under DistributedDataParallel, not DataParallel")
        check_batch(images, targets, self.num_classes)
        if self._touched or self.checkpoint_blocks:
            self._look_up()
        pixels = self._input_gradient(images, targets)
        manifold = None if self._manifold is None else draw_manifold_mix(self._manifold, images)
        return self._put_stand_ins(), pixels, manifold

    def _look_up(self) -> None:
        """Finds the blocks as they are now. Raises ValueError if they cannot serve."""
        adapter = self._told or adapter_of(self.model)
        blocks = blocks_of(self.model, self._told)
        self._check_settings(blocks, adapter)
        if adapter != self.adapter or blocks != self._blocks:  # a compiler looks at identity
            self.adapter, self._blocks = adapter, blocks

    def _check_settings(self, blocks: Sequence[nn.Module], adapter: Adapter) -> None:
        """Raises ValueError if blocks are missing or cannot serve a setting."""
        model, kind, vtm = self.model, type(self.model).__name__, self._vtm
        htm = next(iter(self._htm.values()), None)  # the layers differ in tau and rho
        steps = 0 if htm is None else htm.rollout_steps
        for key, layers in (
            ("htm.layer", self._htm),
            ("vtm.layer", vtm),
            ("manifold_mixup.layers", () if self._manifold is None else self._manifold.layers),
            ("htm.layer + htm.rollout_steps", [layer + steps for layer in self._htm]),
        ):
            if (last := max(layers, default=0)) >= len(blocks):
                raise ValueError(f"{key}={last}: {kind} has blocks 0..{len(blocks) - 1}")

        def need(key: str, what: str, is_met: Any) -> None:
            if not is_met:
                raise ValueError(f"{key}: needs {what}, which {kind} does not have")

        over_all, token = "attention over all tokens", "a class token in the blocks"
        has_all, prefix = adapter.attends_to_all, adapter.num_prefix_tokens
        has_token = adapter.reads_class_token or (prefix > 0 and has_class_token(model))
        published = any(x.class_token_offset == "published" for x in vtm.values())
        own_rope = any(getattr(model, f"rope_{x}mixed", False) for x in ("", "is_"))
        need(f"vtm.layer={min(vtm, default=0)}", over_all, has_all or not vtm)
        need("vtm.class_token_offset=published", token, has_token or not published)
        if htm is not None:
            by_pixels, rolls = htm.detector == "gradient", f"htm.rollout_steps={steps}"
            need("htm.pooling=class_token", token, has_token or htm.pooling != "class_token")
            need("htm.detector=gradient", "tokens row by row", adapter.in_rows or not by_pixels)
            need(rolls, over_all, has_all or not steps)
            need(rolls, "blocks that share their rotary positions", not (own_rope and steps))
            whole = not (by_pixels or steps) or not is_sharded(self)  # FSDP gathers for one pass
            need(rolls if steps else "htm.detector=gradient", "parameters without FSDP", whole)
        if len({width_of(model, blocks[layer], adapter) for layer in self._htm}) > 1:
            raise ValueError(f"htm.layer={[*self._htm]}: must lie in one stage of {kind}")
        for layer in (*self._htm, *vtm):
            for part in blocks[layer].modules():
                if isinstance(part, BATCH_NORMS):
                    name = f"{name_of(layer, blocks[layer])} has a {type(part).__name__}"
                    raise ValueError(f"{kind}: {name}, whose statistics would see tokens twice")

    def _input_gradient(self, images: Tensor, targets: Tensor) -> Tensor | None:
        """Returns the input gradient if HTM takes it."""
        htm = next(iter(self._htm.values()), None)
        if htm is None or htm.detector != "gradient":
            return None
        with evaluating(self.model):
            exact = images.to(next(self.model.parameters()).dtype)  # autocast is off there
            return input_gradient(lambda x: logits_of(self.model(x)), exact, targets)

    def _put_stand_ins(self) -> Forwards:
        """Replaces `forward` of the modules that a pass goes through. Returns what was there."""
        found = list[tuple[nn.Module, Any]]()  # and the method of Pass, with its argument
        if self._touched and (part := patch_embed_of(self.model, self.adapter)) is not None:
            found.append((part, (Pass.embed, part)))
        for index, block in enumerate(self._blocks):
            if index in self._touched:
                found.append((block, (Pass.run_block, index)))
            elif self.checkpoint_blocks:
                found.append((block, None))
        before = [(module, vars(module).get("forward")) for module, _ in found]
        if self._stand_ins[0] != (found, before):  # else the same, which a compiler asks for
            plain = [own or partial(forward_of_class, module) for module, own in before]
            self._stand_ins = (
                (found, before),
                [
                    partial(checkpoint, run, use_reentrant=False)
                    if what is None
                    else partial(stand_in, self._running, *what, run)
                    for run, (_, what) in zip(plain, found, strict=True)
                ],
            )
        for (module, _), forward in zip(found, self._stand_ins[1], strict=True):
            setattr(module, "forward", forward)
        return before

    def stop_mixing(self) -> None:
        """Disables all mixing in training for good and freezes the ScoreNets.

        Not part of the state dict: call it again after a resume. A DistributedDataParallel wrapper
        waits for the gradients of the ScoreNets: wrap the module again.
        """
        self._htm, self._vtm, self._manifold, self._touched = {}, {}, None, []
        self.scorenets.requires_grad_(False)

    @torch.no_grad()
    def mixed_pairs(self, images: Tensor, targets: Tensor) -> LayerMix | None:
        """Returns what HTM's first layer makes of these images; None without HTM.

        Runs the model in its current mode: training mode has dropout and updates running
        statistics. Raises the errors of a training pass.
        """
        mode, self.training = self.training, True  # of this module alone
        try:
            return next(iter(self.forward(images, targets).layers), None)
        finally:
            self.training = mode

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

        def match(coarse: bool = False) -> Callable[[str], int]:
            from timm.models import group_parameters  # timm alone calls this

            groups = group_parameters(self.model, own(coarse=coarse), reverse=True)
            last = max(groups.values())
            return lambda name: groups.get(name.removeprefix("model."), last)

        return match


attach = TokenMixup  # `attach(model, ...)` says what happens to the model


def forward_of_class(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs the `forward` that the class of a module has now."""
    return type(module).forward(module, *args, **kwargs)


@torch.compiler.disable
def put_back(forwards: Forwards) -> None:
    """Takes the stand-ins away."""
    for module, forward in forwards:
        del module.forward
        if forward is not None:
            setattr(module, "forward", forward)


def check_batch(images: Any, targets: Any, num_classes: int) -> None:
    """Raises TypeError without targets, ValueError unless `b 3 h w` and probabilities `b c`.

    Their values are looked at on a CPU only.
    """
    if targets is None:
        raise TypeError("training needs module(images, targets) with targets b c")
    if not isinstance(images, Tensor) or images.ndim != 4:
        raise ValueError("TokenMixup mixes images of one size, as a tensor b 3 h w")
    shape = (len(images), num_classes)
    found = targets.shape if isinstance(targets, Tensor) else type(targets)
    if found != shape or not len(images):
        must = f"must be probabilities b c of at least one image, here {shape}"
        raise ValueError(f"targets {found}: {must}, such as F.one_hot(classes, c)")
    if targets.device.type != "cpu":  # looking would wait for it
        return
    close = (targets.sum(dim=1, dtype=torch.float32) - 1).abs() < SUM_ROUNDING  # false for nan
    if not (good := close & (targets >= 0).all(dim=1)).all():
        row = int(good.int().argmin())
        total, least = (float(x) for x in (targets[row].sum(), targets[row].min()))
        must = "must be probabilities, which are >= 0 and sum to 1"
        raise ValueError(f"targets[{row}]: {must}; sum {total:g}, lowest value {least:g}")


def logits_of(out: Any) -> Any:
    """Returns the logits of what a model returns, such as an output of transformers."""
    return out if isinstance(out, Tensor) else getattr(out, "logits", out)
