"""Vertical TokenMixup: salient tokens of earlier blocks become keys and values (Section 3.4).

Letters: b batch, t spatial tokens, n tokens with prefix, kappa tokens of each source.
"""

from collections.abc import Callable

from torch import Tensor


def salient_indices(saliency: Tensor, kappa: int, num_prefix_tokens: int = 0) -> Tensor:
    """Indices in 0..n-1 of the kappa most salient tokens: `b t` -> `b kappa` int64.

    Prefix tokens are never selected. Raises ValueError if kappa > t.
    """
    if kappa > saliency.shape[1]:
        raise ValueError(f"vtm.kappa={kappa}: there are only {saliency.shape[1]} spatial tokens")
    patches = saliency.topk(kappa, dim=1).indices
    if num_prefix_tokens == 0:
        return patches
    return num_prefix_tokens + patches


def indices_without_prefix(saliency: Tensor, kappa: int, num_prefix_tokens: int = 0) -> Tensor:
    """The published indices: of patches, though they are used for tokens that include the prefix.

    Each is too low by the number of prefix tokens: with a class token it can be that token, and
    never is the last patch.
    """
    return salient_indices(saliency, kappa)


# by `vtm.class_token_offset`: saliency `b t`, kappa, prefix tokens -> `b kappa`
INDICES: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "paper": salient_indices,
    "published": indices_without_prefix,
}
