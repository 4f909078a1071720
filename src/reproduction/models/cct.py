"""Compact transformers (Hassani et al., 2021, arXiv:2104.05704): CCT, CVT and ViT-Lite.

Letters: b batch, n tokens including any class token, d width, c classes.
"""

from itertools import pairwise

import numpy as np
import torch
from einops import rearrange
from timm.layers import Attention, DropPath, Mlp
from torch import Tensor, nn

from tokenmixup.scorenet import sequence_pool

STEM_CHANNELS = 64  # of all convolutions except the last


class ConvTokenizer(nn.Module):
    """`conv_layers` times 3x3 convolution, 3x3 max pooling of stride 2 and ReLU."""

    def __init__(self, embed_dim: int, conv_layers: int):
        super().__init__()
        channels = [3] + [STEM_CHANNELS] * (conv_layers - 1) + [embed_dim]
        self.conv_layers = nn.Sequential()
        for inner, outer in pairwise(channels):
            layer = nn.Sequential(
                nn.Conv2d(inner, outer, kernel_size=3, padding=1, bias=False),
                nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
                nn.ReLU(),  # commutes with pooling; cheaper on a quarter of the pixels
            )
            self.conv_layers.append(layer)

    def forward(self, images: Tensor) -> Tensor:
        return rearrange(self.conv_layers(images), "b d h w -> b (h w) d")


class PatchTokenizer(nn.Module):
    """A linear projection of each square patch, as in ViT."""

    def __init__(self, embed_dim: int, patch_size: int):
        super().__init__()
        self.proj = nn.Conv2d(3, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        return rearrange(self.proj(images), "b d h w -> b (h w) d")


class CCTBlock(nn.Module):
    """The published block, with a norm before attention and another after the residual sum.

    This differs from pre-norm, but the published weights require it.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mlp_ratio: float,
        attn_drop: float,
        drop_path: float,
    ):
        super().__init__()
        self.norm1 = nn.LayerNorm(embed_dim)
        self.attn = Attention(embed_dim, num_heads, attn_drop=attn_drop)
        self.norm2 = nn.LayerNorm(embed_dim)
        self.mlp = Mlp(embed_dim, int(embed_dim * mlp_ratio))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm2(x + self.drop_path(self.attn(self.norm1(x))))
        return x + self.drop_path(self.mlp(x))


class CCT(nn.Module):
    """Tokenizer, transformer blocks, pooling: `b 3 h w` -> `b c`.

    Tokens come from `conv_layers` convolutions (CCT), or from patches of `patch_size` pixels (CVT,
    ViT-Lite). `pooling` is `sequence` (CCT, CVT), a learnt mean, or `class_token` (ViT-Lite).
    """

    def __init__(
        self,
        *,
        num_classes: int,
        image_size: int,
        embed_dim: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float,
        conv_layers: int | None,
        patch_size: int | None = None,
        positional_embedding: str,
        pooling: str = "sequence",
        attn_drop: float,
        drop_path: float,
    ):
        super().__init__()
        has_class_token = pooling == "class_token"
        self.embed_dim = embed_dim
        self.num_prefix_tokens = int(has_class_token)
        self.global_pool = pooling  # timm's name
        if has_class_token:
            self.global_pool = "token"
        self.tokenizer: nn.Module
        if patch_size is not None:
            if image_size % patch_size:
                raise ValueError(f"image_size={image_size}: must be a multiple of {patch_size=}")
            self.tokenizer = PatchTokenizer(embed_dim, patch_size)
        elif conv_layers is not None:
            self.tokenizer = ConvTokenizer(embed_dim, conv_layers)
        with torch.no_grad():
            t = self.tokenizer(torch.zeros(1, 3, image_size, image_size)).shape[1]
        self.cls_token: nn.Parameter | None = None
        if has_class_token:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = _positions(positional_embedding, self.num_prefix_tokens + t, embed_dim)
        rates = np.linspace(0, drop_path, depth).tolist()
        self.blocks = nn.Sequential()
        for rate in rates:
            self.blocks.append(CCTBlock(embed_dim, num_heads, mlp_ratio, attn_drop, rate))
        self.norm = nn.LayerNorm(embed_dim)
        self.attention_pool: nn.Linear | None = None
        if not has_class_token:
            self.attention_pool = nn.Linear(embed_dim, 1)
        self.head = nn.Linear(embed_dim, num_classes)
        self.apply(_init_weights)

    def forward_features(self, images: Tensor) -> Tensor:
        """`b 3 h w` -> normalised tokens `b n d`."""
        x = self.tokenizer(images)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        return self.norm(self.blocks(x + self.pos_embed))

    def forward(self, images: Tensor) -> Tensor:
        x = self.forward_features(images)
        if self.attention_pool is None:
            return self.head(x[:, 0])
        return self.head(sequence_pool(x, self.attention_pool))


def _positions(name: str, n: int, d: int) -> nn.Parameter:
    """Returns positions `1 n d`: learnable, or fixed sines and cosines (Vaswani et al., 2017)."""
    if name == "learnable":
        return nn.Parameter(nn.init.trunc_normal_(torch.empty(1, n, d), std=0.2))
    frequency = 10000 ** -(torch.arange(0, d, 2) / d)
    angle = torch.arange(n)[:, None] * frequency  # n d/2
    waves = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
    return nn.Parameter(waves[None], requires_grad=False)


def _init_weights(module: nn.Module) -> None:
    """Published initialisation: Kaiming for convolutions, std 0.02 for linear layers, zero bias."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight)
    elif isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
