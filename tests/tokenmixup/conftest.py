"""A batch of `small_vit`."""

import pytest
from torch import Tensor

from tests.conftest import drawn_batch


@pytest.fixture
def images() -> Tensor:
    images, _ = drawn_batch(6, 32)
    return images


@pytest.fixture
def targets() -> Tensor:
    """Soft ones."""
    _, targets = drawn_batch(6, 32)
    return targets
