"""The paper's equations on whole models, written out: plain, slow, one sample after the other.

Every block materialises its attention map, saliency projects again, the gain matrix comes from
repeated `b b t` differences. It supports our CCT and timm's plain ViT.

Letters: b batch, h heads, n tokens with prefix, m keys, t spatial tokens, d width, c classes.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from tokenmixup import TokenMixup


class Mixed(NamedTuple):
    """What HTM did at a layer."""

    layer: int
    score_logits: Tensor  # b c
    difficulty: Tensor  # b
    is_easy: Tensor  # b bool
    mask: Tensor  # b t bool
    gain: Tensor  # b t
    saliency: Tensor  # b t, before mixing
    donor: Tensor  # b int64


class Expected(NamedTuple):
    """What a training pass returns, and its loss."""

    logits: Tensor
    targets: Tensor
    layers: list[Mixed]
    loss: Tensor


class Oracle(nn.Module):
    """`oracle(images, targets)`: a training pass with the parameters and settings of `module`."""

    def __init__(self, module: TokenMixup):
        super().__init__()
        self.model: Any = module.model
        self.scorenets: Any = module.scorenets
        self.htm: Any = {} if module.htm is None else module.htm.by_layer
        self.vtm: Any = {} if module.vtm is None else module.vtm.by_layer

    def forward(self, images: Tensor, targets: Tensor) -> Expected:
        prefix = self.model.num_prefix_tokens
        x = embed(self.model, images)
        memories: dict[int, list[Tensor]] = {layer: [] for layer in self.vtm}
        layers: list[Mixed] = []
        score_loss = x.new_zeros(())
        for index, block in enumerate(self.model.blocks):
            htm = self.htm.get(index)
            later = [layer for layer in self.vtm if layer > index]
            saliency: Any = saliency_of(block, x, prefix) if htm or later else None
            if htm:
                score_logits = self.scorenets[str(index)](x, prefix)
                difficulty = F.cross_entropy(score_logits, targets, reduction="none")
                is_easy = difficulty < htm.tau  # Eq. 8
                before = saliency
                rho = htm.rho_for(saliency.shape[1])
                x, targets, saliency, mask, donor = mix(x, targets, before, is_easy, rho, prefix)
                told = (is_easy, mask, saliency - before, before, donor)
                layers.append(Mixed(index, score_logits, difficulty, *told))
                score_loss = score_loss + htm.score_loss_weight * difficulty.mean()
            for layer in later:
                kept = most_salient(x, saliency, self.vtm[layer].kappa, prefix)
                memories[layer].append(kept.detach() if self.vtm[layer].stop_gradient else kept)
            keys = torch.cat([x, *memories.get(index, [])], dim=1)
            x = rest_of_block(block, x, attention(block.attn, block.norm1(x), block.norm1(keys)))
        logits = classify(self.model, x)
        return Expected(logits, targets, layers, F.cross_entropy(logits, targets) + score_loss)


def is_cct(model: Any) -> bool:
    return hasattr(model, "tokenizer")


def embed(model: Any, images: Tensor) -> Tensor:
    """Returns tokens with positional embedding: `b 3 h w` -> `b n d`."""
    if not is_cct(model):
        return model.norm_pre(model._pos_embed(model.patch_embed(images)))
    x = model.tokenizer(images)
    if model.num_prefix_tokens:
        x = torch.cat([model.cls_token.repeat(len(x), 1, 1), x], dim=1)
    return x + model.pos_embed


def attention(attn: Any, queries: Tensor, keys: Tensor) -> Tensor:
    """Softmax(X1 Wq (X2 Wk)^T) X2 Wv, projected: `b n d`, `b m d` -> `b n d`.

    Ordinary self-attention if `keys` equals `queries`, else Eq. 13.
    """
    q = projected(attn, queries)[0]
    _, k, v = projected(attn, keys)
    weights = (q @ k.mT * attn.head_dim**-0.5).softmax(dim=-1)
    dropped = F.dropout(weights, attn.attn_drop.p, attn.training)
    out = (dropped @ v).transpose(1, 2).flatten(2)
    return attn.proj_drop(attn.proj(out))


def projected(attn: Any, x: Tensor) -> list[Tensor]:
    """Returns queries, keys and values, each `b h n e`."""
    parts = attn.qkv(x).chunk(3, dim=-1)
    return [part.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2) for part in parts]


def rest_of_block(block: Any, x: Tensor, attended: Tensor) -> Tensor:
    """Applies the residual connections and the MLP."""
    if hasattr(block, "drop_path1"):  # timm
        x = x + block.drop_path1(block.ls1(attended))
        return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
    x = block.norm2(x + block.drop_path(attended))
    return x + block.drop_path(block.mlp(x))


def classify(model: Any, x: Tensor) -> Tensor:
    """Returns the logits: `b n d` -> `b c`."""
    x = model.norm(x)
    if not is_cct(model):
        return model.forward_head(x)
    if model.num_prefix_tokens:
        return model.head(x[:, 0])
    return model.head((model.attention_pool(x).softmax(dim=1) * x).sum(dim=1))


def saliency_of(block: Any, x: Tensor, prefix: int) -> Tensor:
    """Eq. 3: the class token's row of the attention map, else the mean over rows, `b t`."""
    with torch.no_grad():
        q, k, _ = projected(block.attn, block.norm1(x))
        scores = q @ k.mT * block.attn.head_dim**-0.5
        attn = scores.softmax(dim=-1, dtype=torch.float32).mean(dim=1)
        return attn[:, 0, prefix:] if prefix else attn.mean(dim=1)


def most_salient(x: Tensor, saliency: Tensor, kappa: int, prefix: int) -> Tensor:
    """Returns the kappa most salient spatial tokens of each sample, `b kappa d`."""
    chosen = [
        tokens[prefix + each.argsort(descending=True)[:kappa]]
        for tokens, each in zip(x, saliency, strict=True)
    ]
    return torch.stack(chosen)


def gain_by_repetition(saliency: Tensor, rho: float) -> Tensor:
    """Eq. 6, literally: `b t` -> `b b`, by way of `b b t`."""
    b = len(saliency)
    receivers = saliency[:, None].repeat(1, b, 1)
    donors = saliency[None].repeat(b, 1, 1)
    return (donors - receivers - rho).clamp(min=0).sum(dim=2)


def mix(
    x: Tensor, targets: Tensor, saliency: Tensor, is_easy: Tensor, rho: float, prefix: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Algorithm 1, lines 4 to 8, sample by sample.

    Returns tokens, targets, saliency, the mask `b t` of replaced tokens and the donors `b`.
    """
    easy = is_easy.nonzero().flatten().tolist()
    gain = gain_by_repetition(saliency, rho)[easy].cpu().numpy()
    donor_of = dict(zip(easy, linear_sum_assignment(gain, maximize=True)[1].tolist(), strict=True))
    mask = torch.zeros_like(saliency, dtype=torch.bool)
    mixed = list(x)
    mixed_targets = list(targets)
    mixed_saliency = list(saliency)
    for i, j in donor_of.items():
        mask[i] = saliency[j] - saliency[i] > rho
        replaced = torch.cat([mask.new_zeros(prefix), mask[i]])
        mixed[i] = torch.where(replaced[:, None], x[j], x[i])
        mixed_saliency[i] = torch.where(mask[i], saliency[j], saliency[i])
        donated = (saliency[j] * mask[i]).sum()
        kept = (saliency[i] * ~mask[i]).sum()
        share = kept / (kept + donated) if mask[i].any() else torch.ones_like(kept)
        mixed_targets[i] = share * targets[i] + (1 - share) * targets[j]
    donor = torch.tensor([donor_of.get(i, i) for i in range(len(x))])
    stacked = (torch.stack(each) for each in (mixed, mixed_targets, mixed_saliency))
    return *stacked, mask, donor
