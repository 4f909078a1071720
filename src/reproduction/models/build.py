"""Builds models from their configuration, compiles them and measures their properties."""

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from timm.layers import Attention
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from reproduction.config import CCT as CCTConfig
from reproduction.config import AnyModel, Augmentation
from reproduction.config import ViT as ViTConfig
from reproduction.models.cct import CCT
from reproduction.models.library import build_library_model, build_vit
from reproduction.models.names import State
from reproduction.models.weights import matching_state, read_weights
from reproduction.system.errors import UserError, first_line
from reproduction.system.hardware import keep_freed_memory
from tokenmixup import TokenMixup, attach
from tokenmixup.contexts import evaluating

AnyModule = TypeVar("AnyModule", bound=nn.Module)

WITH_WEIGHTS = (torch.ops.aten.convolution, torch.ops.aten.addmm, torch.ops.aten.mm)
# Dropout draws as in eager mode, and no kernel depends on earlier batches.
OPTIONS: dict[str, Any] = {"fallback_random": True}
COMPILER: dict[str, Any] = {"fullgraph": True, "dynamic": False, "options": OPTIONS}
BATCH_SIZES = 4  # maximum per run: full and last batch, and their micro-batches
NOT_FOR_THE_MODEL = ("name", "family", "weights", "htm_layer", "vtm_layer", "checkpoint_blocks")


def build_model(config: AnyModel, num_classes: int) -> nn.Module:
    """Builds the plain model, without TokenMixup; `load_initial_weights` reads `weights`."""
    build, arguments = constructor(config, num_classes)
    return build(**arguments)


def constructor(
    config: AnyModel, num_classes: int
) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
    """Returns what builds the plain model: a function and its keyword arguments."""
    build: Callable[..., nn.Module] = build_library_model
    if isinstance(config, CCTConfig):
        build = CCT
    elif isinstance(config, ViTConfig):
        build = build_vit
    settings = dataclasses.asdict(config)
    arguments = {key: value for key, value in settings.items() if key not in NOT_FOR_THE_MODEL}
    return build, {"num_classes": num_classes, **arguments}


def head_names(config: AnyModel) -> list[str]:
    """Returns the names of the parameters whose shape depends on the number of classes."""
    with torch.device("meta"):
        one, two = (build_model(without_weights(config), n).state_dict() for n in (1, 2))
    return [name for name in one if one[name].shape != two[name].shape]


def count_classes(config: AnyModel, state: State) -> int:
    """Returns the number of classes of a state of the model, 1 if it has no head."""
    head = [state[name] for name in head_names(config) if name in state]
    return max((len(value) for value in head if value.ndim), default=1)


def load_initial_weights(config: AnyModel, model: nn.Module) -> str | None:
    """Loads `weights`, if set, and returns what was loaded.

    A head for another number of classes stays new, and a model on the meta device is only checked.
    Raises UserError if the file is unreadable or does not fit.
    """
    if config.weights is None:
        return None
    weights = read_weights(f"model.weights={config.weights}", Path(config.weights))
    head = head_names(config)
    state = matching_state(weights, model, head)
    if not next(model.parameters()).is_meta:
        model.load_state_dict(state)
    new = [name for name in head if state[name] is not weights.state.get(name)]
    with_head = f"but a new head for {len(state[new[0]])} classes" if new else "and its head"
    return f"{len(state) - len(head)} parameters of {config.weights}, {with_head}"


def build_module(
    config: AnyModel, stack: Augmentation, num_classes: int, model: nn.Module | None = None
) -> TokenMixup:
    """Builds the model, if it is not given, with the stack attached. UserError if that fails."""
    model = build_model(config, num_classes) if model is None else model
    try:
        return attach(
            model,
            num_classes,
            stack.htm,
            stack.vtm,
            stack.manifold_mixup,
            getattr(config, "checkpoint_blocks", False),  # other models have no blocks
        )
    except ValueError as error:
        raise UserError(f"model={config.name}: {error}") from error


def without_weights(config: AnyModel) -> AnyModel:
    """Returns the configuration without initial weights, for loading others."""
    config = dataclasses.replace(config, weights=None)
    return dataclasses.replace(config, pretrained=None) if isinstance(config, ViTConfig) else config


def place(model: AnyModule, device: torch.device) -> AnyModule:
    """Moves the model to its device and optimises it for the device.

    Convolutions use channels last. On a CPU, attention with dropout does not use the fused kernel,
    which is slower there, and freed memory is kept, see `keep_freed_memory`.
    """
    if device.type == "cpu":
        keep_freed_memory()
        for module in model.modules():
            if isinstance(module, Attention) and module.attn_drop.p > 0:
                setattr(module, "fused_attn", False)  # typed Final, but an instance attribute
    model.to(memory_format=torch.channels_last)
    return model.to(device)


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class Macs(NamedTuple):
    """Multiply-accumulates of one image in evaluation.

    `total` counts convolutions, linear layers and attention. `with_weights` excludes products of
    two activations, in attention and sequence pooling.
    """

    total: int
    with_weights: int


def count_macs(model: nn.Module, image_size: int) -> Macs:
    """Counts by torch's FlopCounterMode, with two FLOPs per multiply-accumulate."""
    image = torch.zeros(1, 3, image_size, image_size, device=next(model.parameters()).device)
    counter = FlopCounterMode(display=False)
    # The counter tracks modules by gradients and fails on some without them. Some versions of
    # torch do not count fused attention on a CPU.
    with evaluating(model), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(image)
    flops = counter.get_flop_counts()["Global"]
    with_weights = sum(n for operation, n in flops.items() if operation in WITH_WEIGHTS)
    return Macs(counter.get_total_flops() // 2, with_weights // 2)


def pretrained_statistics(model: nn.Module) -> tuple[list[float], list[float]] | None:
    """Returns the mean and std that the weights of a timm model were trained with, if known."""
    cfg = getattr(model, "pretrained_cfg", {})
    return (list(cfg["mean"]), list(cfg["std"])) if "mean" in cfg else None


def compile_module(module: TokenMixup) -> None:
    """Compiles the module's passes as one graph for each batch size, at the first of each.

    Parameters and their names are unaffected, as is the plain model, which is what is evaluated.
    Torch counts graphs of all modules together, and stops at a limit, which is raised. With
    gradient checkpointing it cannot cut the graph where DistributedDataParallel's buckets end.
    """
    from torch._dynamo import config  # takes a second to import

    layers = 1 if module.manifold_mixup is None else len(module.manifold_mixup.layers)
    config.recompile_limit += BATCH_SIZES * (layers + 1)  # and without mixing
    config.optimize_ddp = config.optimize_ddp and not module.checkpoint_blocks
    module.compile(**COMPILER)


@cache
def check_compiler(device: str) -> None:
    """Compiles a trivial function. Raises UserError if torch.compile does not work."""
    try:
        torch.compile(lambda x: x + 1, **COMPILER)(torch.ones(2, device=device))
    except Exception as error:  # from Triton, the C++ compiler or an old GPU
        reason = first_line(getattr(error, "inner_exception", error))
        needs = "Triton and a C compiler" if device == "cuda" else "a C++ compiler"
        raise UserError(
            f"compile: does not work on this machine, torch needs {needs} for {device} "
            f"({reason}); allowed is false"
        ) from error
