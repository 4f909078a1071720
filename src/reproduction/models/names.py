"""Converts parameter names of other projects to ours (CCT) and timm's (ViT).

A table maps patterns of full names. Unmatched names stay unchanged, so that loading reports them as
extra. None drops the parameters of ScoreNet, which acts in training only.
"""

import re

import torch
from torch import Tensor

State = dict[str, Tensor]
CLASSES = "tokenmixup.classes"  # key of a safetensors file's metadata: JSON of the class names
NameTable = tuple[tuple[str, str | None], ...]

ATTACHED: NameTable = ((r"model\.(.+)", r"\1"), (r"scorenets\..+", None))  # tokenmixup.TokenMixup

# The published CCT files, and Compact-Transformers' (Hassani et al., 2021).
PUBLISHED_CCT: NameTable = (
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

PUBLISHED_VIT: NameTable = (
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

BY_PREFIX = {"model.": ATTACHED, "classifier.": PUBLISHED_CCT, "transformer.": PUBLISHED_VIT}
WRAPPERS = r"((module|_orig_mod)\.)+"  # DataParallel, DistributedDataParallel and torch.compile


def convert_names(state: State) -> State:
    """Returns the parameters of a plain model under our names (CCT) or timm's (ViT).

    Recognises a project by its names.
    """
    if all(re.match(WRAPPERS, name) for name in state):
        state = {re.sub(f"^{WRAPPERS}", "", name): value for name, value in state.items()}
    for prefix, table in BY_PREFIX.items():
        if any(name.startswith(prefix) for name in state):
            return _fuse_qkv(_rename(state, table))
    return state


def _rename(state: State, table: NameTable) -> State:
    renamed: State = {}
    for name, value in state.items():
        ours = _our_name(name, table)
        if ours is not None:
            renamed[ours] = value
    return renamed


def _our_name(name: str, table: NameTable) -> str | None:
    """Our name of a parameter; None if it is dropped."""
    for pattern, ours in table:
        match = re.fullmatch(pattern, name)
        if match is not None and ours is not None:
            return match.expand(ours)
        if match is not None:
            return None
    return name


def _fuse_qkv(state: State) -> State:
    """Concatenates blocks.N.attn.query, key and value to qkv; what is incomplete stays."""
    for query in [name for name in state if ".attn.query." in name]:
        names = [query.replace("query", part) for part in ("query", "key", "value")]
        if all(name in state for name in names):
            parts = [state.pop(name) for name in names]
            state[query.replace("query", "qkv")] = torch.cat(parts)
    return state
