"""What mixes at which layer, and what that needs of a model."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from tokenmixup.adapters import Adapter, has_class_token, width_of
from tokenmixup.block import Detector
from tokenmixup.saliency import name_of, takes_gradient
from tokenmixup.settings import HTM, VTM, ManifoldMixup

OWN_ROPE = ("rope_mixed", "rope_is_mixed")  # of timm's models: positions of each block's own


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


def check_layers(
    mixing: Mixing, model: nn.Module, blocks: Sequence[nn.Module], adapter: Adapter
) -> None:
    """Raises ValueError for a layer that the model does not have, or layers of several stages."""
    layers = {"htm.layer": list(mixing.htm), "vtm.layer": list(mixing.vtm)}
    if mixing.manifold is not None:
        layers["manifold_mixup.layers"] = list(mixing.manifold.layers)
    rolled = [layer + htm.rollout_steps for layer, htm in mixing.htm.items()]
    layers["htm.layer + htm.rollout_steps"] = rolled
    kind = type(model).__name__
    for key, indices in layers.items():
        last = max(indices, default=0)
        if last >= len(blocks):
            raise ValueError(f"{key}={last}: {kind} has blocks 0..{len(blocks) - 1}")
    widths = {width_of(model, blocks[layer], adapter) for layer in mixing.htm}
    if len(widths) > 1:
        raise ValueError(f"htm.layer={list(mixing.htm)}: must lie in one stage of {kind}")


def check_needs(
    mixing: Mixing, detect: Detector, model: nn.Module, adapter: Adapter, is_sharded: bool
) -> None:
    """Raises ValueError for a setting, or HTM's detector, that the blocks cannot serve.

    `is_sharded`: FSDP holds the parameters, and gathers them for one pass.
    """
    over_all = adapter.attends_to_all
    has_prefix = adapter.num_prefix_tokens > 0
    has_token = adapter.reads_class_token or (has_prefix and has_class_token(model))

    def need(key: str, needed: str, is_met: bool) -> None:
        if not is_met:
            kind = type(model).__name__
            raise ValueError(f"{key}: needs {needed}, which {kind} does not have")

    for layer, vtm in mixing.vtm.items():
        need(f"vtm.layer={layer}", "attention over all tokens", over_all)
        if vtm.class_token_offset == "published":
            need("vtm.class_token_offset=published", "a class token in the blocks", has_token)
    for htm in mixing.htm.values():
        if htm.pooling == "class_token":
            need("htm.pooling=class_token", "a class token in the blocks", has_token)
        if htm.rollout_steps:
            key = f"htm.rollout_steps={htm.rollout_steps}"
            shares_rope = not any(getattr(model, name, False) for name in OWN_ROPE)
            need(key, "attention over all tokens", over_all)
            need(key, "blocks that share their rotary positions", shares_rope)
            need(key, "parameters without FSDP", not is_sharded)
    if mixing.htm and takes_gradient(detect):
        detector = f"detector={name_of(detect)}"
        need(f"htm.{detector}", "tokens row by row", adapter.in_rows)
        need(f"htm.{detector}", "parameters without FSDP", not is_sharded)
        layers = [*mixing.htm]
        reason = f"with {detector}, whose saliency is that of the unmixed batch"
        if len(layers) > 1:
            raise ValueError(f"htm.layer={layers}: must be one layer {reason}")
        if mixing.manifold is not None and min(mixing.manifold.layers) <= layers[0]:
            must = f"must be above htm.layer={layers[0]} {reason}"
            raise ValueError(f"manifold_mixup.layers={list(mixing.manifold.layers)}: {must}")
