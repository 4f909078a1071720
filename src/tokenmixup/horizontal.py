"""Horizontal TokenMixup: easy samples take salient tokens from others (Section 3.3, Algorithm 1).

Letters: b batch, n tokens with prefix, t spatial tokens, d width, c classes, r rows of `b n`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmixup.assignment import gain_matrix, optimal_assignment

Pooling = Literal["auto", "attention", "average", "class_token"]
Detector = Literal["attention", "gradient", "random"]
Ablation = Literal["none", "scorenet", "assignment", "tokens", "labels"]
MaskRule = Literal["paper", "published"]
Order = Literal["in_place", "published"]
NonFinite = Literal["fail", "skip"]


@dataclass(frozen=True, kw_only=True)
class HTM:
    """Settings of Horizontal TokenMixup; the defaults of all choices are the paper's method.

    `layer`: block, counted from 0, at whose input tokens are mixed. `tau`: nats; a sample is easy
    below it (0: none, inf: all). `rho`: least gain of saliency for a token to be replaced (inf:
    none). `score_loss_weight`: lambda of ScoreNet's loss, to be handed to `training_loss`.
    `pooling` of ScoreNet: auto = the class token where the blocks hold one and the model pools it,
    else attention. `stop_gradient`: ScoreNet's loss trains ScoreNet alone. `detector`: the source
    of saliency (Table 3); attention may be rolled out over `rollout_steps` further blocks.
    `ablate`: the part that is left out (Table 4). `mask_rule`, `order`: what the published code
    does otherwise, see `tokenmixup.variants`. `non_finite`: a batch whose gains are not finite
    raises FloatingPointError, or nothing is mixed in it.
    """

    layer: int
    tau: float = 2.0
    rho: float = 0.005
    score_loss_weight: float = 0.001
    pooling: Pooling = "auto"
    stop_gradient: bool = False
    detector: Detector = "attention"
    rollout_steps: int = 0
    ablate: Ablation = "none"
    mask_rule: MaskRule = "paper"
    order: Order = "in_place"
    non_finite: NonFinite = "fail"

    def __post_init__(self) -> None:
        if type(self.layer) is not int or self.layer < 0:
            raise ValueError(f"htm.layer={self.layer!r}: must be a block's index, 0 or more")
        for name in ("tau", "rho", "score_loss_weight"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"htm.{name}={value!r}: must be a number")
        if type(self.stop_gradient) is not bool:
            raise ValueError(f"htm.stop_gradient={self.stop_gradient!r}: must be True or False")
        if not self.tau >= 0:
            raise ValueError(f"htm.tau={self.tau}: must be >= 0 (inf is allowed)")
        if not (0 <= self.rho <= 1 or self.rho == math.inf):
            raise ValueError(f"htm.rho={self.rho}: must lie in 0..1, or be inf")
        if not 0 <= self.score_loss_weight < math.inf:
            raise ValueError(
                f"htm.score_loss_weight={self.score_loss_weight}: must be >= 0 and finite"
            )
        choices = (Pooling, Detector, Ablation, MaskRule, Order, NonFinite)
        names = ("pooling", "detector", "ablate", "mask_rule", "order", "non_finite")
        for name, choice in zip(names, choices, strict=True):
            if (value := getattr(self, name)) not in (allowed := get_args(choice)):
                raise ValueError(f"htm.{name}={value!r}: must be one of {', '.join(allowed)}")
        if type(self.rollout_steps) is not int or self.rollout_steps < 0:
            raise ValueError(f"htm.rollout_steps={self.rollout_steps!r}: must be 0 or more blocks")
        if self.rollout_steps > 0 and self.detector != "attention":
            raise ValueError(
                f"htm.rollout_steps={self.rollout_steps}: belongs to detector=attention, "
                f"not to {self.detector}"
            )


class HorizontalMix(NamedTuple):
    """What mix_horizontal returns; the batch keeps its order."""

    tokens: Tensor  # b n d
    targets: Tensor  # b c
    donor: Tensor  # b int64, donor[i] == i for hard samples
    mask: Tensor  # b t bool, True = taken from the donor (the paper's 1 - M)
    keep_ratio: Tensor  # b 1, weight of a sample's own label
    moved: Tensor  # 2 r int64, as moved_rows tells: on a CPU of replaced tokens, elsewhere of all


@torch.no_grad()
def optimal_donors(
    saliency: Tensor, is_easy: Tensor, rho: float, non_finite: NonFinite = "fail"
) -> Tensor:
    """The donor of every sample by optimal assignment (Eq. 6 and 7), itself where it is hard.

    `saliency`: `b t`, `is_easy`: `b` bool. Returns `b` int64. Where a gain is not finite, raises
    FloatingPointError or, with `skip`, gives every sample itself.
    """
    gain = gain_matrix(saliency, rho)  # b b
    on_host = _copy_to_host(torch.cat([gain, is_easy[:, None].to(gain.dtype)], dim=1))
    easy = on_host[:, -1].bool()
    donor, offered = torch.arange(len(gain)), on_host[easy, :-1]
    if non_finite == "fail" or offered.isfinite().all():
        donor[easy] = optimal_assignment(offered)
    return donor.to(gain.device, non_blocking=True)


def _copy_to_host(x: Tensor) -> Tensor:
    """On a GPU one asynchronous copy into pinned memory, then a wait for the stream."""
    copy = x.to("cpu", non_blocking=x.is_cuda)
    if x.is_cuda:
        torch.cuda.current_stream(x.device).synchronize()
    return copy


def gaining_tokens(saliency: Tensor, donor: Tensor, is_easy: Tensor, rho: float) -> Tensor:
    """Tokens whose donor is more salient by more than rho (Eq. 9, `eq:mask`): `b t` bool."""
    return is_easy[:, None] & (saliency[donor] - saliency > rho)


def saliency_ratio(own: Tensor, taken: Tensor, mask: Tensor) -> Tensor:
    """Kept saliency over kept plus taken saliency, 1 where nothing is taken (Eq. 11): `b 1`.

    `own`, `taken`: `b t`, saliency of the sample and of its donor.
    """
    kept_sum = own.masked_fill(mask, 0).sum(dim=1, keepdim=True)
    taken_sum = taken.masked_fill(~mask, 0).sum(dim=1, keepdim=True)
    return torch.where(taken_sum > 0, kept_sum / (kept_sum + taken_sum), 1.0)


def moved_rows(donor: Tensor, mask: Tensor, n: int, every: bool) -> Tensor:
    """Which of all `b n` rows are written, and below each one the row it is read from: `2 r` int64.

    `donor`: `b`, `mask`: `b t` bool. Without `every` they are the rows of replaced tokens, whose
    number depends on the data, so that a GPU would have to wait for it. With `every` they are all
    rows in order, of which those that stay are read from themselves.
    """
    replace = F.pad(mask, (n - mask.shape[1], 0))
    if not every:
        sample, place = replace.nonzero(as_tuple=True)
        return torch.stack([sample, donor[sample]]) * n + place
    sample = torch.arange(len(mask), device=mask.device)[:, None].expand_as(replace)
    giver = torch.where(replace, donor[:, None], sample)
    return (torch.stack([sample, giver]) * n + torch.arange(n, device=mask.device)).flatten(1)


def take_from_donors(tokens: Tensor, moved: Tensor, in_place: bool = False) -> Tensor:
    """Tokens, or what is projected from them, `b n d`, those of `moved_rows` by donors (Eq. 10).

    `in_place` may write into `tokens`.
    """
    (written, read), rows = moved, tokens.flatten(0, 1)
    taken = rows.index_select(0, read)
    if len(written) < len(rows):
        taken = (rows.index_copy_ if in_place else rows.index_copy)(0, written, taken)
    return taken.view_as(tokens)


def mix_horizontal(
    tokens: Tensor,
    targets: Tensor,
    saliency: Tensor,
    is_easy: Tensor,
    rho: float,
    *,
    pair: Callable[[Tensor, Tensor, float], Tensor] = optimal_donors,
    choose: Callable[[Tensor, Tensor, Tensor, float], Tensor] = gaining_tokens,
    weigh: Callable[[Tensor, Tensor, Tensor], Tensor] = saliency_ratio,
) -> HorizontalMix:
    """Mixes tokens and labels of the easy samples in place of the batch, Algorithm 1, lines 4-8.

    `tokens`: `b n d`, `targets`: `b c`, `saliency`: `b t`, `is_easy`: `b` bool. Every easy sample
    is matched with a donor of its own; a spatial token is replaced when the donor's saliency
    exceeds its own by more than rho (Eq. 9, `eq:mask`, and 10, `eq:mix_x`); labels follow the
    saliency that was kept and taken (Eq. 11, `eq:mix_y`) and stay where both are 0. The first
    `n - t` tokens, the prefix, stay. `pair`, `choose`, `weigh`: the three rules, where they are not
    the paper's. Raises ValueError if `t > n`, FloatingPointError if a gain is not finite.
    """
    if saliency.shape[1] > tokens.shape[1]:
        raise ValueError(f"saliency of {saliency.shape[1]} tokens, but {tokens.shape[1]} to mix")
    saliency = saliency.detach().float()
    targets = targets if targets.is_floating_point() else targets.float()
    donor = pair(saliency, is_easy, rho)
    mask = choose(saliency, donor, is_easy, rho)
    moved = moved_rows(donor, mask, tokens.shape[1], every=mask.device.type != "cpu")
    mixed = take_from_donors(tokens, moved)
    keep_ratio = weigh(saliency, saliency[donor], mask).to(targets.dtype)
    mixed_targets = keep_ratio * targets + (1 - keep_ratio) * targets[donor]
    return HorizontalMix(mixed, mixed_targets, donor, mask, keep_ratio, moved)
