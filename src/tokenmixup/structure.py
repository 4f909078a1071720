"""Checks whether TokenMixup supports a model, and queries the model's structure.

A supported model runs a plain sequence `blocks` over one token axis. Each block applies attention
of a known class to `norm1` of its input, and then an MLP. Norm and projections treat tokens
independently, so that their outputs can be moved with the tokens.
"""

import math
import re
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tokenmixup.adapters import Adapted, Adapter, adapter_of, attention_module
from tokenmixup.scorenet import Pooling

# (module, class). An unknown class may have terms that would be silently lost.
ATTENTIONS = {
    ("timm.layers.attention", "Attention"),
    ("timm.models.vision_transformer", "Attention"),  # older timm
    ("timm.layers.attention", "AttentionRope"),
    ("timm.models.eva", "EvaAttention"),
    ("timm.models.beit", "Attention"),
    ("timm.models.vision_transformer_relpos", "RelPosAttention"),
    ("timm.models.cait", "TalkingHeadAttn"),
}
BLOCKS = {
    ("timm.models.vision_transformer", "Block"),
    ("timm.models.eva", "EvaBlock"),
    ("timm.models.beit", "Block"),
    ("timm.models.vision_transformer_relpos", "RelPosBlock"),
    ("timm.models.cait", "LayerScaleBlock"),
}
HOOKS = ("forward", "forward_pre", "backward", "backward_pre")
HEADS = ("head", "heads", "classifier", "fc")  # of models without timm's get_classifier
JOINS_LAST = (math.inf, 99999.0)  # with timm's MATCH_PREV_GROUP: the group before, the head's
STAGES = ("stages", "layers", "network", "levels", "layer1", "stage1", "stages_1")


def why_not(
    model: Any, last_layer: int | None = None, adapter: Adapter | None = None
) -> str | None:
    """Returns in one line why blocks 0..last_layer (None: all) are not supported; None if they are.

    With an adapter all blocks are checked.
    """
    if hasattr(model, "_orig_mod"):
        return (
            f"{type(model).__name__} is already compiled: attach first, then compile "
            "module.unchanged_blocks()"
        )
    if isinstance(model, nn.DataParallel | DistributedDataParallel):
        return f"it is in a {type(model).__name__}: attach first, then wrap"
    if is_sharded(model):
        return "it is sharded by fully_shard: attach first, then shard"
    if hasattr(model, "scorenets"):
        return "TokenMixup is already attached to it"
    try:
        view = view_of(model, adapter)
        adapted = isinstance(view, Adapted)
        return _why_not_adapted(view) if adapted else _why_not(model, last_layer)
    except ValueError as error:  # the adapter does not fit
        return str(error)


def view_of(model: Any, adapter: Adapter | None = None) -> Any:
    """Returns the model itself, or its view with timm's names if it needs an adapter."""
    adapter = adapter or adapter_of(model)
    return model if adapter is None else Adapted(model, adapter)


def is_sharded(model: Any) -> bool:
    """Whether FSDP's `fully_shard` holds parameters of the model; imports nothing of it."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return any(kind.__name__ == "FSDPModule" for x in modules for kind in type(x).__mro__)


def head_size(model: Any) -> int | None:
    """Returns the number of logits of a linear head; None if the model does not say it."""
    classifier = getattr(model, "get_classifier", None)
    heads = (getattr(model, name, None) for name in HEADS)
    head = classifier() if classifier else next((x for x in heads if x is not None), None)
    while isinstance(head, nn.Sequential | tuple) and len(head):
        head = head[-1]
    return head.out_features if isinstance(head, nn.Linear) else None


def layer_group(groups: Any, name: str) -> Any:
    """Returns timm's ordinal of a parameter of the attached module, as of the plain model's.

    `groups`: what the model's `group_matcher` returns: a function of names, or regular expressions.
    """
    own = name.removeprefix("model.")
    if own == name:  # of a ScoreNet
        return JOINS_LAST
    if callable(groups):
        return groups(own)
    for ordinal, patterns in enumerate(groups.values()):
        pairs = [(patterns, None)] if isinstance(patterns, str) else patterns or ()
        for pattern, suffix in pairs:
            if found := re.match(pattern, own):
                return tuple(map(float, (ordinal, *found.groups(), *(suffix or ()))))
    return (math.inf,)


def _why_not_adapted(view: Adapted) -> str | None:
    kind = type(view.model).__name__
    for index, block in enumerate(view.blocks):
        if getattr(block.module, "norm_first", True) is False:
            return f"{kind}: block {index} normalises after its attention (norm_first=False)"
        if reason := _why_not_projections(block.attn, block.attention):
            return f"{kind}: block {index}, {reason}"
    if type(view.num_prefix_tokens) is not int or view.num_prefix_tokens < 0:
        return f"{kind}: Adapter.num_prefix_tokens={view.num_prefix_tokens!r} must be an int >= 0"
    if view.adapter.reads_class_token and not view.num_prefix_tokens:
        return f"{kind}: Adapter.reads_class_token needs num_prefix_tokens >= 1"
    if type(view.embed_dim) is not int:
        return f"{kind}: Adapter.embed_dim={view.adapter.embed_dim!r} is not the path of an int"
    return None


def _why_not(model: Any, last_layer: int | None) -> str | None:
    kind = type(model).__name__
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.Sequential | nn.ModuleList) or not len(blocks):
        return f"{kind} {_why_no_blocks(model)}"
    if len({id(block) for block in blocks}) < len(blocks):
        return f"{kind} holds one block more than once"
    for index, block in enumerate(blocks if last_layer is None else blocks[: last_layer + 1]):
        if reason := _why_not_block(block):
            return f"{kind}: block {index} is {type(block).__name__}, {reason}"
    for module in model.modules():
        if type(module).__name__.startswith("PatchDropout") and getattr(module, "prob", 0) > 0:
            return f"{kind} has patch dropout: tokens of two samples would differ in position"
    if not isinstance(getattr(model, "embed_dim", None), int):
        return f"{kind} has no embed_dim, the width of its tokens"
    return None


def _why_no_blocks(model: Any) -> str:
    if not type(model).__module__.startswith("timm."):
        return "has no sequence named blocks; a plain transformer needs an Adapter"
    has_stages = any(hasattr(model, name) for name in STAGES)
    reason = "its layers form stages" if has_stages else "it has none"
    return f"needs one sequence of blocks over one token axis; {reason}"


def _why_not_block(block: Any) -> str | None:
    attn = getattr(block, "attn", None)
    if attn is None:
        return "which has no self-attention named attn"
    if not (_class_path(block) in BLOCKS or getattr(block, "attends_to_norm1", False)):
        return "not pre-norm self-attention followed by an MLP over one token axis"
    if _class_path(attn) not in ATTENTIONS:
        return f"whose {type(attn).__name__} is not a softmax of q k^T with known terms"
    return _why_not_projections(attn, attn)


def check_projections(index: int, block: Any) -> None:
    """Raises ValueError if a block's attention has been modified since `attach`."""
    if reason := _why_not_projections(block.attn, attention_module(block)):
        raise ValueError(f"TokenMixup no longer supports block {index}, {reason}")


def _why_not_projections(attn: Any, module: Any) -> str | None:
    """Only the weights of projections are used: wrappers and hooks would be ignored."""
    if "forward" in vars(module):
        return f"whose {type(module).__name__} has a forward of its own"
    if module._forward_pre_hooks:
        return f"whose {type(module).__name__} has hooks that may change what enters it"
    for name in ("qkv", "q_proj", "k_proj", "v_proj"):
        projection = getattr(attn, name, None)
        if not isinstance(projection, nn.Module):
            continue
        if type(projection) is not nn.Linear:
            return f"whose {name} is {type(projection).__name__}, not a plain Linear"
        if any(getattr(projection, f"_{kind}_hooks") for kind in HOOKS):
            return f"whose {name} has hooks, which would not run"
    return None


def _class_path(module: Any) -> tuple[str, str]:
    return type(module).__module__, type(module).__name__


def check_layer(model: Any, key: str, layer: int, adapter: Adapter | None = None) -> None:
    """Raises ValueError unless blocks 0..layer exist and are supported."""
    if reason := why_not(model, layer, adapter):
        raise ValueError(f"TokenMixup does not support this model: {reason}")
    count = len(view_of(model, adapter).blocks)
    if layer >= count:
        raise ValueError(f"{key}={layer}: {type(model).__name__} has blocks 0..{count - 1}")


def check_rollout(model: Any, layer: int, steps: int, adapter: Adapter | None = None) -> None:
    """Raises ValueError if attention cannot be rolled out over `steps` blocks after `layer`."""
    if steps == 0:
        return
    check_layer(model, "htm.layer + htm.rollout_steps", layer + steps, adapter)
    if getattr(model, "rope_mixed", False) or getattr(model, "rope_is_mixed", False):
        raise ValueError(
            f"htm.rollout_steps={steps}: must be 0, since each block of {type(model).__name__} has "
            "rotary positions of its own"
        )


def scorenet_pooling(model: Any, asked: str) -> Pooling:
    """Returns the pooling of ScoreNet; `auto` is the class token if the head reads it.

    Raises ValueError if `class_token` is requested and none enters the blocks.
    """
    if asked == "auto":
        return "class_token" if reads_class_token(model) else "attention"
    if asked == "class_token" and not has_class_token(model):
        raise ValueError("htm.pooling='class_token': no class token enters the blocks")
    return cast(Pooling, asked)


def reads_class_token(model: Any) -> bool:
    """Whether a class token enters the blocks and the head reads it.

    Saliency is then the attention of its query, else the mean over all queries (Eq. 3).
    """
    return getattr(model, "global_pool", None) == "token" and has_class_token(model)


def declared_prefix(model: Any) -> int:
    """Returns the number of prefix tokens that enter the blocks, according to the model."""
    joins_later = hasattr(model, "blocks_token_only")  # CaiT's class token has blocks of its own
    return 0 if joins_later else getattr(model, "num_prefix_tokens", 0)


def has_class_token(model: Any) -> bool:
    """Whether a class token enters the blocks, whether the model or its embedding adds it."""
    if isinstance(model, Adapted):
        return model.has_class_token
    names = (name.rpartition(".")[2] for name, _ in model.named_parameters())
    return declared_prefix(model) > 0 and "cls_token" in names
