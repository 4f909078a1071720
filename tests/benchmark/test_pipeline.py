"""Workers that feed a training step."""

from typing import Any

import pytest

from scripts.benchmark.pipeline import FEEDS, FILES, PHOTOS, SMALL, workers_needed


def report_of(device: str, steps: dict[str, float]) -> dict[str, Any]:
    """Of workers that load 100 images/s, and plain steps that consume so many."""
    loads = {name: {"images_per_second": 100.0} for name in FEEDS}
    groups = [
        {"title": f"training step: {title}", "rows": {"plain": {"images_per_second": speed}}}
        for title, speed in steps.items()
    ]
    sections: dict[str, Any] = {"pipeline": [{"rows": loads}]}
    if steps:
        sections["steps"] = groups
    return {"machine": {"device": device}, "sections": sections}


def test_a_step_needs_the_workers_that_load_as_much_as_it_consumes():
    steps = {"cct_7_3x1, batch of 128": 1001.0, "vit_base_patch16_224, batch of 128": 900.0}
    rows = workers_needed(report_of("cuda", steps))["rows"]
    workers = {name: row["workers"] for name, row in rows.items()}
    assert workers == {
        f"cct_7_3x1, batch of 128, cuda: {SMALL}": 11,
        f"vit_base_patch16_224, batch of 128, cuda: {FILES}": 9,
        f"vit_base_patch16_224, batch of 128, cuda: {PHOTOS}": 9,
    }


def test_what_a_gpu_consumes_is_never_told_from_a_cpu():
    rows = workers_needed(report_of("cpu", {"cct_7_3x1, batch of 16": 90.0}))["rows"]
    assert rows[f"cct_7_3x1, batch of 16, cpu: {SMALL}"] == {
        "images_per_second": 90.0,
        "workers": 1,
    }
    assert rows[f"cct_7_3x1, cuda: {SMALL}"] == {"images_per_second": None, "workers": None}
    assert rows[f"vit_base_patch16_224, cpu: {FILES}"]["workers"] is None


@pytest.mark.parametrize(("device", "rows"), [("cpu", 6), ("cuda", 3)])
def test_without_steps_nothing_is_measured(device: str, rows: int):
    found = workers_needed(report_of(device, {}))["rows"]
    assert len(found) == rows
    assert all(row["images_per_second"] is None for row in found.values())
