"""Builds models from their configuration, reads their first weights, places and compiles them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timm.layers import Attention
from torch import nn

from reproduction.config import (
    HTM_RULES,
    MODEL,
    AnyModel,
    Augmentation,
    Config,
    HTMByName,
    Model,
    Own,
    Transformer,
    ViT,
)
from reproduction.errors import UserError, first_line
from reproduction.identity import own_code
from reproduction.machine import keep_freed_memory
from reproduction.models.cct import CCT
from reproduction.models.library import build_library_model, build_vit
from reproduction.models.weights import Weights, extract_weights, load_state, read_file
from tokenmixup import HTM, Adapter, TokenMixup, attach, blocks_of

COMPILER: dict[str, Any] = {
    "fullgraph": True,
    "dynamic": False,  # no kernel depends on the sizes of earlier batches
    "options": {
        "fallback_random": True,  # dropout draws as in eager mode
        "combo_kernels": True,  # small kernels that do not depend on each other are one launch
    },
}
BATCH_SIZES = 4  # maximum per run: full and last batch, and their micro-batches
Builder = Callable[..., nn.Module]
BUILDERS: dict[str, Builder] = {"cct": CCT, "vit": build_vit, "library": build_library_model}
REFUSED = (  # what libraries refuse, and so an error names
    "architecture",
    "pretrained",
    "global_pool",
    "options",
    "stem",
    "image_size",
    "embed_dim",
    "num_heads",
)
NOT_FOR_THE_MODEL = {x.name for x in dataclasses.fields(Model)} | {"family"}


def build_model(config: AnyModel, num_classes: int) -> nn.Module:
    """Builds the plain model, without TokenMixup; `load_initial_weights` reads `weights`.

    Raises UserError for what timm, torchvision or a factory of one's own cannot build.
    """
    return build_with_adapter(config, num_classes)[0]


def build_with_adapter(config: AnyModel, num_classes: int) -> tuple[nn.Module, Adapter | None]:
    """Builds the plain model; one of one's own may come with its adapter."""
    if isinstance(config, Own):
        with MODEL.refusing(config.source):
            made = MODEL.factory(config.source)(num_classes=num_classes, **config.options)
        if isinstance(made, tuple):
            return made
        return made, None
    build, arguments = constructor(config, num_classes)
    try:
        return build(**arguments), None
    except Exception as error:  # constructors, layers and the hub raise many types
        overrides = [f"model.{key}={arguments[key]}" for key in REFUSED if arguments.get(key)]
        raise UserError(f"{' '.join(overrides)}: {first_line(error)}") from error


def constructor(config: AnyModel, num_classes: int) -> tuple[Builder, dict[str, Any]]:
    """Returns what builds the plain model: a function and its keyword arguments."""
    if isinstance(config, Own):
        return MODEL.factory(config.source), {"num_classes": num_classes, **config.options}
    arguments = {"num_classes": num_classes}
    if isinstance(config, Transformer):
        arguments["image_size"] = config.image_size
    for key, value in dataclasses.asdict(config).items():
        if key not in NOT_FOR_THE_MODEL:
            arguments[key] = value
    return BUILDERS[config.family], arguments


def without_memory(config: AnyModel) -> torch.device:
    """Returns where a model is built for its shapes; code of one's own may read what it makes."""
    return torch.device("cpu" if isinstance(config, Own) else "meta")


def head_names(config: AnyModel) -> list[str]:
    """Returns the names of the parameters whose shape depends on the number of classes."""
    with without_memory(config):
        two, three = (build_model(without_weights(config), n).state_dict() for n in (2, 3))
    return [name for name in two if two[name].shape != three[name].shape]


def count_classes(config: AnyModel, weights: Weights) -> int:
    """Returns the number of classes of weights: of their names, else by the shape of the head.

    It is 2 without a head, to which any number is the same.
    """
    if weights.classes is not None:
        return len(weights.classes)
    with without_memory(config):
        state = weights.named_for(build_model(config, 2))
    head = [state[name] for name in head_names(config) if name in state]
    return max((len(value) for value in head if value.ndim), default=2)


def load_initial_weights(config: AnyModel, model: nn.Module) -> str | None:
    """Loads `weights`, if set, and returns what was loaded.

    A head of which no parameter fits, as for another number of classes, stays new. Raises UserError
    if the file is unreadable or does not fit.
    """
    if config.weights is None:
        return None
    origin = f"model.weights={config.weights}"
    state = extract_weights(origin, read_file(origin, Path(config.weights))).named_for(model)
    own = model.state_dict()
    shapes = {name: value.shape for name, value in state.items()}
    head = head_names(config)
    with_head = "and its head"
    if head and not any(shapes.get(name) == own[name].shape for name in head):
        for name in head:
            state[name] = own[name]
        with_head = f"but a new head for {len(own[head[0]])} classes"
    load_state(origin, state, model)
    return f"{len(state) - len(head)} parameters of {config.weights}, {with_head}"


def htm_of(config: HTMByName) -> HTM:
    """Returns the library's settings, with functions in place of their paths."""
    settings = {x.name: getattr(config, x.name) for x in dataclasses.fields(HTM)}
    for name, function_key in HTM_RULES.items():
        options = getattr(config, f"{name}_options")
        if settings[name] not in function_key.ours:
            settings[name] = function_key.made(settings[name], options)
        elif options:
            raise UserError(f"{function_key.key}_options={options}: {settings[name]} takes none")
    return HTM(**settings)


def build_module(config: AnyModel, stack: Augmentation, num_classes: int) -> TokenMixup:
    """Builds the model with the stack attached. UserError if that fails."""
    model, adapter = build_with_adapter(config, num_classes)
    htm = None
    if stack.htm is not None:
        htm = htm_of(stack.htm)
    try:
        return attach(
            model,
            num_classes,
            htm=htm,
            vtm=stack.vtm,
            manifold_mixup=stack.manifold_mixup,
            checkpoint_blocks=config.checkpoint_blocks,
            adapter=adapter,
        )
    except ValueError as error:
        raise UserError(f"model={config.name}: {error}") from error


def try_pass(config: Config, num_classes: int) -> TokenMixup:
    """Builds the model and runs a training pass, both on the meta device, which takes no memory.

    With code of one's own in it, it is the CPU, as that code may read what it gets. Raises
    UserError for a model that cannot be built, initial weights that do not fit it, and what only a
    pass refuses, such as `vtm.kappa` above the number of tokens.
    """
    model = config.model
    roles = {function_key.role for function_key, _ in own_code(config)}
    device = "meta" if roles.isdisjoint({"model", "tokens"}) else "cpu"
    with torch.device(device):
        module = build_module(model, config.augmentation, num_classes)
        images = torch.randn(2, 3, model.image_size, model.image_size)
        targets = torch.full((2, num_classes), 1 / num_classes)
        try:
            module(images, targets)
        except (AssertionError, ValueError, RuntimeError) as error:  # of settings, of shapes
            raise UserError(f"model={model.name}: {error}") from error
    load_initial_weights(model, module.model)
    return module


def build_trained(config: AnyModel, weights: Weights, num_classes: int) -> nn.Module:
    """Builds the plain model with trained weights; UserError if they do not fit."""
    model = build_model(without_weights(config), num_classes)
    load_state(weights.origin, weights.named_for(model), model)
    return model


def without_weights(config: AnyModel) -> AnyModel:
    """Returns the configuration without initial weights, for loading others."""
    config = dataclasses.replace(config, weights=None)
    if isinstance(config, ViT):
        config = dataclasses.replace(config, pretrained=None)
    return config


def place(model: nn.Module, device: torch.device) -> None:
    """Moves the model to its device and optimises it for the device.

    Convolutions use channels last, and no TF32 (matrix products use none by default). On a CPU,
    attention with dropout does not use the fused kernel, which is slower there, but in the blocks
    of VTM, which needs it; and freed memory is kept, see `keep_freed_memory`.
    """
    if device.type == "cpu":
        keep_freed_memory()
        fused = [part for block in blocks_of_vtm(model) for part in block.modules()]
        for module in model.modules():
            if isinstance(module, Attention) and module.attn_drop.p > 0 and module not in fused:
                setattr(module, "fused_attn", False)  # typed Final, but an instance attribute
    torch.backends.cudnn.allow_tf32 = False
    model.to(memory_format=torch.channels_last)
    model.to(device)


def blocks_of_vtm(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks whose attention gets VTM's memory."""
    if not isinstance(model, TokenMixup) or model.vtm is None:
        return []
    blocks = blocks_of(model.model, model.adapter)
    return [blocks[layer] for layer in model.vtm.by_layer]


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def compile_module(module: TokenMixup) -> None:
    """Compiles the module's passes as one graph for each batch size, at the first of each.

    Parameters and their names are unaffected, as is the plain model, which is what is evaluated.
    Torch counts graphs of all modules together, and stops at a limit, which is raised. With
    gradient checkpointing it cannot cut the graph where DistributedDataParallel's buckets end.
    """
    from torch._dynamo import config  # takes a second to import

    layers = 1 if module.manifold_mixup is None else len(module.manifold_mixup.layers)
    # a graph for each layer that may be drawn, and one more without mixing
    config.recompile_limit += BATCH_SIZES * (layers + 1)
    config.optimize_ddp = config.optimize_ddp and not module.checkpoint_blocks
    module.compile(**COMPILER)
