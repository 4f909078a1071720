"""The typed schema of models."""

from typing import Any, Literal

from pydantic.dataclasses import dataclass

from reproduction.config.fields import (
    FORBID,
    Blocks,
    Few,
    FolderName,
    Pixels,
    Rate,
    Ratio,
    Whole,
    Width,
)


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Model:
    """What every model has."""

    name: FolderName
    image_size: Pixels
    weights: str | None


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Transformer(Model):
    """A plain sequence of blocks, which HTM and VTM can serve; their default layers."""

    depth: Blocks
    attn_drop: Rate
    drop_path: Rate
    htm_layer: Whole
    vtm_layer: Whole


@dataclass(config=FORBID, frozen=True, kw_only=True)
class CCT(Transformer):
    """A compact transformer (Hassani et al., 2021): CCT with `conv_layers`, CVT with `patch_size`.

    ViT-Lite is CVT with a class token.
    """

    family: Literal["cct"]
    embed_dim: Width
    num_heads: Width
    mlp_ratio: Ratio
    conv_layers: Few | None
    patch_size: Pixels | None
    positional_embedding: Literal["learnable", "sine"]
    pooling: Literal["sequence", "class_token"]
    drop: Rate

    @property
    def tokens(self) -> int:
        """Spatial tokens: patches, or every conv layer is followed by a pooling of stride 2."""
        if self.patch_size is not None:
            return (self.image_size // self.patch_size) ** 2
        size = self.image_size
        for _ in range(self.conv_layers or 0):
            size = (size + 1) // 2
        return size * size

    @property
    def has_class_token(self) -> bool:
        return self.pooling == "class_token"


@dataclass(config=FORBID, frozen=True, kw_only=True)
class ViT(Transformer):
    """A vision transformer of timm's: `architecture` is its name there.

    Dropout as there: `pos_drop_rate` after the positions, `proj_drop_rate` after the attention's
    output projection and twice in each MLP; `mlp_drop_rate` instead in the MLPs, if it is given.
    """

    family: Literal["vit"]
    architecture: str
    patch_size: Pixels
    global_pool: Literal["token", "avg", "map"]
    pretrained: str | None
    pos_drop_rate: Rate
    proj_drop_rate: Rate
    mlp_drop_rate: Rate | None

    @property
    def tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def has_class_token(self) -> bool:
        return self.global_pool == "token"


@dataclass(config=FORBID, frozen=True, kw_only=True)
class Library(Model):
    """Any other model of timm's or torchvision's: `architecture` is its name there."""

    family: Literal["library"]
    package: Literal["timm", "torchvision"]
    architecture: str
    options: dict[str, Any]
    stem: Literal["imagenet", "cifar"]


AnyModel = CCT | ViT | Library
