"""What `attach` does to a transformer, without editing it: HTM, VTM and manifold mixup.

During a training pass another function stands in for `forward` of the modules in brackets. It does
not matter what a block consists of: its attention map is seen while the block computes it (see
`watch.py`), and for VTM that attention gets keys and values of m tokens of memory beside those of
the block's own n. Evaluation is the plain model, bit for bit.

    images, targets          checked; what is assumed of a block is tried out (`prove.py`);
        |                    the draws of manifold mixup; the input gradient, if HTM takes it
        |
    [patch embedding]        says how many patches there are, and in which grid
        |
        | tokens b n d
    [block]  ................ manifold mixup, if this layer is drawn: tokens, targets
        |                     layer of HTM: ScoreNet -> difficulty; a first run of the block, ended
        |                        once its map is known -> saliency; Algorithm 1 -> tokens, targets
        |                     layer of VTM: a run on the memory's m tokens, ended once their keys
        |                        and values are known
        |
        +-- own forward, whose map is seen, over n or n + m keys
        |
        |                     block before VTM: its most salient inputs -> that layer's memory
        | tokens b n d
    [block]  ................ one that nothing touches: as it is, or under `checkpoint_blocks`
        |
    logits b c  ............. Output, if each block that must run has run

Letters: b batch, n tokens with prefix, t spatial tokens, d width, c classes, m memory, h w image.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

from tokenmixup.adapters import (
    Adapter,
    adapter_of,
    blocks_of,
    check_unwrapped,
    checked_adapter_of,
    is_sharded,
    patch_embed_of,
    width_of,
)
from tokenmixup.block import Forward, PlainModule, Plan, plain_forward
from tokenmixup.contexts import evaluating
from tokenmixup.horizontal import PAPER, HorizontalMix
from tokenmixup.kept import generators_of, unchanged
from tokenmixup.manifold import ManifoldMix, draw_manifold_mix
from tokenmixup.needs import Mixing, check_layers, check_needs
from tokenmixup.output import Output
from tokenmixup.passes import Pass, PatchEmbedding, run_in_pass
from tokenmixup.prove import (
    Sights,
    are_proved,
    can_run_alone,
    check_block,
    is_unchanged,
    mode_of,
    modules_of,
    state_of,
)
from tokenmixup.rules import rules_of
from tokenmixup.saliency import (
    Detector,
    by_attention,
    detector_of,
    input_gradient,
    reads_map,
    takes_gradient,
)
from tokenmixup.scorenet import ScoreNet
from tokenmixup.settings import HTM, VTM, ManifoldMixup, built

SUM_ROUNDING = 0.01  # of the sum of 1,000 smoothed probabilities in bfloat16


class StandIn(NamedTuple):
    """What runs instead of the `forward` of a module during a pass."""

    module: nn.Module
    own: Forward | None  # what the instance has as `forward`; None: that of its class
    forward: Forward


class Settled(NamedTuple):
    """What is known of a model, as long as it is what was `seen`, and its blocks' `state`."""

    seen: list[Any]
    blocks: list[nn.Module]
    modules: list[nn.Module]  # of the blocks that something touches
    state: list[Any]  # of these modules
    plans: dict[int, Plan]  # by index, of the blocks that something touches
    stand_ins: list[StandIn]
    sights: dict[Any, Sights]  # by the mode of training


NOTHING = Settled(seen=[], blocks=[], modules=[], state=[], plans={}, stand_ins=[], sights={})


class Begun(NamedTuple):
    """What is computed, drawn and asked before a pass runs."""

    gradient: Tensor | None  # b h w, of the input
    manifold: ManifoldMix | None  # the draws
    is_proved: bool  # whether each block has been tried out


class TokenMixup(nn.Module):
    """`module(images, targets)` -> Output in training, `module(images)` -> logits in evaluation.

    `model`: a stock model, used in place; `num_classes`: of its logits. `htm`, `vtm`,
    `manifold_mixup`: settings, as mappings or dataclasses; None disables a method.
    `checkpoint_blocks`: recomputes activations in the backward pass (gradient checkpointing) of all
    blocks but those of HTM, VTM, its sources and manifold mixup. `adapter`: needed if the model has
    other names than timm's and is no known class of torchvision or transformers. Raises ValueError
    for an unsupported model, a layer that it does not have, or an invalid setting.

    `images`: `b 3 h w`; `targets`: `b c`, probabilities after any input mixup. Evaluation ignores
    targets. Training raises TypeError without them; ValueError for images or targets of another
    kind (values of targets are read on a CPU only), a block whose map is not seen, and one that is
    skipped, repeated or checkpointed by the model itself; FloatingPointError if saliency is not
    finite, as `assignment.optimal_donors` says. HTM's `rules` and `detect` may be replaced.
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
        self.model = model
        self.num_classes = num_classes
        self.htm = built(HTM, htm)
        self.vtm = built(VTM, vtm)
        self.manifold_mixup = built(ManifoldMixup, manifold_mixup)
        self.checkpoint_blocks = checkpoint_blocks
        self.rules = PAPER
        self.detect: Detector = by_attention
        if self.htm is not None:
            self.htm = self.htm.for_classes(num_classes)  # `tau=auto` becomes a number
            self.rules = rules_of(self.htm)
            self.detect = detector_of(self.htm)
        self._mixing = Mixing(  # empty after `stop_mixing`
            htm={} if self.htm is None else self.htm.by_layer,
            vtm={} if self.vtm is None else self.vtm.by_layer,
            manifold=self.manifold_mixup,
        )
        self._given_adapter = adapter
        self.adapter = adapter or adapter_of(model)
        self._settled = NOTHING
        self._sights: Sights = {}  # in the present mode of training
        self._running: list[Pass] = []  # the pass while it runs, which the stand-ins outlive
        if self._mixing.touched() or checkpoint_blocks:
            check_unwrapped(model)
            self._look_up()
        self.scorenets = nn.ModuleDict({str(x): self._new_scorenet(x) for x in self._mixing.htm})

    def __getstate__(self) -> dict[str, Any]:
        """A copy settles its own: plans, proofs and stand-ins hold modules of this one."""
        return {**vars(self), "_settled": NOTHING, "_sights": {}}

    def _new_scorenet(self, layer: int) -> ScoreNet:
        assert self.htm is not None  # it has layers
        pooling = self.htm.pooling
        if pooling == "auto":
            pooling = "class_token" if self.adapter.reads_class_token else "attention"
        width = width_of(self.model, self._settled.blocks[layer], self.adapter)
        scorenet = ScoreNet(width, self.num_classes, pooling, self.htm.stop_gradient)
        like = next(self.model.parameters())
        return scorenet.to(like.device, like.dtype)

    @overload
    def forward(self, images: Tensor) -> Tensor: ...

    @overload
    def forward(self, images: Tensor, targets: Tensor) -> Output: ...

    @torch._dynamo.decorators.skip  # not traced itself, but what it calls: the graph is `_run`
    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor | Output:
        """Checks the batch, draws what is drawn for it as a whole, and runs the pass."""
        if not self.training:
            return logits_of(self.model(images))
        begun = self._begin(images, targets)
        assert targets is not None  # or the batch was refused
        try:
            if not begun.is_proved and get_eval_frame_callback():  # a compiler's
                self._run_apart(images, targets, begun)
            # A compiler would trace the backward pass under the autocast of this call. With "off"
            # it has none, as in eager mode: ScoreNet's gradients have its parameters' precision.
            with functorch_config.patch("backward_pass_autocast", "off"):
                return self._run(images, targets, begun.gradient, begun.manifold)
        except FloatingPointError as error:
            are_finite = images.flatten(1).isfinite().all(dim=1)
            bad = (~are_finite).nonzero().flatten().tolist()
            if not bad:
                raise
            raise FloatingPointError(f"images{bad}: not finite; {error}") from error
        finally:
            take_away(self._settled.stand_ins)

    @torch.compiler.disable
    def _run_apart(self, images: Tensor, targets: Tensor, begun: Begun) -> None:
        """Runs a pass that proves the blocks before a compiler meets them, and leaves nothing."""
        with unchanged(self.model, *generators_of(images.device)):
            self._run(images, targets, begun.gradient, begun.manifold)

    def _run(
        self,
        images: Tensor,
        targets: Tensor,
        input_gradient: Tensor | None,
        manifold: ManifoldMix | None,
    ) -> Output:
        state = Pass(
            plans=self._settled.plans,
            scorenets=self.scorenets,
            rules=self.rules,
            sights=self._sights,
            targets=targets,
            image_size=images.shape[2:],
            input_gradient=input_gradient,
            manifold=manifold,
        )
        self._running.append(state)
        try:
            logits = logits_of(self.model(images))
        finally:
            self._running.clear()
        score_loss_weight = 0.0 if self.htm is None else self.htm.score_loss_weight
        return state.output(logits, score_loss_weight)

    @torch.compiler.disable
    def _begin(self, images: Tensor, targets: Any) -> Begun:
        """Checks a batch, and the model if that has changed; computes the input gradient.

        Then draws for manifold mixup, and lets the stand-ins of the pass take over.
        """
        if getattr(self, "_is_replica", False):  # torch.nn.DataParallel says so of its copies
            raise ValueError("TokenMixup trains under DistributedDataParallel, not DataParallel")
        check_batch(images, targets, self.num_classes)
        if self._mixing.touched() or self.checkpoint_blocks:
            self._look_up()
            mode = mode_of(self._settled.modules, images)
            self._sights = self._settled.sights.setdefault(mode, {})
        gradient = self._input_gradient(images, targets)
        manifold = None
        if self._mixing.manifold is not None:
            manifold = draw_manifold_mix(self._mixing.manifold, images)
        for each in self._settled.stand_ins:
            vars(each.module)["forward"] = each.forward
        return Begun(gradient, manifold, are_proved(self._settled.plans, self._sights))

    def _look_up(self) -> None:
        """Settles what is known of the model, unless it is as it was.

        Raises ValueError if it cannot serve.
        """
        adapter = self._given_adapter or checked_adapter_of(self.model)
        blocks = blocks_of(self.model, adapter)
        embedding = patch_embed_of(self.model, adapter)
        device = next(self.model.parameters()).device
        seen = [type(self), adapter, self.detect, self.checkpoint_blocks, device]
        for module in (self.model, *blocks, embedding):  # FSDP changes types
            seen += [module, type(module), getattr(module, "forward", None)]
        settled = self._settled
        if seen == settled.seen and is_unchanged(settled.modules, settled.state):
            return  # keeps the plans, whose identity torch.compile guards
        check_layers(self._mixing, self.model, blocks, adapter)
        check_needs(self._mixing, self.detect, self.model, adapter, is_sharded(self))
        self.adapter = adapter
        can_run = can_run_alone(self.model, device)
        touched = self._mixing.touched()
        plans = {index: self._plan(index, blocks, can_run) for index in touched}
        stand_ins = self._stand_ins(blocks, plans, embedding)
        modules = modules_of(blocks[index] for index in touched)
        state = state_of(modules)
        self._settled = Settled(seen, blocks, modules, state, plans, stand_ins, sights={})

    def _stand_ins(
        self, blocks: Sequence[nn.Module], plans: Mapping[int, Plan], embedding: nn.Module | None
    ) -> list[StandIn]:
        """Returns those of the embedding, and of blocks that something touches or reruns."""
        runs: dict[nn.Module, Forward] = {}
        for index, block in enumerate(blocks):
            if index in plans:
                runs[block] = partial(run_in_pass, self._running, Pass.run_block, plans[index])
            elif self.checkpoint_blocks:
                runs[block] = partial(checkpoint, plain_forward(block), use_reentrant=False)
        if plans and embedding is not None:
            is_convolution = isinstance(embedding, nn.Conv2d)
            channels_first = is_convolution or self.adapter.channels_first
            part = PatchEmbedding(plain_forward(embedding), channels_first)
            runs[embedding] = partial(run_in_pass, self._running, Pass.embed, part)
        return [StandIn(x, vars(x).get("forward"), run) for x, run in runs.items()]

    def _plan(self, index: int, blocks: Sequence[nn.Module], can_run: bool) -> Plan:
        htm = self._mixing.htm.get(index)
        vtm = self._mixing.vtm.get(index)
        manifold = self._mixing.manifold
        is_source = index in self._mixing.sources()
        proved_by: Detector | None = None  # none for a user's own that does not say reads_map
        if htm is not None and reads_map(self.detect):
            proved_by = self.detect
        elif is_source or vtm is not None:
            proved_by = by_attention
        plan = Plan(
            index=index,
            name=f"block {index} ({type(blocks[index]).__name__})",
            blocks=[PlainModule(block, plain_forward(block)) for block in blocks[index:]],
            adapter=self.adapter,
            htm=htm,
            detect=self.detect,
            vtm=vtm,
            is_mixed=htm is not None or (manifold is not None and index in manifold.layers),
            is_source=is_source,
            proved_by=proved_by if can_run else None,
        )
        check_block(plan)
        return plan

    def _input_gradient(self, images: Tensor, targets: Tensor) -> Tensor | None:
        """Returns the input gradient if HTM takes it."""
        if not (self._mixing.htm and takes_gradient(self.detect)):
            return None
        with evaluating(self.model):
            images = images.to(next(self.model.parameters()).dtype)  # it runs without autocast
            return input_gradient(lambda x: logits_of(self.model(x)), images, targets)

    def stop_mixing(self) -> None:
        """Disables all mixing in training for good and freezes the ScoreNets.

        Not part of the state dict: call it again after a resume. A DistributedDataParallel wrapper
        waits for the gradients of the ScoreNets: wrap the module again.
        """
        self._mixing = Mixing()
        self._settled = NOTHING
        self.scorenets.requires_grad_(False)

    @torch.no_grad()
    def mixed_pairs(self, images: Tensor, targets: Tensor) -> HorizontalMix | None:
        """Returns what HTM's first layer makes of these images; None without HTM.

        Runs the model in its current mode: training mode has dropout and updates running
        statistics. Raises the errors of a training pass.
        """
        mode = self.training
        self.training = True  # of this module alone
        try:
            layers = self.forward(images, targets).layers
            return layers[0] if layers else None
        finally:
            self.training = mode

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters without weight decay; timm's optimisers call this."""
        exempt = getattr(self.model, "no_weight_decay", set)
        return {f"model.{name}" for name in exempt()}

    @property
    def pretrained_cfg(self) -> Any:
        """That of the model, by which timm resolves mean, std and size of the images."""
        return self.model.pretrained_cfg

    @property
    def group_matcher(self) -> Callable[..., Any]:
        """The model's layer groups, for timm's layer-wise learning rates. ScoreNets join the last.

        Raises AttributeError if the model has none, so that timm sees none.
        """
        matcher: Any = self.model.group_matcher

        def match(coarse: bool = False) -> Callable[[str], int]:
            from timm.models import group_parameters  # timm alone calls this

            groups = group_parameters(self.model, matcher(coarse=coarse), reverse=True)
            last = max(groups.values())
            return lambda name: groups.get(name.removeprefix("model."), last)

        return match


attach = TokenMixup  # `attach(model, ...)` says what happens to the model


@torch.compiler.disable
def take_away(stand_ins: Sequence[StandIn]) -> None:
    """Takes the stand-ins away, whatever has become of them."""
    for each in stand_ins:
        vars(each.module).pop("forward", None)
        if each.own is not None:
            vars(each.module)["forward"] = each.own


def check_batch(images: Any, targets: Any, num_classes: int) -> None:
    """Raises TypeError without targets, ValueError unless `b 3 h w` and probabilities `b c`.

    The values of targets are read on a CPU only.
    """
    if targets is None:
        raise TypeError("training needs module(images, targets) with targets b c")
    if not isinstance(images, Tensor) or images.ndim != 4:
        raise ValueError("TokenMixup mixes images of one size, as a tensor b 3 h w")
    shape = [len(images), num_classes]
    found = list(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
    if found != shape or not len(images):
        must = f"must be probabilities b c of at least one image, here {shape}"
        raise ValueError(f"targets {found}: {must}, such as F.one_hot(classes, c)")
    if targets.layout != torch.strided or images.layout != torch.strided:
        raise ValueError("images and targets: must be dense tensors, such as targets.to_dense()")
    if targets.device.type != "cpu":  # to read the values would be to wait for the GPU
        return
    sums = targets.sum(dim=1, dtype=torch.float32)
    sums_to_1 = (sums - 1).abs() < SUM_ROUNDING  # false for nan
    are_good = sums_to_1 & (targets >= 0).all(dim=1)
    if not are_good.all():
        row = int(are_good.int().argmin())
        total = float(targets[row].sum())
        least = float(targets[row].min())
        must = "must be probabilities, which are >= 0 and sum to 1"
        raise ValueError(f"targets[{row}]: {must}; sum {total:g}, lowest value {least:g}")


def logits_of(out: Any) -> Any:
    """Returns the logits of what a model returns, such as an output of transformers."""
    if isinstance(out, Tensor):
        return out
    return getattr(out, "logits", out)
