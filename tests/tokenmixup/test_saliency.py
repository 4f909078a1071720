import pytest
import torch

from tokenmixup import attention_saliency


def random_map(b: int = 3, h: int = 2, n: int = 5) -> torch.Tensor:
    return torch.randn(b, h, n, n, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)


def test_attention_saliency_without_class_token_is_the_mean_over_heads_and_queries():
    attn = random_map()
    expected = torch.zeros(3, 5)
    for b in range(3):
        for t in range(5):
            expected[b, t] = sum(attn[b, h, i, t] for h in range(2) for i in range(5)) / 10
    torch.testing.assert_close(attention_saliency(attn), expected)
    torch.testing.assert_close(attention_saliency(attn).sum(dim=1), torch.ones(3))


def test_attention_saliency_with_class_token_is_its_row_and_is_not_renormalised():
    attn = random_map()
    expected = attn[:, :, 0, 1:].mean(dim=1)
    torch.testing.assert_close(attention_saliency(attn, num_prefix_tokens=1), expected)
    torch.testing.assert_close(attention_saliency(attn[:, :, :1], num_prefix_tokens=1), expected)
    assert (expected.sum(dim=1) < 1).all()


def test_attention_saliency_with_registers_but_no_class_token_averages_all_queries():
    attn = random_map()
    found = attention_saliency(attn, num_prefix_tokens=2, class_token=False)
    torch.testing.assert_close(found, attn.mean(dim=(1, 2))[:, 2:])


def test_attention_saliency_is_float32_and_detached():
    attn = random_map().bfloat16().requires_grad_()
    found = attention_saliency(attn)
    assert found.dtype == torch.float32
    assert not found.requires_grad


def test_attention_saliency_refuses_a_class_token_without_prefix():
    with pytest.raises(ValueError, match="num_prefix_tokens"):
        attention_saliency(random_map(), num_prefix_tokens=0, class_token=True)
