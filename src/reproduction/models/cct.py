"""Compact convolutional transformer (Hassani et al., 2021, arXiv:2104.05704).

Letters: b batch, n tokens, d width, c classes.
"""

from itertools import pairwise

import numpy as np
import torch
from einops import rearrange
from timm.layers import Attention, DropPath, Mlp
from torch import Tensor, nn

STEM_CHANNELS = 64  # of every convolution but the last


class ConvTokenizer(nn.Module):
    """`conv_layers` times 3x3 convolution, ReLU and 3x3 max pooling of stride 2."""

    def __init__(self, embed_dim: int, conv_layers: int):
        super().__init__()
        channels = [3] + [STEM_CHANNELS] * (conv_layers - 1) + [embed_dim]
        self.conv_layers = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(inner, outer, kernel_size=3, padding=1, bias=False),
                    nn.ReLU(),
                    nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
                )
                for inner, outer in pairwise(channels)
            )
        )

    def forward(self, images: Tensor) -> Tensor:
        return rearrange(self.conv_layers(images), "b d h w -> b (h w) d")


class CCTBlock(nn.Module):
    """The published block: normalised before attention and again after the residual sum.

    Not textbook pre-norm, but what the published weights belong to.
    """

    attends_to_norm1 = True  # what TokenMixup needs to know of a block

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mlp_ratio: float,
        drop: float,
        attn_drop: float,
        drop_path: float,
    ):
        super().__init__()
        self.norm1 = nn.LayerNorm(embed_dim)
        self.attn = Attention(embed_dim, num_heads, attn_drop=attn_drop, proj_drop=drop)
        self.norm2 = nn.LayerNorm(embed_dim)
        self.mlp = Mlp(embed_dim, int(embed_dim * mlp_ratio), drop=drop)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm2(x + self.drop_path(self.attn(self.norm1(x))))
        return x + self.drop_path(self.mlp(x))


class CCT(nn.Module):
    """Convolutional tokenizer, transformer blocks, sequence pooling: `b 3 h w` -> `b c`."""

    num_prefix_tokens = 0
    global_pool = "sequence"

    def __init__(
        self,
        *,
        num_classes: int,
        image_size: int,
        embed_dim: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float,
        conv_layers: int,
        positional_embedding: str,
        drop: float,
        attn_drop: float,
        drop_path: float,
    ):
        super().__init__()
        self.embed_dim = embed_dim
        self.tokenizer = ConvTokenizer(embed_dim, conv_layers)
        with torch.no_grad():
            n = self.tokenizer(torch.zeros(1, 3, image_size, image_size)).shape[1]
        self.pos_embed = _positions(positional_embedding, n, embed_dim)
        self.pos_drop = nn.Dropout(drop)
        rates = np.linspace(0, drop_path, depth).tolist()
        self.blocks = nn.Sequential(
            *(CCTBlock(embed_dim, num_heads, mlp_ratio, drop, attn_drop, rate) for rate in rates)
        )
        self.norm = nn.LayerNorm(embed_dim)
        self.attention_pool = nn.Linear(embed_dim, 1)
        self.head = nn.Linear(embed_dim, num_classes)
        self.apply(_init_weights)

    def forward_features(self, images: Tensor) -> Tensor:
        """`b 3 h w` -> normalised tokens `b n d`."""
        x = self.pos_drop(self.tokenizer(images) + self.pos_embed)
        return self.norm(self.blocks(x))

    def forward(self, images: Tensor) -> Tensor:
        x = self.forward_features(images)
        weight = self.attention_pool(x).softmax(dim=1)  # b n 1
        return self.head((weight.mT @ x).squeeze(1))


def _positions(kind: str, n: int, d: int) -> nn.Parameter:
    """Positions `1 n d`: learnable, or fixed sines and cosines (Vaswani et al., 2017)."""
    if kind == "learnable":
        return nn.Parameter(nn.init.trunc_normal_(torch.empty(1, n, d), std=0.2))
    frequency = 10000 ** -(torch.arange(0, d, 2) / d)
    angle = torch.arange(n)[:, None] * frequency  # n d/2
    waves = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
    return nn.Parameter(waves[None], requires_grad=False)


def _init_weights(module: nn.Module) -> None:
    """As published: Kaiming for convolutions, std 0.02 for linear layers, zero biases."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight)
    elif isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
