import math

import pytest
import torch

from tokenmixup import ScoreNet, difficulty
from tokenmixup.scorenet import sequence_pool


def test_difficulty_is_cross_entropy_in_nats():
    logits = torch.tensor([[0.0, 0.0], [20.0, 0.0]])
    targets = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    torch.testing.assert_close(difficulty(logits, targets), torch.tensor([math.log(2), 0.0]))


def test_difficulty_of_a_soft_target_includes_its_entropy():
    targets = torch.tensor([[0.7, 0.3]])
    expected = -(targets * targets.log()).sum()
    torch.testing.assert_close(difficulty(targets.log(), targets)[0], expected)


@pytest.mark.parametrize(
    ("keep", "smoothing", "floor"),
    [(1.0, 0.0, 0.0), (1.0, 0.1, 0.5003), (0.5, 0.0, math.log(2)), (0.5, 0.1, 1.0828)],
)
def test_excess_leaves_out_the_floor_of_the_difficulty(keep: float, smoothing: float, floor: float):
    """The entropy of a label of 10 classes, smoothed and mixed with another class."""
    targets = torch.full((1, 10), smoothing / 10)
    targets[0, 0] += keep * (1 - smoothing)
    targets[0, 1] += (1 - keep) * (1 - smoothing)
    logits, best = torch.randn(1, 10), (targets + 1e-12).log()
    assert difficulty(best, targets).item() == pytest.approx(floor, abs=1e-4)
    assert 0 <= difficulty(best, targets, "excess").item() < 1e-6
    gap = difficulty(logits, targets) - difficulty(logits, targets, "excess")
    assert gap.item() == pytest.approx(floor, abs=1e-4)


def test_difficulty_is_float32_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        logits = torch.nn.Linear(4, 3)(torch.randn(2, 4))
        assert logits.dtype == torch.bfloat16
        assert difficulty(logits, torch.eye(3)[:2]).dtype == torch.float32


@pytest.mark.parametrize("pooling", ["attention", "average", "class_token"])
def test_scorenet_pools_as_named(pooling: str):
    net = ScoreNet(8, 3, pooling)
    tokens = torch.randn(2, 5, 8)
    spatial = tokens[:, 1:]
    if pooling == "attention":
        assert net.pool is not None
        weight = net.pool(spatial).softmax(dim=1)
        pooled = (weight * spatial).sum(dim=1)
    else:
        pooled = spatial.mean(dim=1) if pooling == "average" else tokens[:, 0]
    torch.testing.assert_close(net(tokens, 1), net.head(pooled))


def test_scorenet_has_the_published_size():
    assert sum(p.numel() for p in ScoreNet(256, 100).parameters()) == 25_957


def test_scorenet_refuses_a_class_token_that_is_not_there():
    with pytest.raises(ValueError, match="class token"):
        ScoreNet(8, 3, "class_token")(torch.zeros(2, 5, 8))


def test_sequence_pool_is_the_mean_by_softmax_of_the_scores():
    torch.manual_seed(0)
    tokens, score = torch.randn(3, 5, 8), torch.nn.Linear(8, 1)
    expected = (score(tokens).softmax(dim=1) * tokens).sum(dim=1)
    torch.testing.assert_close(sequence_pool(tokens, score), expected)
