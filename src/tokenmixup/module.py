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

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast, overload

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
from tokenmixup.block import BlockInput, Forward, Plan
from tokenmixup.contexts import evaluating
from tokenmixup.horizontal import PAPER, Rules
from tokenmixup.manifold import ManifoldMix, draw_manifold_mix
from tokenmixup.output import LayerMix, Output
from tokenmixup.passes import Pass, stand_in
from tokenmixup.prove import (
    Proof,
    check_statistics,
    circumstances_of,
    inputs_of,
    kinds_beside_tokens,
    prove,
)
from tokenmixup.rules import rules_of
from tokenmixup.saliency import Detector, by_attention, by_gradient, detector_of, input_gradient
from tokenmixup.scorenet import Pooling, ScoreNet
from tokenmixup.settings import HTM, VTM, ManifoldMixup, built

NOT_PROVED = "TokenMixup proves nothing of blocks under fully_shard: train one batch before"
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
        self.htm = built(HTM, htm)
        if self.htm is not None:
            self.htm = self.htm.for_classes(num_classes)
        self.vtm = built(VTM, vtm)
        self.manifold_mixup = built(ManifoldMixup, manifold_mixup)
        self.model, self.num_classes = model, num_classes
        self.checkpoint_blocks = checkpoint_blocks
        self.rules: Rules = PAPER if self.htm is None else rules_of(self.htm)
        self.detect: Detector = by_attention if self.htm is None else detector_of(self.htm)
        self._told_adapter, self._told_detect = adapter, self.detect
        # What mixes in training, by layer; nothing after `stop_mixing`.
        self._htm: dict[int, HTM] = {} if self.htm is None else self.htm.each
        self._vtm: dict[int, VTM] = {} if self.vtm is None else self.vtm.each
        self._manifold = self.manifold_mixup
        self._running: list[Pass] = []  # the pass that runs, if one does; stand-ins share the list
        self._forget()
        if self._touches() or checkpoint_blocks:
            check_unwrapped(model)
            self._look_up()
        self.scorenets = nn.ModuleDict({str(x): self._new_scorenet(x) for x in self._htm})

    def _forget(self) -> None:
        """Forgets what has been found out about the model."""
        self.adapter = self._told_adapter or adapter_of(self.model)
        self._blocks: list[nn.Module] = []
        self._plans: dict[int, Plan] = {}  # of the blocks that must run
        self._proofs: dict[int, Proof] = {}
        self._looked_at: list[Any] = []
        self._can_prove = True
        self._stand_ins: tuple[Any, list[Any]] = (None, [])

    def __getstate__(self) -> dict[str, Any]:
        """A copy finds out for itself."""
        kept = {**self.__dict__}
        for name in ("_plans", "_proofs", "_looked_at"):
            kept[name] = type(kept[name])()
        kept["_stand_ins"] = (None, [])
        return kept

    def _touches(self) -> list[int]:
        """Returns the indices of the blocks that something touches, in order."""
        mixed = [] if self._manifold is None else self._manifold.layers
        sources = range(max(self._vtm, default=-1) + 1)
        return sorted({*self._htm, *sources, *mixed})

    def _new_scorenet(self, layer: int) -> ScoreNet:
        assert self.htm is not None, "it has layers"
        own = "class_token" if self.adapter.reads_class_token else "attention"
        pooling = cast(Pooling, own if self.htm.pooling == "auto" else self.htm.pooling)
        width = width_of(self.model, self._blocks[layer], self.adapter)
        scorenet = ScoreNet(width, self.num_classes, pooling, self.htm.stop_gradient)
        like = next(self.model.parameters())
        return scorenet.to(like.device, like.dtype)

    @overload
    def forward(self, images: Tensor) -> Tensor: ...

    @overload
    def forward(self, images: Tensor, targets: Tensor) -> Output: ...

    @torch._dynamo.decorators.skip  # a compiler begins at `_run`
    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor | Output:
        """Checks the batch, draws what is drawn for it as a whole, and runs the pass."""
        if not self.training:
            return logits_of(self.model(images))
        before, pixels, manifold = self._begin(images, targets)
        assert targets is not None, "or the batch was refused"
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
        self, images: Tensor, targets: Tensor, pixels: Tensor | None, manifold: ManifoldMix | None
    ) -> Output:
        state = Pass(
            plans=self._plans,
            scorenets=self.scorenets,
            rules=self.rules,
            detect=self.detect,
            check_proof=self._check_proof,
            targets=targets,
            pixels=pixels,
            manifold=manifold,
        )
        self._running.append(state)
        try:
            logits = logits_of(self.model(images))
        finally:
            self._running.clear()
        return state.output(logits, 0.0 if self.htm is None else self.htm.score_loss_weight)

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
        if self._touches() or self.checkpoint_blocks:
            self._look_up()
            self._prove(images)
        pixels = self._input_gradient(images, targets)
        manifold = None if self._manifold is None else draw_manifold_mix(self._manifold, images)
        return self._put_stand_ins(), pixels, manifold

    def _look_up(self) -> None:
        """Finds the blocks as they are now. Raises ValueError if they cannot serve."""
        adapter = self._told_adapter or adapter_of(self.model)
        blocks = blocks_of(self.model, self._told_adapter)
        settings = [self._htm, self._vtm, self._manifold]
        kinds = [type(module) for module in (self, self.model, *blocks)]  # as FSDP changes them
        looked_at = [adapter, *settings, self.model, *blocks, *kinds]
        if looked_at == self._looked_at:  # a compiler asks for the same plans
            return
        self._check_settings(blocks, adapter)
        self.adapter, self._blocks = adapter, blocks
        self._plans = {index: self._plan(index) for index in self._touches()}
        self._proofs = {index: x for index, x in self._proofs.items() if index in self._plans}
        self._can_prove = not is_sharded(self)
        self._looked_at = looked_at

    def _plan(self, index: int) -> Plan:
        return Plan(
            index=index,
            name=name_of(index, self._blocks[index]),
            blocks=self._blocks[index:],
            adapter=self.adapter,
            htm=self._htm.get(index),
            vtm=self._vtm.get(index),
            feeds={layer: vtm for layer, vtm in self._vtm.items() if layer > index},
        )

    def _prove(self, images: Tensor) -> None:
        """Proves what has not been proved of the blocks as they are now.

        Raises ValueError for a block of which a property does not hold.
        """
        todo = list[Plan]()
        for index, plan in self._plans.items():
            circumstances = circumstances_of(plan, images, self._detector_at(plan))
            proof = self._proofs.get(index)
            if proof is not None and proof.circumstances == circumstances:
                continue
            check_statistics(plan)
            self._proofs[index] = Proof(circumstances)
            if self._detector_at(plan) is not None:
                todo.append(plan)
        if not todo or images.device.type == "meta":
            return
        if not self._can_prove:
            warnings.warn(NOT_PROVED, stacklevel=2)
            return
        entries = inputs_of(self.model, images, todo)
        for plan in todo:
            if plan.index in entries:  # another is proved where it runs
                self._prove_block(plan, entries[plan.index])

    def _prove_block(self, plan: Plan, entry: BlockInput) -> None:
        detect = self._detector_at(plan)
        assert detect is not None, "else nothing is to be proved"
        prove(plan, entry, detect)
        self._proofs[plan.index].kinds = kinds_beside_tokens(entry)

    def _check_proof(self, plan: Plan, entry: BlockInput) -> None:
        """Proves a block that gets other arguments than those for which it has been proved."""
        if not self._can_prove or self._detector_at(plan) is None or entry.args[0].is_meta:
            return
        if self._proofs[plan.index].kinds == kinds_beside_tokens(entry):
            return
        if torch.compiler.is_compiling():
            told = "compiled, it gets other arguments than in evaluation: train one batch before"
            raise ValueError(f"{plan.name}: {told}")
        self._prove_block(plan, entry)

    def _detector_at(self, plan: Plan) -> Detector | None:
        """Returns what reads the map of a block; None if nothing does, or one of the user's own."""
        if plan.htm is not None and self.detect is self._told_detect is not by_gradient:
            return self.detect
        return by_attention if plan.feeds or plan.vtm is not None else None

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
        parts = self._parts()
        before = [(module, vars(module).get("forward")) for module, _ in parts]
        if self._stand_ins[0] != (parts, before):  # else the same, which a compiler asks for
            made = list[Forward]()
            for (module, own), (_, method) in zip(before, parts, strict=True):
                plain = own or partial(forward_of_class, module)
                if method is None:
                    made.append(partial(checkpoint, plain, use_reentrant=False))
                else:
                    made.append(partial(stand_in, self._running, *method, plain))
            self._stand_ins = ((parts, before), made)
        for (module, _), forward in zip(parts, self._stand_ins[1], strict=True):
            vars(module)["forward"] = forward
        return before

    def _parts(self) -> list[tuple[nn.Module, Any]]:
        """Returns what a pass goes through: a method of Pass with its argument; None: run again."""
        parts = list[tuple[nn.Module, Any]]()
        embedding = patch_embed_of(self.model, self.adapter) if self._plans else None
        if embedding is not None:
            parts.append((embedding, (Pass.embed, embedding)))
        for index, block in enumerate(self._blocks):
            if index in self._plans:
                parts.append((block, (Pass.run_block, self._plans[index])))
            elif self.checkpoint_blocks:
                parts.append((block, None))
        return parts

    def stop_mixing(self) -> None:
        """Disables all mixing in training for good and freezes the ScoreNets.

        Not part of the state dict: call it again after a resume. A DistributedDataParallel wrapper
        waits for the gradients of the ScoreNets: wrap the module again.
        """
        self._htm, self._vtm, self._manifold = {}, {}, None
        self._forget()
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
    """Takes the stand-ins away, whatever has become of them."""
    for module, forward in forwards:
        vars(module).pop("forward", None)
        if forward is not None:
            vars(module)["forward"] = forward


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
