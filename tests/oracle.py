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

from tokenmixup import HTM, VTM, TokenMixup


class Mix(NamedTuple):
    """What becomes of a batch; or of a sample, without b."""

    tokens: Tensor  # b n d
    targets: Tensor  # b c
    saliency: Tensor  # b t
    mask: Tensor  # b t bool, the tokens that are the donor's
    keep_ratio: Tensor  # b, weight of a sample's own label


class Layer(NamedTuple):
    """What HTM did at a layer."""

    index: int
    score_logits: Tensor  # b c
    difficulty: Tensor  # b
    is_easy: Tensor  # b bool
    saliency: Tensor  # b t, before mixing
    mix: Mix

    @property
    def gain(self) -> Tensor:
        return self.mix.saliency - self.saliency


class Expected(NamedTuple):
    """What a training pass returns, and its loss."""

    logits: Tensor
    targets: Tensor
    layers: list[Layer]
    loss: Tensor


class Oracle(nn.Module):
    """`oracle(images, targets)`: a training pass with the parameters and settings of `module`."""

    def __init__(self, module: TokenMixup):
        super().__init__()
        self.model: Any = module.model
        self.scorenets: Any = module.scorenets
        self.htm = by_layer(module.htm)
        self.vtm = by_layer(module.vtm)
        self.prefix = self.model.num_prefix_tokens

    def forward(self, images: Tensor, targets: Tensor) -> Expected:
        x = embed(self.model, images)
        memories: dict[int, list[Tensor]] = {layer: [] for layer in self.vtm}
        layers: list[Layer] = []
        for index, block in enumerate(self.model.blocks):
            saliency = self.saliency_of(block, x)
            if index in self.htm:
                layer = self.mixed(index, x, targets, saliency)
                layers.append(layer)
                x = layer.mix.tokens
                targets = layer.mix.targets
                saliency = self.saliency_of(block, x)  # of this block's own map
            for later, memory in memories.items():  # Section 3.4: each previous layer
                if later > index:
                    memory.append(self.remembered(later, x, saliency))
            keys = torch.cat([x, *memories.get(index, [])], dim=1)
            attended = attention(block.attn, block.norm1(x), block.norm1(keys))
            x = rest_of_block(block, x, attended)
        logits = classify(self.model, x)
        loss = F.cross_entropy(logits, targets)
        for layer in layers:
            weight = self.htm[layer.index].score_loss_weight
            loss = loss + weight * layer.difficulty.mean()
        return Expected(logits, targets, layers, loss)

    @torch.no_grad()
    def saliency_of(self, block: Any, x: Tensor) -> Tensor:
        """Eq. 3: the class token's row of the map if the class is read from it, else the mean."""
        attn = attention_map(block, x).mean(dim=1)
        reads_class_token = getattr(self.model, "global_pool", "token") == "token"
        if self.prefix and reads_class_token:
            attn = attn[:, :1]
        return attn.mean(dim=1)[:, self.prefix :]

    def mixed(self, index: int, x: Tensor, targets: Tensor, saliency: Tensor) -> Layer:
        """Algorithm 1 at a layer of HTM, which compares in float32."""
        htm = self.htm[index]
        saliency = saliency.float()
        score_logits = self.scorenets[str(index)](x, self.prefix)
        difficulty = F.cross_entropy(score_logits, targets, reduction="none")  # Eq. 1
        is_easy = difficulty < htm.tau  # Eq. 8
        rho = htm.rho_for(saliency.shape[1])
        donor = donors_of(saliency, is_easy, rho)
        mix = mix_all(x, targets, saliency, donor, rho, self.prefix)
        return Layer(index, score_logits, difficulty, is_easy, saliency, mix)

    def remembered(self, layer: int, x: Tensor, saliency: Tensor) -> Tensor:
        """What a layer of VTM remembers of an earlier block's tokens, `b kappa d`."""
        vtm = self.vtm[layer]
        chosen = most_salient(x, saliency, vtm.kappa, self.prefix)
        if vtm.stop_gradient:
            return chosen.detach()
        return chosen


def by_layer(settings: HTM | VTM | None) -> dict[int, Any]:
    """The settings of each layer."""
    if settings is None:
        return {}
    return dict(settings.by_layer)


def is_cct(model: Any) -> bool:
    return hasattr(model, "tokenizer")


def embed(model: Any, images: Tensor) -> Tensor:
    """Returns tokens with positional embedding: `b 3 h w` -> `b n d`."""
    if not is_cct(model):
        return model.norm_pre(model._pos_embed(model.patch_embed(images)))
    x = model.tokenizer(images)
    if model.num_prefix_tokens:
        class_tokens = model.cls_token.repeat(len(x), 1, 1)
        x = torch.cat([class_tokens, x], dim=1)
    return x + model.pos_embed


def attention(attn: Any, queries: Tensor, keys: Tensor) -> Tensor:
    """Softmax(X1 Wq (X2 Wk)^T) X2 Wv, projected: `b n d`, `b m d` -> `b n d`.

    Ordinary self-attention if `keys` equals `queries`, else Eq. 13.
    """
    weights = scores_of(attn, queries, keys).softmax(dim=-1)
    _, _, v = projected(attn, keys)
    dropped = F.dropout(weights, attn.attn_drop.p, attn.training)
    out = (dropped @ v).transpose(1, 2).flatten(2)
    return attn.proj_drop(attn.proj(out))


def scores_of(attn: Any, queries: Tensor, keys: Tensor) -> Tensor:
    """X1 Wq (X2 Wk)^T, scaled: `b n d`, `b m d` -> `b h n m`."""
    q, _, _ = projected(attn, queries)
    _, k, _ = projected(attn, keys)
    return q @ k.mT * attn.head_dim**-0.5


def projected(attn: Any, x: Tensor) -> Tensor:
    """Returns queries, keys and values, `3 b h n e`."""
    parts = attn.qkv(x).unflatten(-1, (3, attn.num_heads, -1))  # b n 3 h e
    return parts.permute(2, 0, 3, 1, 4)


def rest_of_block(block: Any, x: Tensor, attended: Tensor) -> Tensor:
    """Applies the residual connections and the MLP."""
    if hasattr(block, "drop_path1"):  # timm
        x = x + block.drop_path1(block.ls1(attended))
        out = block.mlp(block.norm2(x))
        return x + block.drop_path2(block.ls2(out))
    x = block.norm2(x + block.drop_path(attended))
    return x + block.drop_path(block.mlp(x))


def classify(model: Any, x: Tensor) -> Tensor:
    """Returns the logits: `b n d` -> `b c`."""
    x = model.norm(x)
    if not is_cct(model):
        return model.forward_head(x)
    if model.num_prefix_tokens:
        return model.head(x[:, 0])
    weights = model.attention_pool(x).softmax(dim=1)
    return model.head((weights * x).sum(dim=1))


def attention_map(block: Any, x: Tensor) -> Tensor:
    """The map of a block's own attention, query x key: `b n d` -> `b h n n`."""
    x = block.norm1(x)
    return scores_of(block.attn, x, x).softmax(dim=-1)


def most_salient(x: Tensor, saliency: Tensor, kappa: int, prefix: int) -> Tensor:
    """Returns the kappa most salient spatial tokens of each sample, `b kappa d`."""
    chosen = []
    for tokens, each in zip(x, saliency, strict=True):
        places = each.argsort(descending=True)[:kappa]
        chosen.append(tokens[prefix + places])
    return torch.stack(chosen)


def gain_by_repetition(saliency: Tensor, rho: float) -> Tensor:
    """Eq. 6, literally: `b t` -> `b b`, by way of `b b t`."""
    b = len(saliency)
    receivers = saliency[:, None].repeat(1, b, 1)
    donors = saliency[None].repeat(b, 1, 1)
    return (donors - receivers - rho).clamp(min=0).sum(dim=2)


def donors_of(saliency: Tensor, is_easy: Tensor, rho: float) -> Tensor:
    """Lines 4 and 5 of Algorithm 1: the best different donors of the easy samples, `b`.

    A hard sample is its own donor, from which it gains nothing.
    """
    donor = torch.arange(len(saliency))
    gain = gain_by_repetition(saliency, rho)[is_easy]
    _, chosen = linear_sum_assignment(gain.numpy(), maximize=True)  # Eq. 7
    donor[is_easy] = torch.from_numpy(chosen)
    return donor


def mix_all(
    x: Tensor, targets: Tensor, saliency: Tensor, donor: Tensor, rho: float, prefix: int
) -> Mix:
    """Lines 6 to 8 of Algorithm 1, one sample after the other."""
    mixed = []
    for i, j in enumerate(donor.tolist()):
        mask = saliency[j] - saliency[i] > rho  # Eq. 9
        replaced = F.pad(mask, (prefix, 0))
        tokens = torch.where(replaced[:, None], x[j], x[i])  # Eq. 10
        kept = (saliency[i] * ~mask).sum()
        donated = (saliency[j] * mask).sum()
        keep_ratio = torch.ones_like(kept)
        if mask.any():
            keep_ratio = kept / (kept + donated)  # Eq. 11
        label = keep_ratio * targets[i] + (1 - keep_ratio) * targets[j]
        mixed_saliency = torch.where(mask, saliency[j], saliency[i])
        mixed.append(Mix(tokens, label, mixed_saliency, mask, keep_ratio))
    fields = zip(*mixed, strict=True)  # each of all samples
    return Mix(*map(torch.stack, fields))
