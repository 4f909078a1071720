"""From the model's configuration to the model, and what is known about it."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from timm.layers import Attention
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from reproduction.config.model import CCT as CCTConfig
from reproduction.config.model import AnyModel
from reproduction.config.model import ViT as ViTConfig
from reproduction.config.schema import Augmentation
from reproduction.models.cct import CCT
from reproduction.models.library import build_library_model, build_vit
from reproduction.models.names import State
from reproduction.models.weights import fitting, read_weights
from reproduction.system.errors import UserError
from reproduction.system.heap import keep_freed_memory
from tokenmixup import TokenMixup, attach
from tokenmixup.contexts import evaluating
from tokenmixup.structure import declared_prefix

AnyModule = TypeVar("AnyModule", bound=nn.Module)

WITH_WEIGHTS = (torch.ops.aten.convolution, torch.ops.aten.addmm, torch.ops.aten.mm)
NOT_FOR_THE_MODEL = ("name", "family", "weights", "htm_layer", "vtm_layer")


def build_model(config: AnyModel, num_classes: int) -> nn.Module:
    """The plain model, without TokenMixup, with the weights that training starts from."""
    model = _build_random(config, num_classes)
    if config.weights is not None:
        model.load_state_dict(start_weights(config.weights, model))
    return model


def _build_random(config: AnyModel, num_classes: int) -> nn.Module:
    settings = dataclasses.asdict(config)
    for key in NOT_FOR_THE_MODEL:
        settings.pop(key, None)
    if isinstance(config, CCTConfig):
        return CCT(num_classes=num_classes, **settings)
    if isinstance(config, ViTConfig):
        return build_vit(num_classes=num_classes, **settings)
    return build_library_model(num_classes=num_classes, **settings)


def start_weights(path: str, model: nn.Module) -> State:
    """The file's parameters, all of the model's but for a head of another number of classes.

    Raises UserError if the file is not readable or does not fit.
    """
    return fitting(read_weights("model.weights", Path(path)), model, keep_head=True)


def build_module(config: AnyModel, stack: Augmentation, num_classes: int) -> TokenMixup:
    """The model with what the stack mixes inside it attached; UserError if it cannot be."""
    model = build_model(config, num_classes)
    try:
        return attach(model, num_classes, stack.htm, stack.vtm, stack.manifold_mixup)
    except ValueError as error:
        raise UserError(f"model={config.name}: {error}") from error


def check_tokens(module: TokenMixup, config: AnyModel) -> None:
    """Raises UserError if the blocks get too few tokens for VTM; allocates nothing on meta."""
    if module.vtm is None:
        return
    kappa, seen = module.vtm.kappa, list[int]()
    model: Any = module.model
    device = next(model.parameters()).device
    hook = model.blocks[0].register_forward_pre_hook(lambda b, args: seen.append(args[0].shape[1]))
    with evaluating(model), torch.no_grad():
        model(torch.zeros(1, 3, config.image_size, config.image_size, device=device))
    hook.remove()
    tokens = seen[0] - declared_prefix(model)
    if kappa > tokens:
        raise UserError(
            f"augmentation.vtm.kappa={kappa}: {config.name} has {tokens} tokens, allowed is "
            f"1..{tokens}"
        )


def without_start(config: AnyModel) -> AnyModel:
    """The same model without the weights that training starts from, as others will be loaded."""
    config = dataclasses.replace(config, weights=None)
    return dataclasses.replace(config, pretrained=None) if isinstance(config, ViTConfig) else config


def place(model: AnyModule, device: torch.device) -> AnyModule:
    """Moves the model to its device, in the form that is fast there.

    Convolutions are faster with channels last. The fused attention kernel is left where it is
    slower: on a CPU it has no dropout of its own. From then on a CPU's memory is kept, see
    `keep_freed_memory`.
    """
    if device.type == "cpu":
        keep_freed_memory()
    for module in model.modules():
        is_dropped = isinstance(module, Attention) and module.attn_drop.p > 0
        if device.type == "cpu" and is_dropped:
            setattr(module, "fused_attn", False)  # Final, but each instance has its own
    model.to(memory_format=torch.channels_last)
    return model.to(device)


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class Macs(NamedTuple):
    """Multiply-accumulates of one image in evaluation.

    `total`: convolutions, linear layers, attention; `with_weights`: without the products of two
    activations in attention and sequence pooling.
    """

    total: int
    with_weights: int


def count_macs(model: nn.Module, image_size: int) -> Macs:
    """Counts with torch's FlopCounterMode, two FLOPs to a multiply-accumulate."""
    image = torch.zeros(1, 3, image_size, image_size, device=next(model.parameters()).device)
    counter = FlopCounterMode(display=False)
    # the counter follows modules by their gradients, and stumbles over some without; of fused
    # attention on a CPU not every torch counts the products
    with evaluating(model), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(image)
    flops = counter.get_flop_counts()["Global"]
    with_weights = sum(n for operation, n in flops.items() if operation in WITH_WEIGHTS)
    return Macs(counter.get_total_flops() // 2, with_weights // 2)


def pretrained_statistics(model: nn.Module) -> tuple[list[float], list[float]] | None:
    """Mean and standard deviation that a timm model's weights were trained with."""
    known = getattr(model, "pretrained_cfg", {})
    return (list(known["mean"]), list(known["std"])) if "mean" in known else None
