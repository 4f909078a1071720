"""The latency of Table 3 times the same operations as a training step."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from reproduction.config import Config
from reproduction.models.build import build_module
from reproduction.reporting.trained import block_inputs
from reproduction.studies.study import Settings
from reproduction.system.errors import UserError
from scripts.benchmark import latency
from scripts.benchmark.latency import detector_works, measure_latency, mix

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def narrow() -> dict[str, Config]:
    """Maps each detector to the config of a narrow model."""
    configs = latency.detector_configs(Settings(scale="smoke"))
    return {
        name: dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, embed_dim=16, depth=4, image_size=16),
            recipe=dataclasses.replace(config.recipe, batch_size=4),
        )
        for name, config in configs.items()
    }


@pytest.mark.parametrize("detector", ["gradient", "attention"])
def test_mix_equals_the_mixing_of_a_training_pass(narrow: dict[str, Config], detector: str):
    config = narrow[detector]
    module = build_module(config.model, config.augmentation, 5)
    module.model.eval()
    images, targets = torch.randn(6, 3, 16, 16), torch.eye(5)[torch.arange(6) % 5]
    (*_, entry) = block_inputs(module.model, images, config.augmentation.htm.layer)
    result, expected = mix(module, images, targets, entry), module.mixed_pairs(images, targets)
    assert result.mask.any()
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("detector", latency.TIMED_DETECTORS)
def test_timed_step_mixes_every_sample_and_computes_saliency_once(narrow, detector, monkeypatch):
    calls = []
    of_gradient, of_attention = latency.input_gradient, "tokenmixup.module.received"
    own = sys.modules["tokenmixup.module"].received
    monkeypatch.setattr(latency, "input_gradient", lambda *a: calls.append(1) or of_gradient(*a))
    monkeypatch.setattr(of_attention, lambda *a: calls.append(1) or own(*a))
    step = detector_works(narrow, 5, CPU, "float32")[detector]
    for _ in range(2):
        result = step()
        assert result.mask.any(dim=1).all()
        assert result.tokens.requires_grad
    assert len(calls) == 2


def test_measure_latency_writes_settings_and_results(narrow, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(latency, "detector_configs", lambda settings: narrow)
    path = measure_latency(Settings(scale="smoke", outputs=str(tmp_path)), "cpu")
    assert path == tmp_path / "smoke" / "latency.json"
    content = json.loads(path.read_text())
    assert (content["batch_size"], content["repeats"], content["model"]) == (4, 5, "cct_7_3x1")
    assert (content["device"], content["precision"]) == ("cpu", "float32")
    assert content["torch"] == torch.__version__ and "core" in content["hardware"]
    assert list(content["detectors"]) == ["attention", "gradient", "random"]
    for ms in content["detectors"].values():
        assert 0 < ms["low_ms"] <= ms["median_ms"] <= ms["high_ms"]


def test_detector_configs_are_those_of_table_3_with_every_sample_mixed():
    configs = latency.detector_configs(Settings())
    for name, config in configs.items():
        htm = config.augmentation.htm
        assert (htm.detector, htm.tau, htm.rho) == (name, float("inf"), 0.0)
        assert (config.model.name, config.recipe.batch_size) == ("cct_7_3x1", 128)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_measure_latency_refuses_a_missing_gpu(tmp_path: Path):
    with pytest.raises(UserError, match="device=cuda"):
        measure_latency(Settings(outputs=str(tmp_path)), "cuda")
