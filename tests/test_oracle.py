"""The oracle equals the written-out definitions, and training steps equal the oracle's.

tests/tokenmixup/test_attach.py compares complete models with it.
"""

import pytest
import torch

from reproduction.config import Config
from reproduction.training.loop import Trainer
from scripts.benchmark.trainers import sharp_trainer, step_config, step_of
from tests.oracle import Oracle, gain_by_repetition, mix, most_salient
from tokenmixup import gain_matrix, training_loss

CPU = torch.device("cpu")


def oracle_trainer(config: Config, device: torch.device) -> Trainer:
    """A `sharp_trainer` that trains with the oracle, in torch's default memory format."""
    trainer = sharp_trainer(config, device)
    trainer.module.to(memory_format=torch.contiguous_format)
    trainer.parallel = Oracle(trainer.module)
    return trainer


@pytest.mark.parametrize("rho", [0.0, 0.02, float("inf")])
def test_gain_forms_equal_the_written_out_sum(rho: float):
    saliency = torch.randn(5, 7).softmax(dim=1)
    expected = torch.zeros(5, 5)
    for i in range(5):
        for j in range(5):
            expected[i, j] = sum(
                max(float(d - r) - rho, 0) for d, r in zip(saliency[j], saliency[i], strict=True)
            )
    for form in (gain_matrix, gain_by_repetition):
        torch.testing.assert_close(
            form(saliency, rho), expected, atol=1e-6, rtol=1e-5, check_dtype=False
        )
    assert gain_by_repetition(saliency, rho).shape == (5, 5)


def test_mix_by_hand():
    """Sample 0 takes token 1 of sample 1, hard sample 1 stays; token values identify the sample."""
    saliency = torch.tensor([[0.6, 0.1, 0.3], [0.1, 0.8, 0.1]])
    tokens = torch.tensor([[9.0, 1.0, 2.0, 3.0], [8.0, 4.0, 5.0, 6.0]])[..., None]
    is_easy = torch.tensor([True, False])
    found = mix(tokens, torch.eye(2), saliency, is_easy, 0.1, prefix=1)
    x, targets, mixed_saliency, mask, donor = found
    assert donor.tolist() == [1, 1]
    assert x[..., 0].tolist() == [[9, 1, 5, 3], [8, 4, 5, 6]]
    assert mask.tolist() == [[False, True, False], [False] * 3]
    torch.testing.assert_close(mixed_saliency[0], torch.tensor([0.6, 0.8, 0.3]))
    torch.testing.assert_close(targets[0], torch.tensor([0.9 / 1.7, 0.8 / 1.7]))
    assert targets[1].tolist() == [0, 1]


def test_most_salient_excludes_the_prefix():
    tokens = torch.tensor([[9.0, 1.0, 2.0, 3.0]])[..., None]
    chosen = most_salient(tokens, torch.tensor([[0.2, 0.1, 0.7]]), 2, prefix=1)
    assert chosen.flatten().tolist() == [3, 1]


def test_oracle_trains_every_weight_in_low_precision():
    """Autocast may cache a cast without gradient while saliency is computed.

    The projections of those blocks would then get no gradient, and the oracle would seem faster.
    """
    oracle = Oracle(sharp_trainer(step_config("cct_2_3x2", ["htm", "vtm"], "bf16"), CPU).module)
    with torch.autocast("cpu", torch.bfloat16):
        output = oracle(torch.randn(4, 3, 32, 32), torch.eye(10)[:4])
    training_loss(output, 0.1).backward()
    for name, parameter in oracle.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("stack", [[], ["htm"], ["vtm"], ["htm", "vtm"]], ids=str)
def test_three_training_steps_equal_the_oracle(stack: list[str]):
    """Includes stochastic depth, gradient clipping and the optimiser."""
    config = step_config("cct_2_3x2", stack, "float32")
    step, expected_step = (
        step_of(build(config, CPU), batch_size=4) for build in (sharp_trainer, oracle_trainer)
    )
    mixed_tokens = []
    for _ in range(3):
        (ours,), (theirs,) = ([part.output for part in each()] for each in (step, expected_step))
        torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.targets, theirs.targets, atol=1e-5, rtol=1e-4)
        mixed_tokens.append(ours.stats["mixed_tokens"])
    assert all(number > 1 for number in mixed_tokens) == ("htm" in stack)
