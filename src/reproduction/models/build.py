"""From the model's configuration to the model, compiled if asked for, and what is known of it."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from timm.layers import Attention
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from reproduction.config import CCT as CCTConfig
from reproduction.config import AnyModel, Augmentation
from reproduction.config import ViT as ViTConfig
from reproduction.models.cct import CCT
from reproduction.models.library import build_library_model, build_vit
from reproduction.models.names import State
from reproduction.models.weights import fitting, read_weights
from reproduction.system.errors import UserError, first_line
from reproduction.system.hardware import keep_freed_memory
from tokenmixup import TokenMixup, attach, why_not
from tokenmixup.contexts import evaluating
from tokenmixup.structure import declared_prefix

AnyModule = TypeVar("AnyModule", bound=nn.Module)

WITH_WEIGHTS = (torch.ops.aten.convolution, torch.ops.aten.addmm, torch.ops.aten.mm)
# Dropout is drawn as without compiling, and no kernel depends on the batches before.
COMPILER: Callable[..., Any] = partial(
    torch.compile, dynamic=False, options={"fallback_random": True}
)
BATCH_SIZES = 4  # at most, in a run: of whole batches and the last one, and of their micro-batches
NOT_FOR_THE_MODEL = ("name", "family", "weights", "htm_layer", "vtm_layer", "checkpoint_blocks")


def build_model(config: AnyModel, num_classes: int) -> nn.Module:
    """The plain model, without TokenMixup, with the weights that training starts from."""
    model = _build_random(config, num_classes)
    if config.weights is not None:
        model.load_state_dict(start_weights(config, model))
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


def head_of(config: AnyModel) -> list[str]:
    """Names of the parameters whose shape follows the number of classes."""
    with torch.device("meta"):
        one, two = (build_model(without_start(config), n).state_dict() for n in (1, 2))
    return [name for name in one if one[name].shape != two[name].shape]


def count_classes(config: AnyModel, state: State) -> int:
    """How many classes a state of the model tells apart; 1 if it has no head."""
    head = [state[name] for name in head_of(config) if name in state]
    return max((len(value) for value in head if value.ndim), default=1)


def start_weights(config: AnyModel, model: nn.Module) -> State:
    """What `weights` holds: all parameters but for a head of another number of classes.

    Raises UserError if the file is not readable or does not fit.
    """
    assert config.weights is not None
    return fitting(read_weights("model.weights", Path(config.weights)), model, head_of(config))


def build_module(config: AnyModel, stack: Augmentation, num_classes: int) -> TokenMixup:
    """The model with what the stack mixes inside it attached; UserError if it cannot be."""
    model = build_model(config, num_classes)
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


def check_tokens(module: TokenMixup, config: AnyModel) -> None:
    """Raises UserError if the blocks get too few tokens for VTM; allocates nothing on meta."""
    if module.vtm is None:
        return
    kappa = max(vtm.kappa for vtm in module.vtm.each.values())
    seen = list[int]()
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


def attention_kernel(model: nn.Module, image_size: int) -> str | None:
    """What attends in training: torch's fused `flash`, `efficient` or `cudnn`, or `composed`.

    It depends on device, precision (by the caller's autocast), head width and dropout. None of a
    model that is no plain sequence of blocks.
    """
    if why_not(model) is not None:
        return None
    image = torch.zeros(1, 3, image_size, image_size, device=next(model.parameters()).device)
    with evaluating(model), torch.no_grad(), _Operations() as operations:
        for block in cast(Any, model).blocks:
            block.attn.training = True  # its normalisation, if any, stays in evaluation
        model(image)
    names = map(re.compile(r"_scaled_dot_product_([a-z]+)_").match, operations.names)
    return next((found[1] for found in names if found), "composed")


class _Operations(TorchDispatchMode):
    """Notes the operations that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def pretrained_statistics(model: nn.Module) -> tuple[list[float], list[float]] | None:
    """Mean and standard deviation that a timm model's weights were trained with."""
    known = getattr(model, "pretrained_cfg", {})
    return (list(known["mean"]), list(known["std"])) if "mean" in known else None


def compile_blocks(module: TokenMixup) -> None:
    """Compiles in place what runs unchanged in a training pass; nothing is built before the first.

    Parameters, their names and evaluation stay as they are. All blocks share one limit of torch's,
    beyond which it silently compiles no more; it is raised to what they need, as each has a rate of
    stochastic depth of its own.
    """
    from torch._dynamo import config  # a second, which other runs save

    parts = [*_unchanged_parts(module)]
    config.recompile_limit = max(config.recompile_limit, BATCH_SIZES * len(parts))
    for part in parts:
        # bound to the part, so that the forward pass of a copy is the copy's own
        setattr(part, "forward", MethodType(_compiled_in_training(type(part).forward), part))
    if module.htm is not None:
        choose, weigh = COMPILER(module.rules.choose), COMPILER(module.rules.weigh)
        module.rules = module.rules._replace(choose=choose, weigh=weigh)


def _unchanged_parts(module: TokenMixup) -> Iterator[nn.Module]:
    """ScoreNet and all blocks, but only the MLP of those whose attention is replaced."""
    model: Any = module.model
    yield from module.scorenets.values()
    replaced = module.replaced_attention()
    for index, block in enumerate(model.blocks):
        yield block.mlp if index in replaced else block


def _compiled_in_training(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A module's `forward`, compiled while it trains, as it is in evaluation."""
    compiled = COMPILER(forward)

    @wraps(forward)
    def run(part: nn.Module, *args: Any, **given: Any) -> Tensor:
        return (compiled if part.training else forward)(part, *args, **given)

    return run


@cache
def check_compiler(device: str) -> None:
    """Builds a sum; UserError if torch.compile cannot work here."""
    try:
        COMPILER(lambda x: x + 1)(torch.ones(2, device=device))
    except Exception as error:  # of Triton, of the C++ compiler, of an old GPU
        reason = first_line(getattr(error, "inner_exception", error))
        needs = "Triton and a C compiler" if device == "cuda" else "a C++ compiler"
        raise UserError(
            f"compile=true: does not work on this machine, where torch needs {needs} for "
            f"{device} ({reason}); allowed is false"
        ) from error
