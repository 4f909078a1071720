"""TransMix's labels (Chen et al., 2022): CutMix's partner weighs what the attention gives its box.

Letters: b batch, n tokens with prefix, t spatial tokens.
"""

from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduction.data.inputs import Box, Mixed
from reproduction.system import UserError
from tokenmixup import blocks_of
from tokenmixup.adapters import adapter_of
from tokenmixup.saliency import BlockInput, by_attention

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


class AttentionLabels:
    """Weighs the classes of CutMix's images by the last block's attention in the same pass.

    It is that of the class token, or the mean over all queries if the model pools no class token.
    UserError unless the model's blocks attend to all tokens.
    """

    def __init__(self, model: nn.Module):
        try:
            *_, self.block = blocks_of(model)
            self.adapter = adapter_of(model)
            if not self.adapter.attends_to_all:
                kind = type(model).__name__
                raise ValueError(f"blocks of {kind} do not attend to all tokens")
        except ValueError as error:
            raise UserError(f"{KEY}: {error}; allowed is area") from error
        self.entered: BlockInput | None = None
        self.block.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, block: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        args = (args[0].detach(), *args[1:])
        entering = BlockInput(args, kwargs, self.adapter, [block])
        self.entered = entering if block.training else None

    def __call__(self, mixed: Mixed) -> Mixed:
        """Returns the batch of the last pass with new weights; as it is without a box."""
        entered, self.entered = self.entered, None
        if mixed.box is None:
            return mixed
        assert entered is not None, "the last block has not run"
        share = attended_share(by_attention(entered), mixed.box, mixed.images.shape[-2:])
        return mixed._replace(weight=1 - share, rest=None)
