"""Models of timm and torchvision: transformers that are mixed, and the comparators of the paper."""

import logging
from collections.abc import Sequence
from typing import Any

import timm
import torch
import torchvision
from timm.models.resnet import ResNet
from timm.models.resnetv2 import ResNetV2
from torch import nn

from tokenmixup.adapters import blocks_of


def build_vit(
    *,
    num_classes: int,
    architecture: str,
    image_size: int,
    patch_size: int,
    depth: int,
    global_pool: str,
    pretrained: str | None,
    pos_drop_rate: float,
    mlp_drop_rate: float | None,
    attn_drop: float,
    drop_path: float,
) -> nn.Module:
    """Builds timm's `architecture`, with random weights or those of the tag `pretrained`.

    On the meta device the tag is only looked up. `mlp_drop_rate` is the dropout of the MLPs, unless
    it is None. `depth` and `patch_size` must be the architecture's own.
    """
    name = architecture if pretrained is None else f"{architecture}.{pretrained}"
    settings: dict[str, Any] = {
        "img_size": image_size,
        "global_pool": global_pool,
        "attn_drop_rate": attn_drop,
        "drop_path_rate": drop_path,
    }
    if pos_drop_rate:  # not all models have it
        settings["pos_drop_rate"] = pos_drop_rate
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its errors are raised too
    loads = pretrained is not None and torch.get_default_device().type != "meta"
    model: Any = timm.create_model(name, pretrained=loads, num_classes=num_classes, **settings)
    blocks = blocks_of(model)
    if depth != len(blocks):
        raise ValueError(f"model.depth={depth}: it has {len(blocks)}")
    if image_size % patch_size:
        raise ValueError(f"model.image_size={image_size}: must be a multiple of {patch_size}")
    patch = model.patch_embed.patch_size[0]
    if patch_size != patch:
        raise ValueError(f"model.patch_size={patch_size}: it has {patch}")
    if mlp_drop_rate is not None:
        _set_dropout_of_mlps(blocks, mlp_drop_rate)
    return model


def _set_dropout_of_mlps(blocks: Sequence[nn.Module], rate: float) -> None:
    for block in blocks:
        for module in block.get_submodule("mlp").modules():
            if isinstance(module, nn.Dropout):
                module.p = rate


def build_library_model(
    *,
    num_classes: int,
    package: str,
    architecture: str,
    options: dict[str, Any],
    stem: str,
) -> nn.Module:
    """Builds `architecture` of `package` with its constructor's `options`: `b 3 h w` -> `b c`.

    `stem` is `imagenet`, the unchanged model, or `cifar`, a ResNet's stem for small images.
    """
    create: Any = timm.create_model
    if package == "torchvision":
        create = torchvision.models.get_model
    model = create(architecture, num_classes=num_classes, **options)
    if stem == "cifar":
        _replace_stem(model)
    return model


def _replace_stem(model: Any) -> None:
    """Uses one 3x3 convolution of stride 1 without pooling (He et al., 2016, Section 4.2)."""
    is_v2 = isinstance(model, ResNetV2)
    first: Any = None
    if is_v2:
        first = model.stem.conv
    elif isinstance(model, ResNet):
        first = model.conv1
    if not isinstance(first, nn.Conv2d):
        raise ValueError("is not a ResNet with a plain stem, allowed is imagenet")
    stem = nn.Conv2d(3, first.out_channels, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as in timm
    if is_v2:
        model.stem = stem
    else:
        model.conv1 = stem
        model.maxpool = nn.Identity()
    if not hasattr(model, "layer4"):  # three stages, but a ResNet's forward() calls four
        model.layer4 = nn.Identity()
