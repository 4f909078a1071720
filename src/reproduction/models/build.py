"""From the model's configuration to the model, and what is known about it."""

import dataclasses
from typing import TypeVar

import torch
from timm.layers import Attention
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from reproduction.config import CCT as CCTConfig
from reproduction.config import Augmentation
from reproduction.config import ViT as ViTConfig
from reproduction.errors import UserError
from reproduction.models.cct import CCT
from reproduction.models.vit import build_vit
from tokenmixup import TokenMixup, attach

AnyModule = TypeVar("AnyModule", bound=nn.Module)

NOT_FOR_THE_MODEL = ("name", "family", "htm_layer", "vtm_layer")


def build_model(config: CCTConfig | ViTConfig, num_classes: int) -> nn.Module:
    """The plain model, without TokenMixup."""
    settings = dataclasses.asdict(config)
    for key in NOT_FOR_THE_MODEL:
        del settings[key]
    if isinstance(config, CCTConfig):
        return CCT(num_classes=num_classes, **settings)
    return build_vit(num_classes=num_classes, **settings)


def build_module(
    config: CCTConfig | ViTConfig, stack: Augmentation, num_classes: int
) -> TokenMixup:
    """The model with what the stack mixes inside it attached; UserError if it cannot be."""
    model = build_model(config, num_classes)
    settings = {
        name: dataclasses.asdict(chosen)
        for name in ("htm", "vtm", "manifold_mixup")
        if (chosen := getattr(stack, name)) is not None
    }
    try:
        return attach(model, num_classes, **settings)
    except ValueError as error:
        raise UserError(f"model={config.name}: {error}") from error


def without_start(config: CCTConfig | ViTConfig) -> CCTConfig | ViTConfig:
    """The same model without the weights that training starts from, as others will be loaded."""
    if isinstance(config, ViTConfig):
        return dataclasses.replace(config, pretrained=None, weights=None)
    return config


def place(model: AnyModule, device: torch.device) -> AnyModule:
    """Moves the model to its device, in the form that is fast there.

    Convolutions are faster with channels last. The fused attention kernel is left where it is
    slower: on a CPU it has no dropout of its own.
    """
    for module in model.modules():
        is_dropped = isinstance(module, Attention) and module.attn_drop.p > 0
        if device.type == "cpu" and is_dropped:
            setattr(module, "fused_attn", False)  # Final, but each instance has its own
    model.to(memory_format=torch.channels_last)
    return model.to(device)


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def count_macs(model: nn.Module, image_size: int) -> int:
    """Multiply-accumulates of one image in evaluation: convolutions, linear layers, attention."""
    was_training = model.training
    device = next(model.parameters()).device
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(torch.zeros(1, 3, image_size, image_size, device=device))
    model.train(was_training)
    return counter.get_total_flops() // 2


def pretrained_statistics(model: nn.Module) -> tuple[list[float], list[float]] | None:
    """Mean and standard deviation that a timm model's weights were trained with."""
    known = getattr(model, "pretrained_cfg", {})
    return (list(known["mean"]), list(known["std"])) if "mean" in known else None
