from typing import Any

import pytest
import torch
from timm.layers import Attention
from torch import Tensor

from tokenmixup import salient_indices, vertical_attention
from tokenmixup.adapters import timm_parts
from tokenmixup.attention import projections
from tokenmixup.vertical import Memory


def attended(attn: Attention, *tokens: Tensor, **options: Any) -> Tensor:
    return vertical_attention(timm_parts(attn), *tokens, **options)


def remembered(tokens: Tensor, saliency: Tensor, kappa: int, num_prefix_tokens: int = 0) -> Tensor:
    memory = Memory(kappa, salient_indices)
    memory.remember(tokens, saliency, num_prefix_tokens)
    return memory.tokens[0]


def test_memory_holds_the_most_salient_tokens_and_never_a_prefix_token():
    """Payload: every token's value is its own index."""
    tokens = torch.arange(7.0)[None, :, None].expand(2, 7, 1)
    saliency = torch.tensor([[0.1, 0.5, 0.0, 0.3, 0.1], [0.9, 0.0, 0.0, 0.0, 0.8]])
    chosen = remembered(tokens, saliency, 2, num_prefix_tokens=2)
    assert chosen.squeeze(-1).tolist() == [[3.0, 5.0], [2.0, 6.0]]


def test_memory_refuses_more_tokens_than_there_are():
    with pytest.raises(ValueError, match="kappa=4"):
        remembered(torch.zeros(1, 3, 1), torch.ones(1, 3), 4)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("options", [{}, {"qkv_bias": True, "qk_norm": True, "gated": True}])
def test_vertical_attention_equals_self_attention_over_all_tokens_cut_to_the_queries(
    fused: bool, options: dict
):
    torch.manual_seed(0)
    attn = Attention(8, num_heads=2, norm_layer=torch.nn.LayerNorm, **options)
    setattr(attn, "fused_attn", fused)
    tokens, memory = torch.randn(3, 5, 8), torch.randn(3, 4, 8)
    context = torch.cat([tokens, memory], dim=1)
    expected = attn(context)[:, :5]
    torch.testing.assert_close(attended(attn, tokens, context), expected)
    known = projections(timm_parts(attn), tokens)
    torch.testing.assert_close(attended(attn, tokens, memory, known=known), expected)


@pytest.mark.parametrize("fused", [True, False])
def test_vertical_attention_drops_attention_in_training_only(fused: bool):
    attn = Attention(8, num_heads=2, attn_drop=0.5)
    setattr(attn, "fused_attn", fused)
    context = torch.randn(3, 9, 8)
    first, second = (attended(attn, context[:, :5], context) for _ in range(2))
    assert not torch.equal(first, second)
    attn.eval()
    first, second = (attended(attn, context[:, :5], context) for _ in range(2))
    assert torch.equal(first, second)
