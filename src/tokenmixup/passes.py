"""One training pass through a model: what manifold mixup, HTM and VTM do at its blocks.

Letters: b batch, n tokens with prefix, t spatial tokens, d width, c classes, m memory, h w image.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from tokenmixup.attention import AttentionMap
from tokenmixup.block import (
    BlockInput,
    Forward,
    Plan,
    check_input,
    returned_tokens,
    run_watched,
)
from tokenmixup.horizontal import HorizontalMix, Rules, mix_horizontal
from tokenmixup.manifold import ManifoldMix
from tokenmixup.output import Output, output_of
from tokenmixup.prove import Sights, with_sight
from tokenmixup.rules import in_published_order
from tokenmixup.saliency import by_attention, saliency_of_map, square_grid
from tokenmixup.scorenet import ScoreNet, difficulty
from tokenmixup.vertical import Source, memory_of
from tokenmixup.watch import OWN_CHECKPOINTING, STILL_NEEDED, Autograd, autograd_now


class PatchEmbedding(NamedTuple):
    """The patch embedding of a model."""

    forward: Forward  # its own
    channels_first: bool  # its output is b d rows columns


@dataclass(eq=False)
class Pass:
    """The state of one training pass, and what it does at each block that something touches."""

    plans: Mapping[int, Plan]  # of the blocks that something touches
    scorenets: nn.ModuleDict  # by index
    rules: Rules
    sights: Sights
    targets: Tensor  # b c, as mixed so far
    image_size: torch.Size  # h w
    input_gradient: Tensor | None  # b h w, its magnitude
    manifold: ManifoldMix | None
    num_patches: int | None = None  # of the patch embedding's output
    grid: tuple[int, int] | None = None  # rows and columns of patches
    entered: list[int] = field(default_factory=list)  # indices of the blocks that have begun
    sources: list[Source] = field(default_factory=list)  # the blocks before, for VTM
    layers: list[HorizontalMix] = field(default_factory=list)
    autograd: Autograd = field(default_factory=autograd_now)

    def run_block(self, plan: Plan, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs a block on what manifold mixup, HTM and VTM make of its input."""
        entry = self._enter(plan, args, kwargs)
        entry, vtm_saliency = self._mix(plan, entry)
        # a source of VTM without HTM has its saliency from the map of this run
        keeps_map = plan.is_source and vtm_saliency is None
        out, seen = self._run(plan, entry, keeps_map)
        if plan.is_source:
            if vtm_saliency is None:
                assert seen is not None  # keeps_map
                vtm_saliency = saliency_of_map(seen, entry)
            tokens = entry.flat_tokens
            self.sources.append(Source(tokens, vtm_saliency, version_of(tokens)))
        return out

    def _enter(self, plan: Plan, args: tuple[Any, ...], kwargs: Any) -> BlockInput:
        """Checks the input of a block, and mixes it by manifold mixup if this layer is drawn.

        Tries the block out on it, if that is still to be done.
        """
        self._note_entry(plan)
        width = None
        if plan.htm is not None:  # ScoreNet takes one width only
            width = self._scorenet(plan).head.in_features
        check_input(plan, args, len(self.targets), width)
        x: Tensor = args[0]
        self._check_count(plan, x.shape[1:-1].numel())
        entry = BlockInput(
            args=args,
            kwargs=kwargs,
            plan=plan,
            input_gradient=self.input_gradient,
            grid=self._grid(plan, x),
        )
        self._check_sources(plan, entry)
        entry = with_sight(self.sights, entry)
        if self.manifold is None or self.manifold.layer != plan.index:
            return entry
        self.targets = self.manifold(self.targets)
        return entry.with_tokens(self.manifold(x))

    def _grid(self, plan: Plan, x: Tensor) -> tuple[int, int] | None:
        """Returns rows and columns of the spatial tokens among the tokens of a block, if known."""
        if x.ndim == 4:
            return (x.shape[1], x.shape[2])
        adapter = plan.adapter
        if self.grid is not None or not (adapter.square_patches and adapter.in_rows):
            return self.grid
        return square_grid(x.shape[1] - adapter.num_prefix_tokens, *self.image_size)

    def _scorenet(self, plan: Plan) -> ScoreNet:
        return cast(ScoreNet, self.scorenets[str(plan.index)])

    def _note_entry(self, plan: Plan) -> None:
        """Notes that a block begins.

        Raises ValueError if it or a later one has begun before, or if autograd is not as it was
        when the pass began: off, or within a gradient checkpoint of the model's own.
        """
        if self.entered and plan.index <= self.entered[-1]:
            raise ValueError(f"{plan.name} runs again: must run once in a forward pass, in order")
        if self.autograd != autograd_now():
            raise ValueError(f"{plan.name} {OWN_CHECKPOINTING}")
        self.entered.append(plan.index)

    def _check_count(self, plan: Plan, n: int) -> None:
        """Raises ValueError for a block that gets other tokens than prefix and patches."""
        if not plan.adapter.attends_to_all:
            return
        num_prefix_tokens = plan.adapter.num_prefix_tokens
        spatial = n - num_prefix_tokens
        patches = spatial if self.num_patches is None else self.num_patches
        if spatial != patches or spatial < 1:
            must = f"must get {num_prefix_tokens} more, which come first ({num_prefix_tokens=})"
            raise ValueError(f"{plan.name} gets {n} tokens for {patches} patches, but {must}")

    def _check_sources(self, plan: Plan, entry: BlockInput) -> None:
        """Raises ValueError for other tokens than those of a source, whose places VTM knows.

        And for a source whose tokens have been changed in place since.
        """
        if not self.sources or not (plan.is_source or plan.vtm):
            return
        shape = entry.flat_tokens.shape[1:]
        of_source = self.sources[-1].tokens.shape[1:]
        if shape != of_source:
            found = f"tokens {list(shape)}, a source of VTM with {list(of_source)}"
            raise ValueError(f"{plan.name} gets {found}: must have as many tokens, of one width")
        if any(source.version != version_of(source.tokens) for source in self.sources):
            reason = f"tokens of a source of VTM were changed in place: {STILL_NEEDED}"
            raise ValueError(f"{plan.name}: {reason}")

    def _mix(self, plan: Plan, entry: BlockInput) -> tuple[BlockInput, Tensor | None]:
        """Mixes tokens and targets by Algorithm 1 at a layer of HTM.

        Returns the mixed input and, if the block feeds a layer of VTM, the saliency for VTM, `b t`.
        """
        htm = plan.htm
        if htm is None:
            return entry, None
        x = entry.flat_tokens
        score_logits = self._scorenet(plan)(x, plan.adapter.num_prefix_tokens)
        nats = difficulty(score_logits, self.targets, htm.difficulty)
        saliency, vtm_saliency = self._detect(plan, entry)
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
        if htm.order == "published":  # VTM goes on choosing by the saliency before mixing
            mix = in_published_order(mix)
        elif vtm_saliency is not None:
            # tokens take their saliency along; the map of the mix is not read for it
            vtm_saliency = torch.where(mix.mask, vtm_saliency[mix.donor], vtm_saliency)
        self.targets = mix.targets
        return entry.with_tokens(mix.tokens), vtm_saliency

    def _detect(self, plan: Plan, entry: BlockInput) -> tuple[Tensor, Tensor | None]:
        """Returns the saliency for HTM and, of a block that feeds a layer of VTM, that for VTM.

        Both are `b t`; VTM's is always by attention.
        """
        saliency = plan.detect(entry)
        found = list(saliency.shape)
        expected = [len(self.targets), entry.num_spatial_tokens]
        if found != expected:
            must = f"must be samples x spatial tokens, {expected}"
            raise ValueError(f"{plan.name}: its saliency is {found}, {must}")
        if not plan.is_source:
            return saliency, None
        if plan.detect is by_attention:
            return saliency, saliency
        return saliency, by_attention(entry)

    def _run(
        self, plan: Plan, entry: BlockInput, keeps_map: bool
    ) -> tuple[Any, AttentionMap | None]:
        """Runs a block as a whole, with VTM's memory if it has one.

        Returns its output, and its map if that is kept.
        """
        memory = None
        if plan.vtm is not None:
            memory = memory_of(self.sources, plan.vtm, plan.adapter.num_prefix_tokens)
        # A detector's run ends at the first map; this one shows whether there are more.
        is_watched = plan.is_source or plan.vtm is not None or bool(entry.watched)
        if not is_watched or plan.adapter.saliency is not None:
            out = entry.run()
            returned_tokens(entry, out)
            return out, None
        out, watching = run_watched(entry, memory, keeps_map)
        watching.check()
        returned_tokens(entry, out)
        return out, watching.kept

    def embed(self, embedding: PatchEmbedding, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs the patch embedding; keeps number and grid of the patches."""
        out = embedding.forward(*args, **kwargs)
        if not isinstance(out, Tensor) or out.ndim not in (3, 4):
            return out
        patches = out.movedim(1, -1) if embedding.channels_first else out
        self.num_patches = patches.shape[1:-1].numel()
        if patches.ndim == 4:
            self.grid = (patches.shape[1], patches.shape[2])
        return out

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


def version_of(x: Tensor) -> int:
    """Counts what has been done to a tensor in place; that of some tensors is not counted.

    Neither in inference mode, nor by a compiler: before it a module is run without, to prove its
    blocks.
    """
    if torch.compiler.is_compiling() or x.is_inference():
        return 0
    return x._version


def run_in_pass(
    passes: list[Pass], method: Callable[..., Any], subject: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Stands in for the `forward` of a block, or of the patch embedding.

    `passes`: holds the pass while it runs, else nothing; `method`: of Pass, which runs the
    `subject`, the plan of the block or the embedding.
    """
    if not passes:
        return subject.forward(*args, **kwargs)
    return method(passes[0], subject, args, kwargs)
