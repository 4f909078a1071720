"""Which models TokenMixup can serve, and what it needs to know of them.

A served model runs a plain sequence `blocks` over one token axis; each block attends to `norm1` of
its input by an attention whose terms are all known here, and an MLP follows. Norm and projections
act on each token alone: what they make of a token moves with it.
"""

from typing import Any, cast

from torch import nn

from tokenmixup.adapters import Adapted, Adapter, adapter_of, attention_module
from tokenmixup.scorenet import Pooling

# (module, class). Another class may add terms that would be silently lost.
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
STAGES = ("stages", "layers", "network", "levels", "layer1", "stage1", "stages_1")


def why_not(
    model: Any, last_layer: int | None = None, adapter: Adapter | None = None
) -> str | None:
    """Why blocks 0..last_layer (None: all) cannot be served, in one line; None if they can.

    With an adapter all of them are looked at.
    """
    if hasattr(model, "_orig_mod"):
        told = "compile the unchanged_blocks() of what attach returns instead"
        return f"{type(model).__name__} is compiled already: {told}"
    try:
        view = view_of(model, adapter)
        if isinstance(view, Adapted):
            return _why_not_adapted(view)
    except ValueError as error:  # of an adapter that does not fit
        return str(error)
    return _why_not(model, last_layer)


def view_of(model: Any, adapter: Adapter | None = None) -> Any:
    """The model by the names that are read here: itself, or by an adapter."""
    adapter = adapter or adapter_of(model)
    return model if adapter is None else Adapted(model, adapter)


def _why_not_adapted(view: Adapted) -> str | None:
    kind = type(view.model).__name__
    for index, block in enumerate(view.blocks):
        if getattr(block.module, "norm_first", True) is False:
            return f"{kind}: block {index} normalises after its attention (norm_first=False)"
        if reason := _why_not_projections(block.attn, block.attention):
            return f"{kind}: block {index}, {reason}"
    if type(view.num_prefix_tokens) is not int or view.num_prefix_tokens < 0:
        return (
            f"{kind}: Adapter.num_prefix_tokens={view.num_prefix_tokens!r} is no whole number >= 0"
        )
    if view.adapter.reads_class_token and not view.num_prefix_tokens:
        return f"{kind}: Adapter.reads_class_token needs num_prefix_tokens >= 1"
    if type(view.embed_dim) is not int:
        return f"{kind}: Adapter.embed_dim={view.adapter.embed_dim!r} leads to no whole number"
    return None


def _why_not(model: Any, last_layer: int | None) -> str | None:
    kind = type(model).__name__
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.Sequential | nn.ModuleList) or not len(blocks):
        has_stages = any(hasattr(model, name) for name in STAGES)
        instead = "its layers form stages" if has_stages else "it has none"
        return f"{kind} needs one sequence of blocks over one token axis; {instead}"
    if len({id(block) for block in blocks}) < len(blocks):
        return f"{kind} holds one block more than once"
    for index, block in enumerate(blocks if last_layer is None else blocks[: last_layer + 1]):
        if reason := _why_not_block(block):
            return f"{kind}: block {index} is {type(block).__name__}, {reason}"
    for module in model.modules():
        if type(module).__name__.startswith("PatchDropout") and getattr(module, "prob", 0) > 0:
            return f"{kind} has patch dropout: tokens need a place"
    if not isinstance(getattr(model, "embed_dim", None), int):
        return f"{kind} does not tell the width of its tokens as embed_dim"
    return None


def _why_not_block(block: Any) -> str | None:
    attn = getattr(block, "attn", None)
    if attn is None:
        return "which holds no self-attention as attn"
    if not (_class_path(block) in BLOCKS or getattr(block, "attends_to_norm1", False)):
        return "not pre-norm self-attention and then an MLP over one token axis"
    if _class_path(attn) not in ATTENTIONS:
        return f"whose {type(attn).__name__} is not a softmax of q k^T with known terms"
    return _why_not_projections(attn, attn)


def check_projections(index: int, block: Any) -> None:
    """Raises ValueError if something has been put on a block's attention since `attach`."""
    if reason := _why_not_projections(block.attn, attention_module(block)):
        raise ValueError(f"TokenMixup cannot serve block {index} any more, {reason}")


def _why_not_projections(attn: Any, module: Any) -> str | None:
    """Their weights are read one by one: what replaces them, or listens to them, would be lost."""
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
    """Raises ValueError unless block `layer` and those before it are there and can be served."""
    if reason := why_not(model, layer, adapter):
        raise ValueError(f"TokenMixup cannot serve this model: {reason}")
    count = len(view_of(model, adapter).blocks)
    if layer >= count:
        raise ValueError(f"{key}={layer}: {type(model).__name__} has blocks 0..{count - 1}")


def check_rollout(model: Any, layer: int, steps: int, adapter: Adapter | None = None) -> None:
    """Raises ValueError if `steps` further blocks cannot run ahead of block `layer`."""
    if steps == 0:
        return
    check_layer(model, "htm.layer + htm.rollout_steps", layer + steps, adapter)
    if getattr(model, "rope_mixed", False) or getattr(model, "rope_is_mixed", False):
        raise ValueError(
            f"htm.rollout_steps={steps}: each block of {type(model).__name__} has "
            "rotary positions of its own, so that only 0 steps are possible"
        )


def scorenet_pooling(model: Any, asked: str) -> Pooling:
    """The pooling of ScoreNet; `auto`: the class token if the class is read from it.

    Raises ValueError for a class token that is not there.
    """
    if asked == "auto":
        return "class_token" if reads_class_token(model) else "attention"
    if asked == "class_token" and not has_class_token(model):
        raise ValueError("htm.pooling='class_token': no class token enters the blocks")
    return cast(Pooling, asked)


def reads_class_token(model: Any) -> bool:
    """Whether the blocks hold a class token and the class is read from it.

    Saliency is then what its query attends to, else the mean over all queries (Eq. 3).
    """
    return getattr(model, "global_pool", None) == "token" and has_class_token(model)


def declared_prefix(model: Any) -> int:
    """Prefix tokens that the model says its blocks get."""
    joins_later = hasattr(model, "blocks_token_only")  # CaiT's class token, in blocks of its own
    return 0 if joins_later else getattr(model, "num_prefix_tokens", 0)


def has_class_token(model: Any) -> bool:
    """Whether the blocks get a class token, the model's own or its embedding's."""
    if isinstance(model, Adapted):
        return model.has_class_token
    names = (name.rpartition(".")[2] for name, _ in model.named_parameters())
    return declared_prefix(model) > 0 and "cls_token" in names
