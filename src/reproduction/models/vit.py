"""Vision transformers of timm's, random or pretrained by name."""

import logging
from typing import Any

import timm
from torch import nn

from reproduction.errors import UserError, first_line


def build_vit(
    *,
    num_classes: int,
    architecture: str,
    image_size: int,
    patch_size: int,
    depth: int,
    global_pool: str,
    pretrained: str | None,
    pos_drop_rate: float,
    proj_drop_rate: float,
    mlp_drop_rate: float | None,
    attn_drop: float,
    drop_path: float,
) -> nn.Module:
    """timm's `architecture`, with the weights that `pretrained` is timm's tag of, or random.

    `mlp_drop_rate` takes the place of `proj_drop_rate` in the MLPs, unless it is None. Raises
    UserError for an unknown name or tag, a failed download, a size that does not fit, and for MLPs
    whose dropout cannot be set.
    """
    name = _timm_name(architecture, pretrained)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # one line says it, see below
    try:
        model = timm.create_model(
            name,
            pretrained=pretrained is not None,
            num_classes=num_classes,
            img_size=image_size,
            global_pool=global_pool,
            pos_drop_rate=pos_drop_rate,
            proj_drop_rate=proj_drop_rate,
            attn_drop_rate=attn_drop,
            drop_path_rate=drop_path,
        )
    except (OSError, RuntimeError, TypeError, AssertionError) as error:  # the hub's are OSErrors
        raise _refusal(architecture, pretrained, global_pool, first_line(error)) from error
    _check_sizes(model, architecture, depth, patch_size)
    if mlp_drop_rate is not None:
        _set_mlp_dropout(model, architecture, mlp_drop_rate)
    return model


def _set_mlp_dropout(model: Any, architecture: str, rate: float) -> None:
    """Both dropouts of each MLP, which timm sets by `proj_drop_rate` alone."""
    for block in model.blocks:
        mlp = getattr(block, "mlp", nn.Identity())
        dropouts = [part for part in mlp.modules() if isinstance(part, nn.Dropout)]
        if not dropouts:
            raise UserError(f"model.mlp_drop_rate={rate}: the MLPs of {architecture} have none")
        for dropout in dropouts:
            dropout.p = rate


def _refusal(architecture: str, pretrained: str | None, global_pool: str, reason: str) -> UserError:
    if pretrained is None:
        return UserError(
            f"model.architecture={architecture}: is no plain ViT with "
            f"model.global_pool={global_pool} ({reason})"
        )
    return UserError(
        f"model.pretrained={pretrained}: the weights could not be loaded ({reason}); give a local "
        "file as model.weights instead"
    )


def _timm_name(architecture: str, pretrained: str | None) -> str:
    """The name that timm knows architecture and tag by; UserError if it knows none."""
    if architecture not in timm.list_models():
        raise UserError(f"model.architecture={architecture}: timm has no such model")
    if pretrained is None:
        return architecture
    name = f"{architecture}.{pretrained}"
    tags = timm.list_pretrained(f"{architecture}.*")
    if name not in tags:
        known = ", ".join(tag.partition(".")[2] for tag in tags) or "none"
        raise UserError(f"model.pretrained={pretrained}: timm's tags of {architecture} are {known}")
    return name


def _check_sizes(model: nn.Module, architecture: str, depth: int, patch_size: int) -> None:
    blocks = getattr(model, "blocks", ())
    built_patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if isinstance(built_patch, tuple):
        built_patch = built_patch[0]
    if len(blocks) != depth:
        raise UserError(f"model.depth={depth}: {architecture} has {len(blocks)} blocks")
    if built_patch != patch_size:
        raise UserError(f"model.patch_size={patch_size}: {architecture} has {built_patch}")
