"""`pytest tests/gpu` runs on a CPU at tiny size, `pytest tests/gpu --device cuda` on a GPU."""

import pytest
import torch

from reproduction.errors import UserError
from reproduction.training.ranks import resolve_device


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="of tests/gpu")


def device_of(config: pytest.Config) -> str:
    """`--device`; cpu if tests/gpu is only a part of the tests, which do not have the option."""
    return config.getoption("device", "cpu")


def pytest_configure(config: pytest.Config) -> None:
    """Refuses a missing GPU before any test."""
    try:
        resolve_device(device_of(config), 1)
    except UserError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(device_of(request.config))


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """The GPU; skips the test on a CPU."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device
