"""What `attach` does to a transformer, without editing it: HTM, VTM and manifold mixup.

During a training pass a wrapper runs in the place of `forward` of the blocks. It does not matter
what a block consists of: its attention map is seen while the block computes it (`attention.py`),
and for VTM that attention gets keys and values of m tokens of memory beside those of the block's
own n. Evaluation is the plain model, bit for bit.

    images, targets          checked; what is asked of a block (`contract.py`), once;
        |                    the draws of manifold mixup; the input gradient, if HTM takes it
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

from collections.abc import Mapping
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tokenmixup.adapters import Adapter, adapter_of, blocks_of, width_of
from tokenmixup.block import Detector, Forward, Plain, Plan
from tokenmixup.contexts import backward_without_autocast, evaluating
from tokenmixup.contract import check_block, check_model
from tokenmixup.horizontal import PAPER, HorizontalMix
from tokenmixup.manifold import ManifoldMix, draw_manifold_mix
from tokenmixup.needs import Mixing, check_layers, check_needs
from tokenmixup.output import Output
from tokenmixup.passes import Pass, run_in_pass
from tokenmixup.rules import rules_of
from tokenmixup.saliency import by_attention, detector_of, input_gradient, takes_gradient
from tokenmixup.scorenet import ScoreNet
from tokenmixup.settings import HTM, VTM, ManifoldMixup, built


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
    shape, a block whose map is not seen, and one that is skipped, repeated or checkpointed by the
    model itself; FloatingPointError if saliency is not finite, as
    `assignment.optimal_donors` says. HTM's `rules` may be replaced.
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
        self.model = model
        self.num_classes = num_classes
        self.htm = built(HTM, htm)
        self.vtm = built(VTM, vtm)
        self.manifold_mixup = built(ManifoldMixup, manifold_mixup)
        self.checkpoint_blocks = checkpoint_blocks
        self.rules = PAPER
        self._detect: Detector = by_attention
        if self.htm is not None:
            self.htm = self.htm.for_classes(num_classes)  # `tau=auto` becomes a number
            self.rules = rules_of(self.htm)
            self._detect = detector_of(self.htm)
        self._takes_gradient = takes_gradient(self._detect)
        self._mixing = Mixing(  # empty after `stop_mixing`
            htm={} if self.htm is None else self.htm.by_layer,
            vtm={} if self.vtm is None else self.vtm.by_layer,
            manifold=self.manifold_mixup,
        )
        self._running: list[Pass] = []  # the pass while it runs
        self._forget()
        self.adapter: Any = adapter  # an Adapter, if something touches blocks
        if self._touches_blocks:
            if hasattr(model, "_orig_mod"):
                raise ValueError("the model is compiled: attach first, then compile the module")
            self.adapter = adapter or adapter_of(model)
            self._look_up()
        self.scorenets = nn.ModuleDict({str(x): self._new_scorenet(x) for x in self._mixing.htm})

    def _forget(self) -> None:
        """Forgets the blocks, and what passes do at them."""
        self._blocks: list[Plain] = []
        self._plans: dict[int, Plan] = {}  # by index, of the blocks that something touches
        self._wrappers: list[tuple[Plain, Forward]] = []  # what runs instead of their `forward`
        self._touches_blocks = self.checkpoint_blocks or bool(self._mixing.touched())

    def __getstate__(self) -> dict[str, Any]:
        """A copy has its own plans and wrappers: these hold modules of this one."""
        return {**vars(self), "_blocks": [], "_plans": {}, "_wrappers": []}

    def _new_scorenet(self, layer: int) -> ScoreNet:
        assert self.htm is not None  # it has layers
        pooling = self.htm.pooling
        if pooling == "auto":
            pooling = "class_token" if self.adapter.reads_class_token else "attention"
        width = width_of(self.model, self._blocks[layer].module, self.adapter)
        scorenet = ScoreNet(width, self.num_classes, pooling, self.htm.stop_gradient)
        like = next(self.model.parameters())
        return scorenet.to(like.device, like.dtype)

    @overload
    def forward(self, images: Tensor) -> Tensor: ...

    @overload
    def forward(self, images: Tensor, targets: Tensor) -> Output: ...

    @torch.compiler.disable(recursive=False)  # what it calls is compiled: the graph is `_run`
    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor | Output:
        """Checks the batch, draws what is drawn for it as a whole, and runs the pass."""
        if not self.training:
            return logits_of(self.model(images))
        gradient, manifold = self._begin(images, targets)
        assert targets is not None  # or the batch was refused
        try:
            with backward_without_autocast():
                return self._run(images, targets, gradient, manifold)
        finally:
            self._end()

    def _run(
        self,
        images: Tensor,
        targets: Tensor,
        input_gradient: Tensor | None,
        manifold: ManifoldMix | None,
    ) -> Output:
        state = Pass(
            plans=self._plans,
            scorenets=self.scorenets,
            rules=self.rules,
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
    def _begin(self, images: Tensor, targets: Any) -> tuple[Tensor | None, ManifoldMix | None]:
        """Checks a batch, and blocks that are new; computes the input gradient.

        Then draws for manifold mixup, and puts the wrappers of the pass in place.
        """
        check_batch(images, targets, self.num_classes)
        if self._touches_blocks:
            self._look_up()
            plans = self._plans.values()
            is_checked = all(plan.evaluated is not None for plan in plans)
            if not is_checked and not images.is_meta:
                check_model(self.model, plans, images)
        gradient = None
        if self._mixing.htm and self._takes_gradient:
            gradient = self._input_gradient(images, targets)
        manifold = None
        if self._mixing.manifold is not None:
            manifold = draw_manifold_mix(self._mixing.manifold, images)
        for plain, forward in self._wrappers:
            vars(plain.module)["forward"] = forward
        return gradient, manifold

    @torch.compiler.disable
    def _end(self) -> None:
        """Takes the wrappers away, whatever has become of them."""
        for plain, _ in self._wrappers:
            vars(plain.module).pop("forward", None)
            if plain.own is not None:
                vars(plain.module)["forward"] = plain.own

    def _look_up(self) -> None:
        """Looks up the blocks, and plans what happens at each, unless they are as they were.

        Raises ValueError if the model is not supported.
        """
        modules = blocks_of(self.model, self.adapter)
        blocks = [Plain(x, vars(x).get("forward")) for x in modules]
        if blocks == self._blocks:
            return  # keeps the plans, whose identity torch.compile guards
        check_layers(self._mixing, self.model, modules)
        check_needs(self._mixing, self._takes_gradient, self.model, self.adapter)
        self._forget()
        self._blocks = blocks
        for index, block in enumerate(blocks):
            if index in self._mixing.touched():
                plan = self._plans[index] = Plan(
                    index=index,
                    name=f"block {index} ({type(block.module).__name__})",
                    blocks=blocks[index:],
                    adapter=self.adapter,
                    htm=self._mixing.htm.get(index),
                    detect=self._detect,
                    vtm=self._mixing.vtm.get(index),
                    is_source=index in self._mixing.sources(),
                )
                check_block(plan)
                self._wrappers.append((block, partial(run_in_pass, self._running, plan)))
            elif self.checkpoint_blocks:
                self._wrappers.append((block, partial(checkpoint, block.run, use_reentrant=False)))

    def _input_gradient(self, images: Tensor, targets: Tensor) -> Tensor:
        with evaluating(self.model):
            images = images.to(next(self.model.parameters()).dtype)  # it runs without autocast
            return input_gradient(lambda x: logits_of(self.model(x)), images, targets)

    def stop_mixing(self) -> None:
        """Disables all mixing in training for good and freezes the ScoreNets.

        Not part of the state dict: call it again after a resume. A DistributedDataParallel wrapper
        waits for the gradients of the ScoreNets: wrap the module again.
        """
        self._mixing = Mixing()
        self._forget()
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


attach = TokenMixup  # `attach(model, ...)` says what happens to the model


def check_batch(images: Any, targets: Any, num_classes: int) -> None:
    """Raises TypeError without targets, ValueError unless these are `b 3 h w` and `b c`."""
    if targets is None:
        raise TypeError("training needs module(images, targets) with targets b c")
    if not isinstance(images, Tensor) or images.ndim != 4:
        raise ValueError("TokenMixup mixes images of one size, as a tensor b 3 h w")
    shape = [len(images), num_classes]
    found = list(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
    if found != shape or not len(images):
        must = f"must be probabilities b c of at least one image, here {shape}"
        raise ValueError(f"targets {found}: {must}, such as F.one_hot(classes, c)")


def logits_of(out: Any) -> Any:
    """Returns the logits of what a model returns, such as an output of transformers."""
    if isinstance(out, Tensor):
        return out
    return getattr(out, "logits", out)
