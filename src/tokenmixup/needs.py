"""What mixes at which layer, and what that needs of a model."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from tokenmixup.adapters import Adapter
from tokenmixup.settings import HTM, VTM, ManifoldMixup


@dataclass
class Mixing:
    """What mixes in training; HTM and VTM by layer, each with the settings of that layer."""

    htm: dict[int, HTM] = field(default_factory=dict)
    vtm: dict[int, VTM] = field(default_factory=dict)
    manifold: ManifoldMixup | None = None

    def sources(self) -> range:
        """Returns the indices of the blocks before VTM's last layer."""
        return range(max(self.vtm, default=0))

    def touched(self) -> list[int]:
        """Returns the indices of the blocks that something touches, in order."""
        indices = {*self.htm, *self.vtm, *self.sources()}
        if self.manifold is not None:
            indices.update(self.manifold.layers)
        return sorted(indices)


def check_layers(mixing: Mixing, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raises ValueError for a layer that the model does not have."""
    layers = {"htm.layer": list(mixing.htm), "vtm.layer": list(mixing.vtm)}
    if mixing.manifold is not None:
        layers["manifold_mixup.layers"] = list(mixing.manifold.layers)
    rolled = [layer + htm.rollout_steps for layer, htm in mixing.htm.items()]
    layers["htm.layer + htm.rollout_steps"] = rolled
    name = type(model).__name__
    for key, indices in layers.items():
        last = max(indices, default=0)
        if last >= len(blocks):
            raise ValueError(f"{key}={last}: {name} has blocks 0..{len(blocks) - 1}")


def check_needs(mixing: Mixing, takes_gradient: bool, model: nn.Module, adapter: Adapter) -> None:
    """Raises ValueError for VTM, rollout or a detector that the model does not support.

    `takes_gradient`: whether HTM's detector reads the input gradient.
    """
    for vtm in mixing.vtm.values():
        if vtm.class_token_offset == "published" and not adapter.reads_class_token:
            must = "must be paper, for a model that does not classify by a class token"
            raise ValueError(f"vtm.class_token_offset=published: {must}")
    rolls_out = any(htm.rollout_steps for htm in mixing.htm.values())
    if (mixing.vtm or rolls_out) and not adapter.attends_to_all:
        key = "vtm.layer" if mixing.vtm else "htm.rollout_steps"
        name = type(model).__name__
        raise ValueError(f"{key}: needs attention over all tokens, which {name} does not have")
    if rolls_out and getattr(model, "rope_mixed", False):  # timm's
        raise ValueError("htm.rollout_steps: must be 0, each block has rotary positions of its own")
    if not (mixing.htm and takes_gradient):
        return
    layers = [*mixing.htm]
    reason = "with detector=gradient, whose saliency is that of the unmixed batch"
    if len(layers) > 1:
        raise ValueError(f"htm.layer={layers}: must be one layer {reason}")
    if mixing.manifold is not None and min(mixing.manifold.layers) <= layers[0]:
        must = f"must be above htm.layer={layers[0]} {reason}"
        raise ValueError(f"manifold_mixup.layers={list(mixing.manifold.layers)}: {must}")
