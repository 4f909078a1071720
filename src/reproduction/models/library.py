"""Models from timm and torchvision: ViTs, and the baselines of the paper."""

import logging
from collections.abc import Callable
from typing import Any

import timm
import torch
import torchvision
from timm.models.resnet import ResNet
from timm.models.resnetv2 import ResNetV2
from torch import nn

import tokenmixup
from reproduction.system.errors import UserError, first_line


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
    proj_drop_rate: float,
    mlp_drop_rate: float | None,
    attn_drop: float,
    drop_path: float,
) -> nn.Module:
    """Builds timm's `architecture`, with random weights or those of the tag `pretrained`.

    `mlp_drop_rate` overrides `proj_drop_rate` in the MLPs, unless it is None. Raises UserError for
    an unknown name or tag, a failed download, a size that does not fit, and MLPs without dropout.
    """
    name = timm_name(architecture, pretrained)
    # models with stages have no such dropout
    optional: dict[str, Any] = {"pos_drop_rate": pos_drop_rate} if pos_drop_rate else {}
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # reported in one line below
    try:
        model = timm.create_model(
            name,
            pretrained=pretrained is not None,
            num_classes=num_classes,
            img_size=image_size,
            global_pool=global_pool,
            **optional,
            proj_drop_rate=proj_drop_rate,
            attn_drop_rate=attn_drop,
            drop_path_rate=drop_path,
        )
    except (OSError, RuntimeError, TypeError, AssertionError) as error:  # OSError: from the hub
        if pretrained is None:
            raise UserError(
                f"model.architecture={architecture}: is not a plain ViT with "
                f"model.global_pool={global_pool} ({first_line(error)})"
            ) from error
        raise UserError(
            f"model.pretrained={pretrained}: the weights could not be loaded "
            f"({first_line(error)}); give a local file as model.weights instead"
        ) from error
    _check_sizes(model, architecture, depth, image_size, patch_size)
    if mlp_drop_rate is not None:
        _set_mlp_dropout(model, architecture, mlp_drop_rate)
    return model


def _set_mlp_dropout(model: Any, architecture: str, rate: float) -> None:
    """Sets both dropouts of each MLP, which timm ties to `proj_drop_rate`."""
    for block in blocks_of(model):
        mlp = getattr(block, "mlp", nn.Identity())
        dropouts = [part for part in mlp.modules() if isinstance(part, nn.Dropout)]
        if not dropouts:
            raise UserError(
                f"model.mlp_drop_rate={rate}: the MLPs of {architecture} have no dropout"
            )
        for dropout in dropouts:
            dropout.p = rate


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks of a transformer over all stages; none of a model of another kind."""
    try:
        return tokenmixup.blocks_of(model)
    except ValueError:
        return []


def timm_name(architecture: str, pretrained: str | None) -> str:
    """Returns timm's name of architecture and tag. Raises UserError if it is unknown."""
    if architecture not in timm.list_models():
        raise UserError(f"model.architecture={architecture}: timm has no such model")
    if pretrained is None:
        return architecture
    name = f"{architecture}.{pretrained}"
    tags = timm.list_pretrained(f"{architecture}.*")
    if name not in tags:
        known = ", ".join(tag.partition(".")[2] for tag in tags) or "none"
        raise UserError(
            f"model.pretrained={pretrained}: no tag of {architecture}, allowed: {known}"
        )
    return name


def _check_sizes(
    model: nn.Module, architecture: str, depth: int, image_size: int, patch_size: int
) -> None:
    """Checks depth and patch size, by the token grid: a hybrid patches its feature maps."""
    blocks = blocks_of(model)
    embed = getattr(model, "patch_embed", None)
    built_patch = getattr(embed, "patch_size", None)
    if grid := getattr(embed, "grid_size", None):
        built_patch = image_size // grid[0]
    elif isinstance(built_patch, tuple):
        built_patch = built_patch[0]
    if len(blocks) != depth:
        raise UserError(f"model.depth={depth}: {architecture} has {len(blocks)} blocks")
    if built_patch is None:
        raise UserError(f"model.architecture={architecture}: has no grid of patches of one size")
    if built_patch != patch_size:
        raise UserError(f"model.patch_size={patch_size}: {architecture} has {built_patch}")


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

    `stem` is `imagenet`, the unchanged model, or `cifar`, a ResNet stem for small images. Raises
    UserError for an unknown name, option or stem, and for images that are too small.
    """
    create: Callable[..., nn.Module] = timm.create_model
    known, untrained = timm.list_models(), dict[str, Any](pretrained=False)
    if package == "torchvision":
        create = torchvision.models.get_model
        known, untrained = torchvision.models.list_models(torchvision.models), {"weights": None}
    if architecture not in known:
        raise UserError(f"model.architecture={architecture}: {package} has no such model")
    try:  # options cannot request weights: a repeated keyword is an error
        model = create(architecture, num_classes=num_classes, **untrained, **options)
    except Exception as error:  # constructors validate little, so any error is possible
        raise UserError(
            f"model.options={options}: {package}'s {architecture} cannot be built with them "
            f"({first_line(error)})"
        ) from error
    if stem == "cifar":
        _replace_stem(model, architecture)
    shape = _output_shape(model, architecture, image_size)
    if shape != (1, num_classes) or getattr(model, "aux_logits", False):
        raise UserError(
            f"model.architecture={architecture}: with model.options={options} its output must be "
            "one logit per class"
        )
    return model


def _replace_stem(model: Any, architecture: str) -> None:
    """Uses one 3x3 convolution of stride 1 without pooling (He et al., 2016, Section 4.2)."""
    is_v2 = isinstance(model, ResNetV2)
    first = getattr(model.stem, "conv", None) if is_v2 else getattr(model, "conv1", None)
    if not (is_v2 or isinstance(model, ResNet)) or not isinstance(first, nn.Conv2d):
        raise UserError(
            f"model.stem=cifar: {architecture} is not a ResNet with a plain stem, allowed is "
            "imagenet"
        )
    stem = nn.Conv2d(3, first.out_channels, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as in timm
    if is_v2:
        model.stem = stem
        return
    model.conv1, model.maxpool = stem, nn.Identity()
    if not hasattr(model, "layer4"):  # three stages, but forward() calls four
        model.layer4 = nn.Identity()


def _output_shape(model: nn.Module, architecture: str, image_size: int) -> tuple[int, ...] | None:
    """Returns the output shape for one image, None if no tensor. UserError for a wrong size."""
    device = next(model.parameters()).device
    try:
        with torch.no_grad():
            output = model.eval()(torch.zeros(1, 3, image_size, image_size, device=device))
    except Exception as error:  # layers raise various errors
        raise UserError(
            f"model.image_size={image_size}: {architecture} cannot take such images "
            f"({first_line(error)})"
        ) from error
    model.train()
    return tuple(output.shape) if isinstance(output, torch.Tensor) else None
