"""Converts parameter names of other projects to ours (CCT) and timm's (ViT).

A table maps patterns of full names. Unmatched names stay unchanged, so that loading reports them as
extra. None drops the parameters of ScoreNet, which acts in training only.

Letters: d width, h heads, e width of a head, i inputs, o outputs, y x pixels.
"""

import re

import numpy as np
import torch
from einops import EinopsError, rearrange
from torch import Tensor

State = dict[str, Tensor]
Table = tuple[tuple[str, str | None], ...]

ATTACHED: Table = ((r"model\.(.+)", r"\1"), (r"scorenets\..+", None))  # tokenmixup.TokenMixup

# The published CCT files, and Compact-Transformers' (Hassani et al., 2021).
PUBLISHED_CCT: Table = (
    (r"classifier\.positional_emb", r"pos_embed"),
    (r"classifier\.class_emb", r"cls_token"),
    (r"classifier\.(attention_pool|norm)\.(\w+)", r"\1.\2"),
    (r"classifier\.fc\.(\w+)", r"head.\1"),
    (r"classifier\.(blocks\.\d+)\.pre_norm\.(\w+)", r"\1.norm1.\2"),
    (r"classifier\.(blocks\.\d+)\.norm1\.(\w+)", r"\1.norm2.\2"),
    (r"classifier\.(blocks\.\d+)\.self_attn\.(\w+)\.(\w+)", r"\1.attn.\2.\3"),
    (r"classifier\.(blocks\.\d+)\.linear([12])\.(\w+)", r"\1.mlp.fc\2.\3"),
    (r"classifier\.blocks\.\d+\.small_h_(attention_pool|fc)\.(weight|bias)", None),
)

PUBLISHED_VIT: Table = (
    (r"transformer\.embeddings\.position_embeddings", r"pos_embed"),
    (r"transformer\.embeddings\.cls_token", r"cls_token"),
    (r"transformer\.embeddings\.patch_embeddings\.(\w+)", r"patch_embed.proj.\1"),
    (r"transformer\.encoder\.encoder_norm\.(\w+)", r"norm.\1"),
    (r"transformer\.encoder\.layer\.(\d+)\.attention_norm\.(\w+)", r"blocks.\1.norm1.\2"),
    (r"transformer\.encoder\.layer\.(\d+)\.ffn_norm\.(\w+)", r"blocks.\1.norm2.\2"),
    (r"transformer\.encoder\.layer\.(\d+)\.ffn\.fc([12])\.(\w+)", r"blocks.\1.mlp.fc\2.\3"),
    (r"transformer\.encoder\.layer\.(\d+)\.attn\.out\.(\w+)", r"blocks.\1.attn.proj.\2"),
    (
        r"transformer\.encoder\.layer\.(\d+)\.attn\.(query|key|value)\.(\w+)",
        r"blocks.\1.attn.\2.\3",
    ),
    (r"transformer\.encoder\.layer\.\d+\.scorenet\.(weight|bias)", None),
)

# The original ViT's arrays (Dosovitskiy et al., 2021).
JAX_VIT: Table = (
    (r"cls", r"cls_token"),
    (r"embedding/(\w+)", r"patch_embed.proj.\1"),
    (r"head/(\w+)", r"head.\1"),
    (r"Transformer/posembed_input/pos_embedding", r"pos_embed"),
    (r"Transformer/encoder_norm/(\w+)", r"norm.\1"),
    (r"Transformer/encoderblock_(\d+)/LayerNorm_0/(\w+)", r"blocks.\1.norm1.\2"),
    (r"Transformer/encoderblock_(\d+)/LayerNorm_2/(\w+)", r"blocks.\1.norm2.\2"),
    (r"Transformer/encoderblock_(\d+)/MlpBlock_3/Dense_0/(\w+)", r"blocks.\1.mlp.fc1.\2"),
    (r"Transformer/encoderblock_(\d+)/MlpBlock_3/Dense_1/(\w+)", r"blocks.\1.mlp.fc2.\2"),
    (
        r"Transformer/encoderblock_(\d+)/MultiHeadDotProductAttention_1/out/(\w+)",
        r"blocks.\1.attn.proj.\2",
    ),
    (
        r"Transformer/encoderblock_(\d+)/MultiHeadDotProductAttention_1/(query|key|value)/(\w+)",
        r"blocks.\1.attn.\2.\3",
    ),
)
JAX_LAYOUTS = (
    (r"embedding/kernel", "y x i o -> o i y x"),
    (r".+/(query|key|value)/kernel", "d h e -> (h e) d"),
    (r".+/(query|key|value)/bias", "h e -> (h e)"),
    (r".+/out/kernel", "h e d -> d (h e)"),
    (r".+/kernel", "i o -> o i"),
)
FLOATS = ("float16", "float32", "float64")

BY_PREFIX = {"model.": ATTACHED, "classifier.": PUBLISHED_CCT, "transformer.": PUBLISHED_VIT}
WRAPPERS = r"((module|_orig_mod)\.)+"  # DataParallel, DistributedDataParallel and torch.compile


def convert_names(state: State) -> State:
    """Returns the parameters of a plain model under our names (CCT) or timm's (ViT).

    Recognises a project by its names. Raises ValueError if two parameters map to one name.
    """
    if all(re.match(WRAPPERS, name) for name in state):
        state = {re.sub(f"^{WRAPPERS}", "", name): value for name, value in state.items()}
    for prefix, table in BY_PREFIX.items():
        if any(name.startswith(prefix) for name in state):
            return _fuse_qkv(_rename(state, table))
    return state


def from_jax(arrays: dict[str, np.ndarray]) -> State:
    """Converts the arrays of the original ViT to timm's parameters.

    Drops the head of a file with a representation layer (`pre_logits`), as it reads that layer's
    output and timm's models have no such layer. Raises ValueError for arrays of another rank.
    """
    if any(name.startswith("pre_logits/") for name in arrays):
        arrays = {k: v for k, v in arrays.items() if not k.startswith(("pre_logits/", "head/"))}
    tensors = {name: _to_torch_layout(name, array) for name, array in arrays.items()}
    state = _rename(tensors, JAX_VIT)
    return _fuse_qkv({re.sub(r"\.(kernel|scale)$", ".weight", k): v for k, v in state.items()})


def _to_torch_layout(name: str, array: np.ndarray) -> Tensor:
    if array.dtype not in FLOATS:
        raise ValueError(f"{name} is {array.dtype}, must be one of {', '.join(FLOATS)}")
    tensor = torch.from_numpy(array)
    for pattern, layout in JAX_LAYOUTS:
        if re.fullmatch(pattern, name):
            try:
                return rearrange(tensor, layout).contiguous()
            except EinopsError:
                axes = layout.partition(" ->")[0]
                raise ValueError(f"{name} is {list(array.shape)}, must be ({axes})") from None
    return tensor


def _rename(state: State, table: Table) -> State:
    renamed: State = {}
    for name, value in state.items():
        ours = _our_name(name, table)
        if ours is None:
            continue
        if ours in renamed:
            raise ValueError(f"two parameters map to {ours}, one of them is {name}")
        renamed[ours] = value
    return renamed


def _our_name(name: str, table: Table) -> str | None:
    for pattern, ours in table:
        if match := re.fullmatch(pattern, name):
            return None if ours is None else match.expand(ours)
    return name


def _fuse_qkv(state: State) -> State:
    """Concatenates blocks.N.attn.query, key and value of equal shapes to qkv."""
    state = dict(state)
    for query in [name for name in state if ".attn.query." in name]:
        names = [query.replace("query", part) for part in ("query", "key", "value")]
        parts = [state[name] for name in names if name in state]
        fused = query.replace("query", "qkv")
        shapes = {part.shape for part in parts}
        if fused in state or len(parts) < 3 or len(shapes) > 1 or parts[0].ndim == 0:
            continue  # loading then reports them by name
        state[fused] = torch.cat(parts)
        for name in names:
            del state[name]
    return state
