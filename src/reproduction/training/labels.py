"""TransMix's labels (Chen et al., 2022): CutMix's partner weighs what the attention gives its box.

Letters: b batch, n tokens with prefix, t spatial tokens.
"""

from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduction.data.inputs import Box, Mixed
from reproduction.system.errors import UserError
from tokenmixup.detectors import block_map
from tokenmixup.encoder import Encoder, find_encoder
from tokenmixup.saliency import attention_saliency

KEY = "augmentation.cutmix.labels=attention"


def attended_share(saliency: Tensor, box: Box, size: torch.Size) -> Tensor:
    """Returns the share of the saliency (`b t`, a square grid) within a box of an image: `b 1`.

    The box is brought to the grid by nearest neighbours, as published (TransMix, Eq. 4).
    """
    top, bottom, left, right = box
    pixels = torch.zeros(1, 1, *size, device=saliency.device)
    pixels[:, :, top:bottom, left:right] = 1
    grid = F.interpolate(pixels, (isqrt(saliency.shape[1]),) * 2).flatten(1)  # 1 t
    return (saliency * grid).sum(dim=1, keepdim=True) / saliency.sum(dim=1, keepdim=True)


def encoder_with_attention(model: nn.Module) -> Encoder:
    """Returns the model's encoder; UserError unless its blocks attend to all tokens."""
    try:
        encoder = find_encoder(model)
    except ValueError as error:
        raise UserError(f"{KEY}: {error}; allowed is area") from error
    if not encoder.has_parts:
        kind = type(model).__name__
        raise UserError(f"{KEY}: blocks of {kind} do not attend to all tokens; allowed is area")
    return encoder


class AttentionLabels:
    """Weighs the classes of CutMix's images by the last block's attention in the same pass.

    It is that of the class token, or the mean over all queries if the model pools no class token.
    Raises the errors of `encoder_with_attention`.
    """

    def __init__(self, model: nn.Module):
        self.encoder = encoder_with_attention(model)
        # Tokens that entered the last block, b n d, and its keyword arguments
        self.entered: tuple[Tensor, dict[str, Any]] | None = None
        self.encoder.blocks[-1].module.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, block: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        self.entered = (args[0].detach(), kwargs) if block.training else None

    @torch.no_grad()
    def __call__(self, mixed: Mixed) -> Mixed:
        """Returns the batch of the last pass with new weights; as it is without a box."""
        entered, self.entered = self.entered, None
        if mixed.box is None:
            return mixed
        assert entered is not None, "the last block has not run"
        prefix, by_class_token = self.encoder.num_prefix_tokens, self.encoder.reads_class_token
        attn = block_map(self.encoder.blocks[-1], *entered, by_class_token)
        saliency = attention_saliency(attn, prefix, by_class_token)
        share = attended_share(saliency, mixed.box, mixed.images.shape[-2:])
        return mixed._replace(weight=1 - share, rest=None)
