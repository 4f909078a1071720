"""A finished run, for tests that read runs or copy them with other settings."""

import pytest

from tests.programs import SMALL, Run, trained


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of one step, of which `finished.write` makes others."""
    root = tmp_path_factory.mktemp("model")
    return trained(SMALL, "augmentation=[htm]", "recipe.max_steps=1", root=root)
