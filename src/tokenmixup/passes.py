"""One training pass through a model: what manifold mixup, HTM and VTM do at its blocks.

Letters: b batch, n tokens with prefix, t spatial tokens, d width, c classes, m memory, h w image.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokenmixup.block import BlockInput, Plan, attended_of_memory, input_of, run_watched
from tokenmixup.contexts import Autograd, autograd_now
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
        block_input = self._input(plan, args, kwargs)
        if self.manifold is not None and self.manifold.layer == plan.index:
            self.targets = self.manifold(self.targets)
            block_input = block_input.with_tokens(self.manifold(block_input.tokens))
        unmixed = block_input
        if plan.htm is not None:
            block_input = self._mix(plan, block_input)
        memory = None
        if plan.vtm is not None:
            chosen = memory_of(self.sources, plan.vtm, plan.adapter.num_prefix_tokens)
            memory = attended_of_memory(block_input, chosen)
        out, watching = run_watched(block_input, memory)
        if watching.maps > 1 and plan.htm is not None:
            watching.map()  # HTM's first run has seen but one of them
        if memory is not None:
            watching.fused()
        if plan.is_source:
            if plan.htm is not None and plan.htm.order == "published":
                saliency = by_attention(unmixed)
            else:  # Section 3.4: by the map that this block computes on its own tokens
                saliency = saliency_of_map(watching.map(), block_input)
            self.sources.append(Source(block_input.flat_tokens, saliency))
        return out

    def _input(self, plan: Plan, args: tuple[Any, ...], kwargs: Any) -> BlockInput:
        """Returns the input of a block that begins.

        Raises ValueError if it or a later one has begun before, or if autograd is not as it was
        when the pass began: off, or within a gradient checkpoint of the model's own.
        """
        if self.entered and plan.index <= self.entered[-1]:
            raise ValueError(f"{plan.name} runs again: must run once in a forward pass, in order")
        if self.autograd != autograd_now():
            raise ValueError(f"{plan.name} {OWN_CHECKPOINTING}")
        self.entered.append(plan.index)
        block_input = input_of(plan, args, kwargs)
        grid = self._grid_of(plan, block_input)
        return replace(block_input, input_gradient=self.input_gradient, grid=grid)

    def _grid_of(self, plan: Plan, block_input: BlockInput) -> tuple[int, int] | None:
        """Returns rows and columns of the spatial tokens, None if an adapter says `in_rows=False`.

        Raises ValueError if the block gets other tokens than the prefix and all patches: another
        number than in evaluation, or a number that no square patches give.
        """
        tokens = f"{plan.name} gets {block_input.num_tokens} tokens"
        if plan.evaluated is not None:
            *image_size, evaluated = plan.evaluated
            if image_size == [*self.image_size] and block_input.num_tokens != evaluated:
                must = f"must be those of evaluation, {evaluated}: the prefix and all patches"
                raise ValueError(f"{tokens}, {must}")
        if block_input.tokens.ndim == 4:
            return (block_input.tokens.shape[1], block_input.tokens.shape[2])
        if not plan.adapter.in_rows:
            return None
        height, width = self.image_size
        grid = square_grid(block_input.num_spatial_tokens, height, width)
        if grid is None and (plan.htm is not None or plan.vtm is not None):
            found = (
                f"without a prefix of {plan.adapter.num_prefix_tokens}, they are no square patches"
            )
            fix = "unless an Adapter says in_rows=False"
            raise ValueError(f"{tokens}: {found} of {height} x {width} pixels, {fix}")
        return grid

    def _mix(self, plan: Plan, block_input: BlockInput) -> BlockInput:
        """Mixes tokens and targets by Algorithm 1 at a layer of HTM; returns the mixed input."""
        htm = plan.htm
        assert htm is not None
        x = block_input.flat_tokens
        scorenet = cast(ScoreNet, self.scorenets[str(plan.index)])
        score_logits = scorenet(x, plan.adapter.num_prefix_tokens)
        nats = difficulty(score_logits, self.targets, htm.difficulty)
        saliency = plan.detect(block_input)
        mix = mix_horizontal(
            tokens=x,
            targets=self.targets,
            saliency=saliency,
            difficulty=nats,
            tau=cast(float, htm.tau),
            rho=htm.rho_for(saliency.shape[1]),
            rules=self.rules,
            grid=block_input.grid,
        )
        self.layers.append(mix._replace(layer=plan.index, score_logits=score_logits))
        if htm.order == "published":
            mix = in_published_order(mix)
        self.targets = mix.targets
        return block_input.with_tokens(mix.tokens)

    def output(self, logits: Any, score_loss_weight: float) -> Output:
        """Returns the output of the pass. Raises ValueError if a block has not run."""
        for index, plan in self.plans.items():
            if index not in self.entered:
                raise ValueError(f"{plan.name} did not run: TokenMixup touches it")
        return output_of(logits, self.targets, self.layers, score_loss_weight)


def run_in_pass(passes: list[Pass], plan: Plan, /, *args: Any, **kwargs: Any) -> Any:
    """Runs in the place of the `forward` of a block; `passes` holds the pass while it runs."""
    return passes[0].run_block(plan, args, kwargs)
