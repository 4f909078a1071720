"""One training pass through a model: what manifold mixup, HTM and VTM do at its blocks.

Letters: b batch, n tokens with prefix, t spatial tokens, d width, c classes, m memory, h w image.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokenmixup.attention import AttentionMap
from tokenmixup.block import (
    BlockInput,
    Forward,
    Memory,
    Plan,
    check_tokens,
    run_watched,
    tokens_of,
    with_tokens_of,
)
from tokenmixup.horizontal import Rules, mix_horizontal
from tokenmixup.manifold import ManifoldMix
from tokenmixup.output import LayerMix, Output, output_of
from tokenmixup.prove import Proofs
from tokenmixup.rules import in_published_order
from tokenmixup.saliency import by_attention, saliency_by
from tokenmixup.scorenet import ScoreNet, difficulty
from tokenmixup.vertical import INDICES
from tokenmixup.watch import OWN_CHECKPOINTING, Recording, recording_now


@dataclass(eq=False)
class Pass:
    """A training pass: what it does, its state, and what happens at the blocks."""

    plans: Mapping[int, Plan]  # of the blocks that something touches
    scorenets: nn.ModuleDict  # by index
    rules: Rules
    proofs: Proofs
    targets: Tensor  # b c, as mixed so far
    pixels: Tensor | None  # b h w, magnitude of the input gradient
    manifold: ManifoldMix | None
    num_patches: int | None = None  # of the patch embedding's output
    grid: tuple[int, int] | None = None  # rows and columns of patches
    is_detecting: bool = False  # stand-ins call the plain `forward` meanwhile
    entered: list[int] = field(default_factory=list)
    memories: dict[int, Memory] = field(default_factory=dict)  # by layer of VTM
    layers: list[LayerMix] = field(default_factory=list)
    recording: Recording = field(default_factory=recording_now)

    def run_block(self, forward: Forward, plan: Plan, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs a block on what manifold mixup, HTM and VTM make of its input."""
        entry = self._enter(plan, args, kwargs)
        entry, vtm_saliency = self._mix(plan, entry)
        keeps_map = bool(plan.feeds) and vtm_saliency is None
        out, seen = self._attend(plan, forward, entry, keeps_map)
        self._remember(plan, entry, vtm_saliency, seen)
        return out

    def _enter(self, plan: Plan, args: tuple[Any, ...], kwargs: Any) -> BlockInput:
        """Returns what enters a block: tokens, by manifold mixup if this layer is drawn."""
        self._check_order(plan)
        width = None if plan.htm is None else self._scorenet(plan).head.in_features
        check_tokens(plan, args, len(self.targets), width)
        x: Tensor = args[0]
        grid = self.grid
        if x.ndim == 4:
            grid = (x.shape[1], x.shape[2])
        entry = BlockInput(
            args=args,
            kwargs=kwargs,
            adapter=plan.adapter,
            blocks=plan.blocks,
            name=plan.name,
            pixels=self.pixels,
            grid=grid,
        )
        self._check_count(plan, entry.num_tokens)
        self.is_detecting = True
        self.proofs.check(plan, entry)
        self.is_detecting = False
        if self.manifold is None or self.manifold.layer != plan.index:
            return entry
        self.targets = self.manifold(self.targets)
        return entry.with_tokens(self.manifold(x))

    def _scorenet(self, plan: Plan) -> ScoreNet:
        return cast(ScoreNet, self.scorenets[str(plan.index)])

    def _check_order(self, plan: Plan) -> None:
        """Raises ValueError for a block that runs again."""
        if any(plan.index <= other for other in self.entered):
            raise ValueError(f"{plan.name} runs again: must run once in a forward pass, in order")
        if self.recording != recording_now():
            raise ValueError(f"{plan.name} {OWN_CHECKPOINTING}")
        self.entered.append(plan.index)

    def _check_count(self, plan: Plan, n: int) -> None:
        """Raises ValueError for a block that gets other tokens than prefix and patches."""
        if not plan.adapter.attends_to_all:
            return
        prefix = plan.adapter.num_prefix_tokens
        patches = n - prefix if self.num_patches is None else self.num_patches
        if n != prefix + patches or patches < 1:
            raise ValueError(
                f"{plan.name} gets {n} tokens for {patches} patches, but must get {prefix} more, "
                f"which come first (num_prefix_tokens={prefix})"
            )

    def _mix(self, plan: Plan, entry: BlockInput) -> tuple[BlockInput, Tensor | None]:
        """Mixes tokens and targets by Algorithm 1 at a layer of HTM.

        Returns what enters then and, of a source of VTM, the saliency by which VTM chooses from it.
        """
        htm = plan.htm
        if htm is None:
            return entry, None
        x = entry.tokens.flatten(1, -2)  # b n d
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
        )
        layer = LayerMix(
            layer=plan.index,
            score_logits=score_logits,
            difficulty=nats,
            is_easy=mix.is_easy,
            mask=mix.mask,
            gain=mix.gain,
            saliency=mix.saliency,
            donor=mix.donor,
            keep_ratio=mix.keep_ratio,
        )
        self.layers.append(layer)
        if htm.order == "published":  # VTM goes on choosing by the saliency before mixing
            mix = in_published_order(mix)
        elif vtm_saliency is not None:
            vtm_saliency = torch.where(mix.mask, vtm_saliency[mix.donor], vtm_saliency)
        self.targets = mix.targets
        return entry.with_tokens(mix.tokens), vtm_saliency

    def _detect(self, plan: Plan, entry: BlockInput) -> tuple[Tensor, Tensor | None]:
        """Returns HTM's saliency, `b t`, and of a source of VTM that by the block's attention."""
        self.is_detecting = True
        saliency = plan.detect(entry)
        vtm_saliency = None
        if plan.feeds and plan.detect is by_attention:
            vtm_saliency = saliency
        elif plan.feeds:
            vtm_saliency = by_attention(entry)
        self.is_detecting = False
        t = entry.num_tokens - plan.adapter.num_prefix_tokens
        found = list(saliency.shape)
        expected = [len(self.targets), t]
        if found != expected:
            must = f"must be samples x spatial tokens, {expected}"
            raise ValueError(f"htm.detector returns {found}, {must}")
        return saliency, vtm_saliency

    def _attend(
        self, plan: Plan, forward: Forward, entry: BlockInput, keeps_map: bool
    ) -> tuple[Any, AttentionMap | None]:
        """Runs a block on its tokens, and VTM's on its memory. Returns its output and its map.

        A detector has left at the first map; only a whole run shows that there is no second.
        """
        memory = self.memories.get(plan.index)
        is_read = bool(plan.feeds or entry.watched) or memory is not None
        if not is_read or plan.adapter.saliency is not None:
            out = forward(*entry.args, **entry.kwargs)
            tokens_of(entry, out, entry.num_tokens)
            return out, None
        out, watching = run_watched(forward, entry, memory, keeps_map)
        seen = watching.checked()
        tokens = tokens_of(entry, out, watching.total())
        if memory is not None:
            own = tokens[:, : watching.n].clone()  # of a view FSDP could lose its hook
            out = with_tokens_of(out, own)
        return out, seen

    def _remember(
        self, plan: Plan, entry: BlockInput, saliency: Tensor | None, seen: AttentionMap | None
    ) -> None:
        """Stores the most salient of a block's tokens for each later layer of VTM."""
        if not plan.feeds:
            return
        if saliency is None:
            assert seen is not None, "the map was kept for this"
            saliency = saliency_by(seen, entry)
        for layer, vtm in plan.feeds.items():
            choose = INDICES[vtm.class_token_offset]
            indices = choose(saliency, cast(int, vtm.kappa), plan.adapter.num_prefix_tokens)
            x = entry.tokens.flatten(1, -2)  # b n d
            if vtm.stop_gradient:
                x = x.detach()
            memory = self.memories.setdefault(layer, Memory())
            memory.tokens.append(x.gather(1, indices[..., None].expand(-1, -1, x.shape[2])))
            memory.indices.append(indices)

    def embed(
        self, forward: Forward, embedding: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Runs the patch embedding; keeps number and grid of the patches."""
        out = forward(*args, **kwargs)
        if not isinstance(out, Tensor) or out.ndim not in (3, 4):
            return out
        patches = out.movedim(1, -1) if isinstance(embedding, nn.Conv2d) else out
        self.num_patches = patches.shape[1:-1].numel()
        if patches.ndim == 4:
            self.grid = (patches.shape[1], patches.shape[2])
        return out

    def output(self, logits: Any, score_loss_weight: float) -> Output:
        """Returns the output of the pass.

        Raises ValueError if a block has not run that must, or the logits are not `b c`.
        """
        for index, plan in self.plans.items():
            if index not in self.entered:
                raise ValueError(f"{plan.name} did not run: TokenMixup touches it")
        expected = list(self.targets.shape)
        found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if found != expected:
            raise ValueError(f"the model returned {found}, must be logits b num_classes={expected}")
        return output_of(logits, self.targets, self.layers, score_loss_weight)


def run_in_pass(
    running: list[Pass],
    run: Callable[..., Any],
    about: Plan | nn.Module,
    forward: Forward,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs instead of `forward`, that of a block or of the patch embedding.

    `running`: the pass that runs, if one does; `run`: a method of Pass, which gets `about`: the
    plan of the block, or the embedding.
    """
    if not running or running[-1].is_detecting:
        return forward(*args, **kwargs)
    return run(running[-1], forward, about, args, kwargs)
