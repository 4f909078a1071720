"""The number of loader workers that a training step needs."""

from typing import Any

import pytest

from scripts.benchmark.pipeline import FEEDS, FILES, PHOTOS, SMALL, workers_needed


def report_of(device: str, steps: dict[str, float]) -> dict[str, Any]:
    """A report where workers load 100 images/s each and plain steps consume `steps` images/s."""
    loads = {name: {"images_per_second": 100.0} for name in FEEDS}
    groups = [
        {"title": f"training step: {title}", "rows": {"plain": {"images_per_second": speed}}}
        for title, speed in steps.items()
    ]
    sections: dict[str, Any] = {"pipeline": [{"rows": loads}]}
    if steps:
        sections["steps"] = groups
    return {"machine": {"device": device}, "sections": sections}


def test_workers_needed_counts_workers_to_match_the_step():
    steps = {"cct_7_3x1, batch of 128": 1001.0, "vit_base_patch16_224, batch of 128": 900.0}
    rows = workers_needed(report_of("cuda", steps))["rows"]
    workers = {name: row["workers"] for name, row in rows.items()}
    assert workers == {
        f"cct_7_3x1, batch of 128, cuda: {SMALL}": 11,
        f"vit_base_patch16_224, batch of 128, cuda: {FILES}": 9,
        f"vit_base_patch16_224, batch of 128, cuda: {PHOTOS}": 9,
    }


def test_workers_needed_leaves_gpu_rows_unmeasured_on_a_cpu():
    rows = workers_needed(report_of("cpu", {"cct_7_3x1, batch of 16": 90.0}))["rows"]
    assert rows[f"cct_7_3x1, batch of 16, cpu: {SMALL}"] == {
        "images_per_second": 90.0,
        "workers": 1,
    }
    assert rows[f"cct_7_3x1, cuda: {SMALL}"] == {"images_per_second": None, "workers": None}
    assert rows[f"vit_base_patch16_224, cpu: {FILES}"]["workers"] is None


@pytest.mark.parametrize(("device", "rows"), [("cpu", 6), ("cuda", 3)])
def test_workers_needed_without_steps_measures_nothing(device: str, rows: int):
    unmeasured = workers_needed(report_of(device, {}))["rows"]
    assert len(unmeasured) == rows
    assert all(row["images_per_second"] is None for row in unmeasured.values())
