"""Models of timm's and torchvision's as they come, which the paper compares TokenMixup with."""

from typing import Any

import timm
import torch
import torchvision
from timm.models.resnet import ResNet
from timm.models.resnetv2 import ResNetV2
from torch import nn

from reproduction.errors import UserError, first_line


def build_library_model(
    *,
    num_classes: int,
    image_size: int,
    package: str,
    architecture: str,
    options: dict[str, Any],
    stem: str,
) -> nn.Module:
    """`package`'s `architecture` with its constructor's `options`: `b 3 h w` -> `b c`.

    `stem`: `imagenet` leaves the model alone, `cifar` gives a ResNet the stem for small images.
    Raises UserError for a name, an option or a stem that the package does not have, and for images
    that are too small.
    """
    if architecture not in _names(package):
        raise UserError(f"model.architecture={architecture}: {package} has no such model")
    try:
        model = _create(package, architecture, num_classes, options)
    except Exception as error:  # constructors check little, so that anything may come
        raise UserError(
            f"model.options={options}: {package}'s {architecture} cannot be built with them "
            f"({first_line(error)})"
        ) from error
    if stem == "cifar":
        _replace_stem(model, architecture)
    shape = _output_shape(model, architecture, image_size)
    if shape != (1, num_classes) or getattr(model, "aux_logits", False):
        raise UserError(
            f"model.architecture={architecture}: with model.options={options} it does not give one "
            "logit for each class"
        )
    return model


def _names(package: str) -> list[str]:
    if package == "timm":
        return timm.list_models()
    return torchvision.models.list_models(module=torchvision.models)


def _create(
    package: str, architecture: str, num_classes: int, options: dict[str, Any]
) -> nn.Module:
    """Random weights, named so that no option can ask for others."""
    if package == "timm":
        return timm.create_model(architecture, pretrained=False, num_classes=num_classes, **options)
    return torchvision.models.get_model(
        architecture, weights=None, num_classes=num_classes, **options
    )


def _replace_stem(model: Any, architecture: str) -> None:
    """One 3x3 convolution of stride 1 without pooling (He et al., 2016, Section 4.2)."""
    is_v2 = isinstance(model, ResNetV2)
    first = getattr(model.stem, "conv", None) if is_v2 else getattr(model, "conv1", None)
    if not (is_v2 or isinstance(model, ResNet)) or not isinstance(first, nn.Conv2d):
        raise UserError(
            f"model.stem=cifar: {architecture} is no ResNet with a plain stem, allowed is imagenet"
        )
    stem = nn.Conv2d(3, first.out_channels, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as timm's
    if is_v2:
        model.stem = stem
        return
    model.conv1, model.maxpool = stem, nn.Identity()
    if not hasattr(model, "layer4"):  # with three stages; its forward pass calls four
        model.layer4 = nn.Identity()


def _output_shape(model: nn.Module, architecture: str, image_size: int) -> tuple[int, ...] | None:
    """What one empty image becomes, None if no tensor; UserError for images of a wrong size."""
    device = next(model.parameters()).device
    try:
        with torch.no_grad():
            output = model.eval()(torch.zeros(1, 3, image_size, image_size, device=device))
    except Exception as error:  # each layer has errors of its own
        raise UserError(
            f"model.image_size={image_size}: {architecture} cannot take such images "
            f"({first_line(error)})"
        ) from error
    model.train()
    return tuple(output.shape) if isinstance(output, torch.Tensor) else None
