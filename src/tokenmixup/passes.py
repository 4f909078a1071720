"""One training pass through a model: what manifold mixup, HTM and VTM do at its blocks.

Letters: b batch, n tokens with prefix, t spatial tokens, d width, c classes, m memory, h w image.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokenmixup.block import (
    BlockInput,
    Plan,
    attended_of_memory,
    input_of,
    run_watched,
)
from tokenmixup.horizontal import HorizontalMix, Rules, mix_horizontal
from tokenmixup.manifold import ManifoldMix
from tokenmixup.output import Output, output_of
from tokenmixup.rules import in_published_order
from tokenmixup.saliency import by_attention, saliency_of_map, square_grid
from tokenmixup.scorenet import ScoreNet, difficulty
from tokenmixup.vertical import Source, memory_of

OWN_CHECKPOINTING = (
    "runs without gradients or under the model's own gradient checkpointing, which would rerun it "
    "without TokenMixup: use attach(..., checkpoint_blocks=True)"
)
Autograd = tuple[bool, Any]  # whether it records operations, and the checkpoint around them


def autograd_now() -> Autograd:
    """Returns the state of autograd, which is another one within a gradient checkpoint.

    Of checkpoints it sees those of torch that are not reentrant.
    """
    is_recorded = torch.is_grad_enabled()
    if torch.compiler.is_compiling():  # compiled, a rerun is right
        return is_recorded, None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or hooks[0].__module__ != "torch.utils.checkpoint":
        return is_recorded, None
    return is_recorded, hooks[0]


@dataclass(eq=False)
class Pass:
    """The state of one training pass, and what it does at each block that something touches."""

    plans: Mapping[int, Plan]  # of the blocks that something touches
    scorenets: nn.ModuleDict  # by index
    rules: Rules
    targets: Tensor  # b c, as mixed so far
    image_size: torch.Size  # h w
    input_gradient: Tensor | None  # b h w, its magnitude
    manifold: ManifoldMix | None
    entered: list[int] = field(default_factory=list)  # indices of the blocks that have begun
    sources: list[Source] = field(default_factory=list)  # the blocks before, for VTM
    layers: list[HorizontalMix] = field(default_factory=list)
    autograd: Autograd = field(default_factory=autograd_now)

    def run_block(self, plan: Plan, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs a block on what manifold mixup, HTM and VTM make of its input."""
        entry = self._enter(plan, args, kwargs)
        if self.manifold is not None and self.manifold.layer == plan.index:
            self.targets = self.manifold(self.targets)
            entry = entry.with_tokens(self.manifold(entry.tokens))
        unmixed = entry
        if plan.htm is not None:
            entry = self._mix(plan, entry)
        memory = None
        if plan.vtm is not None:
            chosen = memory_of(self.sources, plan.vtm, plan.adapter.num_prefix_tokens)
            memory = attended_of_memory(entry, chosen)
        out, watching = run_watched(entry, memory)
        if watching.maps > 1 and plan.htm is not None:
            watching.map()  # HTM's first run has seen but one of them
        if memory is not None:
            watching.fused()
        if plan.is_source:
            if plan.htm is not None and plan.htm.order == "published":
                saliency = by_attention(unmixed)
            else:  # Section 3.4: by the map that this block computes on its own tokens
                saliency = saliency_of_map(watching.map(), entry)
            self.sources.append(Source(entry.flat_tokens, saliency))
        return out

    def _enter(self, plan: Plan, args: tuple[Any, ...], kwargs: Any) -> BlockInput:
        """Returns the input of a block that begins.

        Raises ValueError if it or a later one has begun before, or if autograd is not as it was
        when the pass began: off, or within a gradient checkpoint of the model's own.
        """
        if self.entered and plan.index <= self.entered[-1]:
            raise ValueError(f"{plan.name} runs again: must run once in a forward pass, in order")
        if self.autograd != autograd_now():
            raise ValueError(f"{plan.name} {OWN_CHECKPOINTING}")
        self.entered.append(plan.index)
        entry = input_of(plan, args, kwargs)
        *image_size, evaluated = plan.evaluated or (0, 0, 0)
        if image_size == [*self.image_size] and entry.num_tokens != evaluated:
            must = f"must be those of evaluation, {evaluated}: the prefix and all patches"
            raise ValueError(f"{plan.name} gets {entry.num_tokens} tokens, {must}")
        grid = None
        if entry.tokens.ndim == 4:
            grid = (entry.tokens.shape[1], entry.tokens.shape[2])
        elif plan.adapter.in_rows:
            grid = square_grid(entry.num_spatial_tokens, *self.image_size)
        return replace(entry, input_gradient=self.input_gradient, grid=grid)

    def _mix(self, plan: Plan, entry: BlockInput) -> BlockInput:
        """Mixes tokens and targets by Algorithm 1 at a layer of HTM; returns the mixed input."""
        htm = plan.htm
        assert htm is not None
        x = entry.flat_tokens
        scorenet = cast(ScoreNet, self.scorenets[str(plan.index)])
        width = scorenet.head.in_features
        if x.shape[2] != width:
            must = f"must be Adapter.embed_dim={width}"
            raise ValueError(f"{plan.name} gets tokens of width {x.shape[2]}, {must}")
        score_logits = scorenet(x, plan.adapter.num_prefix_tokens)
        nats = difficulty(score_logits, self.targets, htm.difficulty)
        saliency = plan.detect(entry)
        found = list(saliency.shape)
        expected = [len(self.targets), entry.num_spatial_tokens]
        if found != expected:
            must = f"must be samples x spatial tokens, {expected}"
            raise ValueError(f"{plan.name}: its saliency is {found}, {must}")
        mix = mix_horizontal(
            tokens=x,
            targets=self.targets,
            saliency=saliency,
            difficulty=nats,
            tau=cast(float, htm.tau),
            rho=htm.rho_for(saliency.shape[1]),
            rules=self.rules,
            grid=entry.grid,
        )
        self.layers.append(mix._replace(layer=plan.index, score_logits=score_logits))
        if htm.order == "published":
            mix = in_published_order(mix)
        self.targets = mix.targets
        return entry.with_tokens(mix.tokens)

    def output(self, logits: Any, score_loss_weight: float) -> Output:
        """Returns the output of the pass.

        Raises ValueError if a block of the plans has not run, or the logits are not `b c`.
        """
        for index, plan in self.plans.items():
            if index not in self.entered:
                raise ValueError(f"{plan.name} did not run: TokenMixup touches it")
        expected = list(self.targets.shape)
        found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if found != expected:
            must = f"must be logits, samples x num_classes, {expected}"
            raise ValueError(f"the model returned {found}, {must}")
        return output_of(logits, self.targets, self.layers, score_loss_weight)


def run_in_pass(passes: list[Pass], plan: Plan, /, *args: Any, **kwargs: Any) -> Any:
    """Stands in for the `forward` of a block; `passes` holds the pass while it runs."""
    return passes[0].run_block(plan, args, kwargs)
