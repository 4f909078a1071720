"""One training pass through a model: what manifold mixup, HTM and VTM do at its blocks.

Letters: b batch, n tokens with prefix, t spatial tokens, d width, c classes, m memory, h w image.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from tokenmixup.adapters import name_of
from tokenmixup.horizontal import mix_horizontal
from tokenmixup.manifold import ManifoldMix
from tokenmixup.output import LayerMix, Output
from tokenmixup.rules import ORDERS
from tokenmixup.saliency import BlockInput, by_attention, by_gradient, saliency_by
from tokenmixup.scorenet import difficulty
from tokenmixup.vertical import INDICES
from tokenmixup.watch import OWN_CHECKPOINTING, graph_now


@dataclass
class Pass:
    """A training pass of `module`, a TokenMixup: its state, and what happens at the blocks."""

    module: Any
    targets: Tensor  # b c, as mixed so far
    pixels: Tensor | None  # b h w, magnitude of the input gradient
    manifold: ManifoldMix | None
    num_patches: int | None = None  # of the patch embedding's output
    grid: tuple[int, int] | None = None  # rows and columns of patches
    entered: list[int] = field(default_factory=list)
    # by layer of VTM: of each source, its tokens, b kappa d, and their places in 0..n-1, b kappa
    memories: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    layers: list[LayerMix] = field(default_factory=list)
    graph: Any = field(default_factory=graph_now)

    def run_block(self, plain: Any, index: int, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs a block on what HTM, VTM and manifold mixup make of its input."""
        module, adapter = self.module, self.module.adapter
        name = name_of(index, module._blocks[index])
        self._check_entry(index, name, args)
        shape, x = args[0].shape, args[0].flatten(1, -2)
        if self.manifold is not None and self.manifold.layer == index:
            x, self.targets = self.manifold(x), self.manifold(self.targets)
        grid = (shape[1], shape[2]) if len(shape) == 4 else self.grid
        where = (adapter, module._blocks[index:], name, self.pixels, grid)
        entry = BlockInput((x.view(shape), *args[1:]), kwargs, *where)
        later = [layer for layer in module._vtm if layer > index]
        memory, saliency = self.memories.get(index), None
        needs_map = bool(later) or memory is not None
        if index in module._htm:
            x, saliency = self._mix(index, x, entry, is_source=bool(later))
            # the detector left at the first map; only a whole run shows that there is no second
            needs_map = needs_map or module.detect is not by_gradient
        tokens, watching = x.view(shape), entry.watching(keeps_map=bool(later) and saliency is None)
        if memory is not None:  # Eq. 13; the m ask nothing, see watch.py
            tokens = torch.cat([x, *(kept for kept, _ in memory)], dim=1)
            watching.memory = torch.cat([places for _, places in memory], dim=1)
            kwargs = _with_rope(kwargs, watching.memory, adapter.num_prefix_tokens)
        is_watched = needs_map and adapter.saliency is None
        with watching if is_watched else nullcontext():
            out = plain(tokens, *args[1:], **kwargs)
        seen: Any = watching.checked() if is_watched else None
        for layer in later:
            if saliency is None:
                saliency = saliency_by(seen, entry)
            self._remember(layer, x, saliency)
        return self._own_tokens(name, out, watching.n, watching.total())

    def _check_entry(self, index: int, name: str, args: tuple[Any, ...]) -> None:
        """Raises ValueError for a block that runs out of order, or gets what are no tokens."""
        x: Any = args[0] if args else None
        module, prefix = self.module, self.module.adapter.num_prefix_tokens
        dims = (3,) if index in module._vtm else (3, 4)
        width = module.scorenets[str(index)].head.in_features if index in module._htm else None
        are_tokens = isinstance(x, Tensor) and x.ndim in dims and len(x) == len(self.targets)
        if not are_tokens or width not in (None, x.shape[-1]):
            found = [*getattr(x, "shape", [])] or type(x).__name__
            needs = f"its first argument must be tokens b n {width or 'd'} (Adapter.embed_dim)"
            raise ValueError(f"{name} gets {found}: {needs}")
        if any(index <= other for other in self.entered):
            raise ValueError(f"{name} runs again: must run once in a forward pass, in order")
        if self.graph != graph_now():
            raise ValueError(f"{name} {OWN_CHECKPOINTING}")
        self.entered.append(index)
        n = x.shape[1:-1].numel()
        patches = n - prefix if self.num_patches is None else self.num_patches
        if module.adapter.attends_to_all and (n != prefix + patches or n <= prefix):
            raise ValueError(
                f"{name} gets {n} tokens for {patches} patches, but must get {prefix} more, which "
                f"come first (num_prefix_tokens={prefix})"
            )

    def _mix(
        self, index: int, x: Tensor, entry: BlockInput, is_source: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Mixes tokens and targets by Algorithm 1.

        Returns the tokens and, of a source of VTM, their saliency by the block's own attention.
        """
        module, prefix = self.module, self.module.adapter.num_prefix_tokens
        htm = module._htm[index]
        score_logits = module.scorenets[str(index)](x, prefix)
        nats = difficulty(score_logits, self.targets, htm.difficulty)
        module._running.clear()  # no pass runs meanwhile: stand-ins call the plain `forward`
        for_vtm = saliency = module.detect(entry)
        if is_source and module.detect is not by_attention:
            for_vtm = by_attention(entry)
        module._running.append(self)
        if [*saliency.shape] != (expected := [len(x), x.shape[1] - prefix]):
            raise ValueError(
                f"htm.detector returns {[*saliency.shape]}, must be samples x spatial tokens, "
                f"{expected}"
            )
        rho = htm.rho_for(saliency.shape[1])
        mix = mix_horizontal(x, self.targets, saliency, nats, htm.tau, rho, module.rules)
        found = (mix.is_easy, mix.mask, mix.gain, mix.saliency, mix.donor, mix.keep_ratio)
        self.layers.append(LayerMix(index, score_logits, nats, *found))
        if is_source and htm.order == "in_place":
            for_vtm = torch.where(mix.mask, for_vtm[mix.donor], for_vtm)
        mix = ORDERS[htm.order](mix)
        self.targets = mix.targets
        return mix.tokens, for_vtm if is_source else None

    def _remember(self, layer: int, x: Tensor, saliency: Tensor) -> None:
        """Stores the most salient of a block's tokens for a later layer of VTM."""
        vtm, prefix = self.module._vtm[layer], self.module.adapter.num_prefix_tokens
        places = INDICES[vtm.class_token_offset](saliency, vtm.kappa, prefix)
        x = x.detach() if vtm.stop_gradient else x
        kept = x.gather(1, places[..., None].expand(-1, -1, x.shape[2]))
        self.memories.setdefault(layer, []).append((kept, places))

    def _own_tokens(self, name: str, out: Any, n: int, total: int) -> Any:
        """Returns what a block has returned for n of its tokens, without those of a memory."""
        first = out if isinstance(out, Tensor) else out[0]
        count = first.shape[1:-1].numel()
        if self.module.adapter.attends_to_all and count != total:
            raise ValueError(f"{name} returns {count} tokens for {total}: must return as many")
        if n == total:
            return out
        own = first[:, :n].clone()  # of a view FSDP could lose its hook
        return own if first is out else (own, *out[1:])

    def embed(self, plain: Any, embedding: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs the patch embedding; keeps number and grid of the patches."""
        out = plain(*args, **kwargs)
        if not isinstance(out, Tensor) or out.ndim not in (3, 4):
            return out
        patches = out.movedim(1, -1) if isinstance(embedding, nn.Conv2d) else out
        self.num_patches = patches.shape[1:-1].numel()
        if patches.ndim == 4:
            self.grid = (patches.shape[1], patches.shape[2])
        return out

    def output(self, logits: Any) -> Output:
        """Returns the output of the pass.

        Raises ValueError if a block has not run that must, or the logits are not `b c`.
        """
        for index in {*self.module._touched} - {*self.entered}:
            name = name_of(index, self.module._blocks[index])
            raise ValueError(f"{name} did not run: TokenMixup touches it")
        shape = [*logits.shape] if isinstance(logits, Tensor) else type(logits).__name__
        if shape != (expected := [*self.targets.shape]):
            raise ValueError(f"the model returned {shape}, must be logits b num_classes={expected}")
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
            self.module.htm.score_loss_weight,
        )


def _with_rope(kwargs: Mapping[str, Any], places: Tensor, prefix: int) -> Mapping[str, Any]:
    """Appends the rotary positions of a memory, `b m` in 0..n-1, to a block's argument `rope`.

    It has sines, then cosines, of each spatial token, `.. t 2e`; the prefix is not rotated.
    """
    rope = kwargs.get("rope")
    if rope is None:
        return kwargs
    rope = rope[(None,) * (4 - rope.ndim)].expand(len(places), -1, -1, -1)
    still = rope.new_zeros(*rope.shape[:2], prefix, rope.shape[3])
    still.chunk(2, dim=-1)[1].fill_(1)  # sine 0, cosine 1
    of_memory = torch.cat([still, rope], dim=2).take_along_dim(places[:, None, :, None], dim=2)
    return {**kwargs, "rope": torch.cat([rope, of_memory], dim=2)}


def stand_in(
    running: list[Pass], run: Any, about: Any, plain: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Runs in place of `plain`, the `forward` of a part of a model.

    `running`: the pass that runs, if one does; `run`: a method of Pass, which gets `about`: the
    index of a block, or the patch embedding.
    """
    return run(running[-1], plain, about, args, kwargs) if running else plain(*args, **kwargs)
