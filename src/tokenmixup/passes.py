"""One training pass through a model: what manifold mixup, HTM and VTM do at its blocks.

Letters: b batch, n tokens with prefix, t spatial tokens, d width, c classes, m memory, h w image.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

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
from tokenmixup.rules import ORDERS
from tokenmixup.saliency import by_attention, saliency_by
from tokenmixup.scorenet import difficulty
from tokenmixup.vertical import INDICES
from tokenmixup.watch import OWN_CHECKPOINTING, AttentionMap, graph_now


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
    graph: Any = field(default_factory=graph_now)

    def run_block(self, forward: Forward, plan: Plan, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs a block on what manifold mixup, HTM and VTM make of its input."""
        entry = self._enter(plan, args, kwargs)
        entry, saliency = self._mix(plan, entry)
        out, seen = self._attend(plan, forward, entry, keeps_map=saliency is None)
        self._remember(plan, entry, saliency, seen)
        return out

    def _enter(self, plan: Plan, args: tuple[Any, ...], kwargs: Any) -> BlockInput:
        """Returns what enters a block: tokens, by manifold mixup if this layer is drawn."""
        self._check_order(plan)
        check_tokens(plan, args, len(self.targets), self._width_at(plan))
        x: Tensor = args[0]
        grid = (x.shape[1], x.shape[2]) if x.ndim == 4 else self.grid
        entry = BlockInput(args, kwargs, plan.adapter, plan.blocks, plan.name, self.pixels, grid)
        self._check_count(plan, entry.num_tokens)
        self.is_detecting = True
        self.proofs.check(plan, entry)
        self.is_detecting = False
        if self.manifold is None or self.manifold.layer != plan.index:
            return entry
        self.targets = self.manifold(self.targets)
        return entry.with_tokens(self.manifold(x))

    def _width_at(self, plan: Plan) -> int | None:
        """Returns the width that ScoreNet reads."""
        if plan.htm is None:
            return None
        scorenet: Any = self.scorenets[str(plan.index)]
        return scorenet.head.in_features

    def _check_order(self, plan: Plan) -> None:
        """Raises ValueError for a block that runs again."""
        if any(plan.index <= other for other in self.entered):
            raise ValueError(f"{plan.name} runs again: must run once in a forward pass, in order")
        if self.graph != graph_now():
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

        Returns what enters then and, of a source of VTM, its saliency by the block's own attention.
        """
        htm = plan.htm
        if htm is None:
            return entry, None
        prefix = plan.adapter.num_prefix_tokens
        x = entry.args[0].flatten(1, -2)
        score_logits = self.scorenets[str(plan.index)](x, prefix)
        nats = difficulty(score_logits, self.targets, htm.difficulty)
        saliency, own = self._detect(plan, entry)
        tau, rho = cast(float, htm.tau), htm.rho_for(saliency.shape[1])
        mix = mix_horizontal(x, self.targets, saliency, nats, tau, rho, self.rules)
        done = LayerMix(
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
        self.layers.append(done)
        if own is not None and htm.order == "in_place":
            own = torch.where(mix.mask, own[mix.donor], own)
        mix = ORDERS[htm.order](mix)
        self.targets = mix.targets
        return entry.with_tokens(mix.tokens), own

    def _detect(self, plan: Plan, entry: BlockInput) -> tuple[Tensor, Tensor | None]:
        """Returns HTM's saliency, `b t`, and of a source of VTM that by the block's attention."""
        self.is_detecting = True
        saliency, own = plan.detect(entry), None
        if plan.feeds and plan.detect is by_attention:
            own = saliency
        elif plan.feeds:
            own = by_attention(entry)
        self.is_detecting = False
        t = entry.num_tokens - plan.adapter.num_prefix_tokens
        found, expected = list(saliency.shape), [len(self.targets), t]
        if found != expected:
            must = f"must be samples x spatial tokens, {expected}"
            raise ValueError(f"htm.detector returns {found}, {must}")
        return saliency, own

    def _attend(
        self, plan: Plan, forward: Forward, entry: BlockInput, keeps_map: bool
    ) -> tuple[Any, AttentionMap | None]:
        """Runs a block on its tokens, and VTM's on its memory. Returns its output and its map.

        A detector has left at the first map; only a whole run shows that there is no second.
        """
        memory = self.memories.get(plan.index)
        needs_map = bool(plan.feeds or entry.watched) or memory is not None
        if not needs_map or plan.adapter.saliency is not None:
            out = forward(*entry.args, **entry.kwargs)
            tokens_of(entry, out, entry.num_tokens)
            return out, None
        keeps_map = keeps_map and bool(plan.feeds)
        out, watching = run_watched(forward, entry, memory, keeps_map=keeps_map)
        seen, tokens = watching.checked(), tokens_of(entry, out, watching.total())
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
            kappa = cast(int, vtm.kappa)
            places = choose(saliency, kappa, plan.adapter.num_prefix_tokens)
            x = entry.args[0].flatten(1, -2)
            if vtm.stop_gradient:
                x = x.detach()
            memory = self.memories.setdefault(layer, Memory())
            memory.tokens.append(x.gather(1, places[..., None].expand(-1, -1, x.shape[2])))
            memory.places.append(places)

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
        found: Any = type(logits).__name__
        if isinstance(logits, Tensor):
            found = list(logits.shape)
        expected = list(self.targets.shape)
        if found != expected:
            raise ValueError(f"the model returned {found}, must be logits b num_classes={expected}")
        return output_of(logits, self.targets, self.layers, score_loss_weight)


def run_in_pass(
    running: list[Pass], run: Any, about: Any, forward: Forward, /, *args: Any, **kwargs: Any
) -> Any:
    """Runs in place of `forward`, that of a part of a model.

    `running`: the pass that runs, if one does; `run`: a method of Pass, which gets `about`: the
    plan of a block, or the patch embedding.
    """
    if not running or running[-1].is_detecting:
        return forward(*args, **kwargs)
    return run(running[-1], forward, about, args, kwargs)
