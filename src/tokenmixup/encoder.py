"""Finds the encoder of a model by its adapter, or says in one line why it is not supported.

A supported model runs a plain sequence of blocks over one token axis. Each block applies attention
of a known kind to the norm of its input, and then an MLP. Norm and projections treat tokens
independently, so that their outputs can be moved with the tokens.
"""

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tokenmixup.adapters import (
    Adapter,
    adapter_of,
    class_path,
    has_class_token,
    package,
    timm_parts,
)
from tokenmixup.attention import Parts

# timm's, as (module, class). An unknown class may have terms that would be silently lost.
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
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
SAY_BY_ADAPTER = "an Adapter must say num_prefix_tokens and reads_class_token"
HEADS = ("head", "heads", "classifier", "fc")  # of models without timm's get_classifier
JOINS_LAST = (math.inf, 99999.0)  # with timm's MATCH_PREV_GROUP: the group before, the head's
PATCHABLE = ("timm", "torch", "transformers")  # packages whose attentions are known
# Methods of timm's models that decide which tokens are the prefix and what the head reads.
DECIDING = ("_pos_embed", "forward_features", "forward_head", "pool")
STAGES = ("stages", "layers", "network", "levels", "layer1", "stage1", "stages_1")
OF_WEIGHTS = ("need_weights", "average_attn_weights")  # arguments without effect on the tokens


@dataclass(frozen=True)
class Block:
    """A block of the encoder: its module, and the two modules that TokenMixup uses."""

    module: Any
    norm: Any  # before the attention
    attn: Any
    width: int  # of the tokens that enter it
    adapter: Adapter

    def parts(self) -> Parts:
        """Returns the Parts of the attention as it is now."""
        assert self.adapter.parts is not None, "needed where Encoder.has_parts"
        try:
            parts = self.adapter.parts(self.attn)
        except (AttributeError, ValueError) as error:  # such as of another module
            raise ValueError(f"Adapter.parts of {self.adapter.attn}: {error}") from error
        if not isinstance(parts, Parts):
            raise ValueError(f"Adapter.parts: returned a {type(parts).__name__}, must be Parts")
        return parts

    def answer(self, attend: Callable[..., Tensor], called: Any, given: Any) -> Any:
        """Answers a call of the attention, as its module would, by `attend(tokens, **given)`."""
        if not called:
            raise ValueError("an attention gets its tokens by keyword: must be its first argument")
        tokens, *others = called
        positional = {}
        for name, value in (*enumerate(others, start=1), *given.items()):
            if name in self.adapter.arguments:
                positional[name] = value
            elif not (name in OF_WEIGHTS or value is None or value is False or value is tokens):
                raise ValueError(
                    "TokenMixup supports only self-attention without a mask; argument "
                    f"{name} of the attention, such as a mask or positions, is not understood"
                )
        return self.adapter.returns(attend(tokens, **positional))

    def why_not(self) -> str | None:
        """Returns in one line why TokenMixup does not support the block as it is now."""
        if hasattr(self.module, "_orig_mod"):
            return "which is compiled by itself: compile the attached module as a whole"
        if self.adapter.parts is None:
            return None
        if getattr(self.module, "norm_first", True) is False:
            return "which normalises after its attention (norm_first=False)"
        if isinstance(self.norm, BATCH_NORMS):
            return f"whose {type(self.norm).__name__} would update its statistics twice"
        if is_patched(self.attn):
            return f"whose {type(self.attn).__name__}'s class got another forward"
        return _why_not_projections(self.parts(), self.attn)


@dataclass(frozen=True)
class Encoder:
    """The blocks of a model and what enters and leaves them."""

    blocks: tuple[Block, ...]
    num_prefix_tokens: int  # that enter the blocks, as the model declares it
    has_class_token: bool  # whether one of them is a class token
    # Whether the head reads it: saliency is then the attention of its query, else the mean over all
    # queries (Eq. 3).
    reads_class_token: bool
    patch_embed: nn.Module | None  # whose output has one token for each patch, if known
    own_positions: bool  # whether each block gets rotary positions of its own
    has_parts: bool  # whether each block attends to all tokens, with known Parts


def why_not(model: Any, adapter: Adapter | None = None) -> str | None:
    """Returns in one line why a block of the model is not supported, or None."""
    try:
        find_encoder(model, adapter)
    except ValueError as error:
        return str(error)
    return None


def find_encoder(
    model: Any, adapter: Adapter | None = None, last_layer: int | None = None
) -> Encoder:
    """Returns the encoder of a model. Raises ValueError with the one-line reason if there is none.

    Only blocks 0..last_layer (None: all) must be supported.
    """
    if hasattr(model, "_orig_mod"):
        kind = type(model).__name__
        raise ValueError(f"{kind} is already compiled: attach first, then compile the module")
    if isinstance(model, nn.DataParallel | DistributedDataParallel):
        raise ValueError(f"it is in a {type(model).__name__}: attach first, then wrap")
    if is_sharded(model):
        raise ValueError("it is sharded by fully_shard: attach first, then shard")
    if hasattr(model, "scorenets"):
        raise ValueError("TokenMixup is already attached to it")
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if type(module).__name__.startswith("PatchDropout") and getattr(module, "prob", 0) > 0:
            kind = type(model).__name__
            raise ValueError(
                f"{kind} has patch dropout: tokens of two samples would differ in position"
            )
    return encoder_now(model, adapter, last_layer)


def encoder_now(model: Any, told: Adapter | None, checked: Collection[int] | int | None) -> Encoder:
    """Returns the encoder as the model is now. Raises ValueError as `find_encoder`.

    Only the blocks `checked`, all up to one (None: all) must be supported.
    """
    adapter, kind = told or adapter_of(model), type(model).__name__
    is_timm = adapter.parts is timm_parts
    if told is None and is_timm and (reason := _why_not_timm(model) or _why_not_known(model)):
        raise ValueError(f"{kind} {reason}")
    prefix = adapter.num_prefix_tokens
    if type(prefix) is not int or prefix < 0:
        raise ValueError(f"{kind}: Adapter.num_prefix_tokens={prefix!r} must be an int >= 0")
    if adapter.reads_class_token and not prefix:
        raise ValueError(f"{kind}: Adapter.reads_class_token needs num_prefix_tokens >= 1")
    modules = _sequence(model, adapter)
    if not isinstance(checked, Collection):
        checked = range(len(modules) if checked is None else min(checked + 1, len(modules)))
    for index in checked:
        if index >= len(modules):
            raise ValueError(f"{kind}: has blocks 0..{len(modules) - 1}, no block {index}")
    blocks = [_block(model, x, adapter, index in checked) for index, x in enumerate(modules)]
    for index, block in ((index, blocks[index]) for index in checked):
        foreign = adapter.own_classes and _why_not_own(block, class_path(model)[0])
        if reason := foreign or (is_timm and _why_not_timm_block(block.module)) or block.why_not():
            raise ValueError(f"{kind}: block {index} is {type(block.module).__name__}, {reason}")
    return Encoder(
        tuple(blocks),
        prefix,
        has_class_token=prefix > 0 and (adapter.reads_class_token or has_class_token(model)),
        reads_class_token=adapter.reads_class_token,
        patch_embed=_patch_embed(model, adapter),
        own_positions=any(getattr(model, f"rope_{x}mixed", False) for x in ("", "is_")),
        has_parts=adapter.parts is not None,
    )


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


def _sequence(model: Any, adapter: Adapter) -> list[nn.Module]:
    """Returns the modules of the blocks."""
    blocks = [model]
    for path in adapter.blocks.split(".*."):
        stages, blocks = blocks, []
        for stage in stages:
            part = _follow(stage, path, "blocks")
            if not isinstance(part, nn.Sequential | nn.ModuleList) or not len(part):
                kind = f"is {type(part).__name__}, needs a Sequential or ModuleList of blocks"
                raise ValueError(f"Adapter.blocks={path!r}: {kind}")
            blocks += part
    if len({id(block) for block in blocks}) < len(blocks):
        raise ValueError(f"Adapter.blocks={adapter.blocks!r}: holds one block more than once")
    return blocks


def _patch_embed(model: Any, adapter: Adapter) -> nn.Module | None:
    """Returns the module whose output has one token for each patch, if it is known."""
    if adapter.patch_embed is not None:
        return _follow(model, adapter.patch_embed, "patch_embed")
    if adapter.parts is None:
        return None
    beside = model.get_submodule(adapter.blocks.rpartition(".")[0])
    embed = getattr(beside, "patch_embed", None)
    return embed if isinstance(embed, nn.Module) else None


def _block(model: Any, module: Any, adapter: Adapter, is_checked: bool) -> Block:
    """Resolves a block; one that is not checked may lack the norm and the attention."""
    try:
        paths = {"norm": adapter.norm, "attn": adapter.attn}
        norm, attn = (path and _follow(module, path, key) for key, path in paths.items())
    except ValueError:
        if is_checked and adapter.parts is not timm_parts:
            raise
        norm = attn = None
    if is_checked and norm is not None and norm is attn:
        raise ValueError(f"Adapter.norm={adapter.norm!r}: is the attention")
    return Block(module, norm, attn, _width(model, module, adapter), adapter)


def _width(model: Any, module: Any, adapter: Adapter) -> int:
    """Returns the width of the tokens that enter a block."""
    width = told = adapter.embed_dim
    if isinstance(told, str):
        of_block = told.startswith("block.")
        start = module if of_block else model
        width = _follow(start, told.removeprefix("block."), "embed_dim")
    if type(width) is not int:
        kind = type(model).__name__
        raise ValueError(f"{kind}: Adapter.embed_dim={told!r} is not the path of an int")
    return width


def _follow(start: Any, path: str, field: str) -> Any:
    """Returns what a path of the adapter leads to. Raises ValueError if the path is wrong."""
    part = start
    for name in path.split("."):
        if not hasattr(part, name):
            modules = ", ".join(dict(part.named_children())) if isinstance(part, nn.Module) else ""
            has = f", its modules are {modules}" if modules else ""
            raise ValueError(
                f"Adapter.{field}={path!r}: {type(part).__name__} has no {name!r}{has}"
            )
        part = getattr(part, name)
    if field in ("norm", "attn", "patch_embed") and not isinstance(part, nn.Module):
        raise ValueError(f"Adapter.{field}={path!r}: is {type(part).__name__}, needs a module")
    return part


def _why_not_timm(model: Any) -> str | None:
    """Returns why a model with timm's names is not supported as a whole."""
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.Sequential | nn.ModuleList) or not len(blocks):
        if not type(model).__module__.startswith("timm."):
            return "has no sequence named blocks; a plain transformer needs an Adapter"
        has_stages = any(hasattr(model, name) for name in STAGES)
        reason = "its layers form stages" if has_stages else "it has none"
        return f"needs one sequence of blocks over one token axis; {reason}"
    if not isinstance(getattr(model, "embed_dim", None), int):
        return "has no embed_dim, the width of its tokens"
    return None


def _why_not_known(model: Any) -> str | None:
    """Returns why timm's names do not say which tokens are the prefix and what the head reads."""
    kinds = type(model).__mro__
    if not any(package(kind.__module__) == "timm" for kind in kinds):
        return None  # they are its own names
    for name in DECIDING:
        home = next((kind.__module__ for kind in kinds if name in vars(kind)), "timm")
        if package(home) != "timm" or name in vars(model):
            return f"has its own {name}: {SAY_BY_ADAPTER}"
    return f"has global_pool='': {SAY_BY_ADAPTER}" if model.global_pool == "" else None


def _why_not_timm_block(block: Any) -> str | None:
    attn = getattr(block, "attn", None)
    if attn is None:
        return "which has no self-attention named attn"
    if not (class_path(block) in BLOCKS or getattr(block, "attends_to_norm1", False)):
        return "not pre-norm self-attention followed by an MLP over one token axis"
    if is_patched(block):
        return "whose class got another forward"
    if class_path(attn) not in ATTENTIONS:
        return f"whose {type(attn).__name__} is not a softmax of q k^T with known terms"
    if type(attn.attn_drop) is not nn.Dropout or has_hooks(attn.attn_drop, HOOKS):
        kind = type(attn.attn_drop).__name__
        return f"whose attn_drop is no plain Dropout without hooks, but {kind}"
    return None


def is_patched(module: Any) -> bool:
    """Whether the class of a known package got a `forward` from elsewhere."""
    home, forward = package(class_path(module)[0]), type(module).forward
    now = package(getattr(forward, "__globals__", {}).get("__name__", ""))
    return home in PATCHABLE and now != home


def has_hooks(module: nn.Module, kinds: Collection[str]) -> bool:
    return any(getattr(module, f"_{kind}_hooks") for kind in kinds)


def _why_not_own(block: Block, home: str) -> str | None:
    paths = map(class_path, (block.module, block.attn))
    other = next((name for path, name in paths if path != home), None)
    return other and f"whose {other} is not {home}'s own"


def _why_not_projections(parts: Parts, module: Any) -> str | None:
    """Only the weights of projections are used: wrappers and hooks would be ignored."""
    kind = type(module).__name__
    if "forward" in vars(module):
        return f"whose {kind} has a forward of its own"
    if has_hooks(module, ("forward_pre", "backward")):
        return f"whose {kind} has hooks that may change what enters it, or would not run"
    for name in ("qkv", "q_proj", "k_proj", "v_proj"):
        projection = getattr(parts, name)
        projection = getattr(projection, "layer", projection)
        if not isinstance(projection, nn.Module):
            continue
        if type(projection) is not nn.Linear:
            return f"whose {name} is {type(projection).__name__}, not a plain Linear"
        if has_hooks(projection, HOOKS):
            return f"whose {name} has hooks, which would not run"
    return None
