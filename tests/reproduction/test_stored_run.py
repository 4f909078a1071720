"""Runs that earlier revisions have begun, tests/fixtures/run_of_REVISION, go on with this code.

Each was stopped after 4 of 6 steps; run_of_REVISION.jsonl are the lines of the undisturbed one.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.doors import (
    ROOT,
    Run,
    as_recorded,
    assert_same_lines,
    assert_succeeded,
    evaluate,
    load_run,
    script,
    train,
    words_of,
)

FIXTURES = ROOT / "tests" / "fixtures"
WORDS = words_of("""
    model.embed_dim=8 dataset.limit=60 dataset.eval_limit=60 recipe.batch_size=20
    recipe.epochs=2 recipe.ema_decay=0.8 recipe.log_every=1 recipe.lr=0.01
    augmentation=[mixup,cutmix,htm,vtm] augmentation.htm.tau=2.4 augmentation.htm.rho=0
    checkpoint.every_epochs=1 device=cpu dataset.workers=0 resume=auto recipe.drop_last=false
""")


@pytest.fixture(params=["2e7fa4c", "d623b8a4"])
def revision(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def stored(here: Path, revision: str) -> Run:
    """The folder under the name that it had."""
    fixture = FIXTURES / f"run_of_{revision}"
    name = json.loads((fixture / "summary.json").read_text())["name"]
    return Run(shutil.copytree(fixture, here / "outputs" / name))


def test_a_stored_run_is_found_and_resumed_to_its_recorded_end(stored: Run, revision: str):
    assert_succeeded(train(WORDS), "resuming after step 4")
    assert [path.name for path in Path("outputs").iterdir()] == [stored.path.name]
    text = (FIXTURES / f"run_of_{revision}.jsonl").read_text()
    recorded = [json.loads(line) for line in text.splitlines()]
    assert_same_lines([*map(as_recorded, stored.lines)], recorded, rel=1e-4)
    assert stored.summary["status"] == "finished"


def test_what_a_stored_run_has_called_mixed_samples_are_easy_ones(stored: Run, revision: str):
    """Also in the epoch in which it goes on, and after it."""
    assert_succeeded(train(WORDS))
    easy = [as_recorded(line)["mixed_samples"] for line in stored.steps]
    assert stored.summary["easy_share"] == round(sum(easy) / 120, 4)
    assert stored.summary["easy_samples"] == sum(easy[3:]) / 3
    for name in ("mixed_share", "mixed_samples", "mixed_tokens"):
        assert stored.summary[name] is None
    starts = [start["git_revision"] for start in stored.summary["starts"]]
    assert len(starts) == 2
    assert starts[0].startswith(revision)
    table = script("runs", "outputs").out
    assert "| easy [%] |" in " ".join(table.split())
    assert "mixed [%]" not in table


def test_a_stored_run_is_evaluated_and_stands_in_a_table(stored: Run):
    for weights in ("last", "best"):
        assert_succeeded(evaluate(f"run={stored.path}", f"weights={weights}"))
    (epoch,) = stored.epochs
    loss = stored.evaluation("best")["eval_loss"]
    assert loss == pytest.approx(epoch["eval_loss"], rel=1e-4)
    assert len(load_run(stored.path).classes) == 10
    assert_succeeded(script("runs", "outputs"), "interrupted after epoch 1 of 2")
    assert_succeeded(train(WORDS))
    top1 = stored.summary["top1_last"]
    assert_succeeded(script("runs", "outputs"), "1 finished", f"{top1:.2f}")
