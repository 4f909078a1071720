"""Small models recorded with the published code: parameters, settings and outputs."""

from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn

from tests.programs import CCT

FIXTURES = Path(__file__).parents[1] / "fixtures"


class Recorded:
    """One recorded .npz file."""

    def __init__(self, name: str):
        self.is_cct = not name.startswith("vit")
        self.arrays: dict[str, Any] = dict(np.load(FIXTURES / f"{name}.npz"))

    def tensor(self, key: str) -> Tensor:
        return torch.from_numpy(self.arrays[key])

    def under(self, folder: str) -> dict[str, Tensor]:
        """Returns the arrays whose keys begin with `folder/`."""
        prefix = f"{folder}/"
        return {
            key.removeprefix(prefix): torch.from_numpy(np.asarray(value))
            for key, value in self.arrays.items()
            if key.startswith(prefix)
        }

    def build(self) -> nn.Module:
        """Builds the plain model, without the recorded parameters."""
        return recorded_cct() if self.is_cct else recorded_vit()


def recorded_cct() -> nn.Module:
    sizes = {"num_classes": 10, "image_size": 32, "embed_dim": 32, "depth": 4, "num_heads": 2}
    kind = {"mlp_ratio": 2.0, "conv_layers": 2, "positional_embedding": "learnable"}
    return CCT(**sizes, **kind, attn_drop=0.0, drop_path=0.0)


def recorded_vit() -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 5, "num_heads": 3}
    return timm.create_model("vit_tiny_patch16_224", num_classes=10, mlp_ratio=2.0, **sizes)
