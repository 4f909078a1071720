"""Models of timm and torchvision: transformers that are mixed, and the comparators of the paper."""

import logging
from typing import Any

import timm
import torch
import torchvision
from timm.models.resnet import ResNet
from timm.models.resnetv2 import ResNetV2
from torch import nn

from reproduction.system import UserError, first_line
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

    `mlp_drop_rate` is the dropout of the MLPs, unless it is None. `depth` and `patch_size` must be
    the architecture's own. Raises UserError for what timm cannot build.
    """
    name = timm_name(architecture, pretrained)
    settings: dict[str, Any] = {"img_size": image_size, "global_pool": global_pool}
    settings |= {"pos_drop_rate": pos_drop_rate} if pos_drop_rate else {}  # not of all models
    settings |= {"attn_drop_rate": attn_drop, "drop_path_rate": drop_path}
    settings |= {"num_classes": num_classes}
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its errors are raised too
    try:
        model: Any = timm.create_model(name, pretrained=pretrained is not None, **settings)
        blocks = blocks_of(model)
    except Exception as error:  # of the hub, of constructors, of models without blocks
        words = f"model.architecture={architecture} model.global_pool={global_pool}"
        words += f" model.pretrained={pretrained}" if pretrained else ""
        raise UserError(f"{words}: cannot be built ({first_line(error)})") from error
    embed = getattr(model, "patch_embed", None)
    patch = getattr(embed, "patch_size", None)  # of a hybrid, of its feature map
    patch = patch[0] if isinstance(patch, tuple) else patch
    if grid := getattr(embed, "grid_size", None):
        patch = image_size // grid[0]
    for key, told, own in (("depth", depth, len(blocks)), ("patch_size", patch_size, patch)):
        if told != own:
            raise UserError(f"model.{key}={told}: {architecture} has {own}")
    if mlp_drop_rate is None:
        return model
    for block in blocks:
        mlp = getattr(block, "mlp", nn.Identity())
        dropouts = [part for part in mlp.modules() if isinstance(part, nn.Dropout)]
        if not dropouts:
            raise UserError(
                f"model.mlp_drop_rate={mlp_drop_rate}: the MLPs of {architecture} have no dropout"
            )
        for dropout in dropouts:
            dropout.p = mlp_drop_rate
    return model


def timm_name(architecture: str, pretrained: str | None) -> str:
    """Returns timm's name of architecture and tag. Raises UserError if the tag is unknown."""
    if pretrained is None:
        return architecture
    tags = [name.partition(".")[2] for name in timm.list_pretrained(f"{architecture}.*")]
    if pretrained not in tags:
        allowed = ", ".join(tags) or "none"
        raise UserError(f"model.pretrained={pretrained}: tags of {architecture} are {allowed}")
    return f"{architecture}.{pretrained}"


def build_library_model(
    *,
    num_classes: int,
    image_size: int,
    package: str,
    architecture: str,
    options: dict[str, Any],
    stem: str,
) -> nn.Module:
    """Builds `architecture` of `package` with its constructor's `options`: `b 3 h w` -> `b c`.

    `stem` is `imagenet`, the unchanged model, or `cifar`, a ResNet's stem for small images. Raises
    UserError for what the package cannot build, or what does not give a logit for each class.
    """
    words = f"model.package={package} model.architecture={architecture} model.options={options}"
    try:
        if package == "torchvision":
            model = torchvision.models.get_model(architecture, num_classes=num_classes, **options)
        else:
            model = timm.create_model(architecture, num_classes=num_classes, **options)
        if stem == "cifar":
            _replace_stem(model)
        device = next(model.parameters()).device
        with torch.no_grad():
            logits = model.eval()(torch.zeros(1, 3, image_size, image_size, device=device))
        if getattr(logits, "shape", None) != (1, num_classes):
            raise ValueError("does not give one logit for each class")
    except Exception as error:  # constructors and layers raise many types
        raise UserError(
            f"{words} model.image_size={image_size} model.stem={stem}: {first_line(error)}"
        ) from error
    return model.train()


def _replace_stem(model: Any) -> None:
    """Uses one 3x3 convolution of stride 1 without pooling (He et al., 2016, Section 4.2)."""
    is_v2 = isinstance(model, ResNetV2)
    first = getattr(model.stem, "conv", None) if is_v2 else getattr(model, "conv1", None)
    if not (is_v2 or isinstance(model, ResNet)) or not isinstance(first, nn.Conv2d):
        raise ValueError("is not a ResNet with a plain stem, allowed is imagenet")
    stem = nn.Conv2d(3, first.out_channels, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as in timm
    if is_v2:
        model.stem = stem
        return
    model.conv1, model.maxpool = stem, nn.Identity()
    if not hasattr(model, "layer4"):  # three stages, but forward() calls four
        model.layer4 = nn.Identity()
